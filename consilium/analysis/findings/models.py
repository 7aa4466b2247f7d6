"""Findings about the models themselves: the loss around them, its curvature, their layers."""

from __future__ import annotations

from collections.abc import Iterable

from consilium.analysis import figures, hessian, loss_surface, sharp_figures, similarity, steepness
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs


def of_loss_surface(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure, on one site's cases."""
    site = options.site or runs.opened[0].members[0]
    found = loss_surface.site_surfaces(
        runs.opened, site, options.radius, options.points, options.directions, options.seed, options.filterwise, say
    )
    radius = next(surface.steps[-1] for by in found.values() for surface in by.values())
    rises = "; ".join(
        f"{name}: " + ", ".join(f"{split} {surface.centre:.3f} + {surface.rise:.3f}" for split, surface in by.items())
        for name, by in found.items()
    )
    yield Finding(
        f"loss-surface-{site}",
        f"Loss around the models, on {site}'s cases",
        f"Loss at the model + its mean rise at distance {radius:g}. {rises}",
        {
            "site": site,
            "seed": options.seed,
            "filterwise": options.filterwise,
            "models": {name: {s: surface.to_json() for s, surface in by.items()} for name, by in found.items()},
        },
        {f"loss-surface-{site}": figures.loss_surfaces(found, site, options.filterwise)},
    )


def of_landscape(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs and sites in one figure."""
    found = loss_surface.site_planes(
        runs.opened, _sites(runs, options), options.cases, options.radius, options.points, options.seed,
        options.filterwise, say,
    )  # fmt: skip
    rises = "; ".join(
        f"{site}: " + ", ".join(f"{name} {one.centre:.3f} + {one.rise:.3f}" for name, one in by.items())
        for site, by in found.items()
    )
    yield Finding(
        "landscape",
        "Loss around the models, site by site",
        f"Training loss at the model + its mean rise at the edge of the square. {rises}",
        {"sites": {site: {name: one.to_json() for name, one in by.items()} for site, by in found.items()}},
        {"landscape": sharp_figures.landscapes(found)},
    )


def of_hessian(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs and sites together."""
    found = hessian.site_curvatures(runs.opened, _sites(runs, options), options.cases, options.seed, say)
    words = "; ".join(
        f"{site}: " + ", ".join(f"{name} {one.largest[0]:.3g}" for name, one in by.items())
        for site, by in found.items()
    )
    yield Finding(
        "hessian",
        "How curved the loss is",
        f"Largest eigenvalue of the Hessian of the training loss, about {options.cases} cases each. {words}",
        {"sites": {site: {name: one.to_json() for name, one in by.items()} for site, by in found.items()}},
        {"hessian": sharp_figures.spectra(found)},
        hessian.to_markdown(found),
    )


def of_steepness(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    found = steepness.site_steepness(runs.opened, _sites(runs, options), options.cases, options.seed)
    words = "; ".join(
        f"{site}: " + ", ".join(f"{name} {100 * one.steep:.0f} %" for name, one in by.items())
        for site, by in found.items()
    )
    yield Finding(
        "steepness",
        "Which gradients the ascent changes",
        f"Share of parameters whose gradient changes by more than its own size. {words}",
        {"sites": {site: {name: one.to_json() for name, one in by.items()} for site, by in found.items()}},
        {"steepness": sharp_figures.steep(found)},
    )


def of_similarity(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """Several runs: the first beside the others. One run: its model beside what sites make of it in one more round."""
    site = options.site or runs.opened[0].members[0]
    if len(runs.opened) > 1:
        beside, found = similarity.between_runs(runs.opened, site, options.cases)
    else:
        beside, found = "the shared model", similarity.after_a_round(runs.opened[0], site, options.cases, say)
    least = {name: min(by, key=by.__getitem__) for name, by in found.items()}
    words = "; ".join(f"{name} least in {layer} ({found[name][layer]:.2f})" for name, layer in least.items())
    yield Finding(
        f"similarity-{site}",
        f"Layer by layer beside {beside}, on {site}'s cases",
        f"Linear CKA; 1 is the same up to a rotation. {words}",
        {"site": site, "beside": beside, "layers": found},
        {f"similarity-{site}": sharp_figures.similarity(found, beside)},
    )


def _sites(runs: Runs, options: Options) -> list[str]:
    return [options.site] if options.site else runs.opened[0].members
