"""Findings about the models themselves: the loss around them, its curvature, their layers."""

from __future__ import annotations

from collections.abc import Iterable

from consilium.analysis import figures, hessian, loss_surface, sharp_figures, similarity, steepness
from consilium.analysis.finding import Finding, Options, Say, as_json, in_words
from consilium.analysis.opening import Runs


def of_loss_surface(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure, on one site's cases."""
    site = options.site or runs.opened[0].members[0]
    found = loss_surface.site_surfaces(
        runs.opened, site, options.radius, options.points, options.directions, options.seed, options.filterwise, say
    )
    radius = next(surface.steps[-1] for by in found.values() for surface in by.values())
    rises = in_words(found, lambda one: f"{one.centre:.3f} + {one.rise:.3f}")
    yield Finding(
        f"loss-surface-{site}",
        f"Loss around the models, on {site}'s cases",
        f"Loss at the model + its mean rise at distance {radius:g}. {rises}",
        {
            "site": site,
            "seed": options.seed,
            "filterwise": options.filterwise,
            "models": as_json(found),
        },
        {f"loss-surface-{site}": figures.loss_surfaces(found, site, options.filterwise)},
    )


def of_landscape(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs and sites in one figure."""
    found = loss_surface.site_planes(
        runs.opened, _sites(runs, options), options.cases, options.radius, options.points, options.seed,
        options.filterwise, say,
    )  # fmt: skip
    rises = in_words(found, lambda one: f"{one.centre:.3f} + {one.rise:.3f}")
    yield Finding(
        "landscape",
        "Loss around the models, site by site",
        f"Training loss at the model + its mean rise at the edge of the square. {rises}",
        {"sites": as_json(found)},
        {"landscape": sharp_figures.landscapes(found)},
    )


def of_hessian(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs and sites together."""
    found = hessian.site_curvatures(runs.opened, _sites(runs, options), options.cases, options.seed, say)
    words = in_words(found, lambda one: f"{one.largest[0]:.3g}")
    yield Finding(
        "hessian",
        "How curved the loss is",
        f"Largest eigenvalue of the Hessian of the training loss, about {options.cases} cases each. {words}",
        {"sites": as_json(found)},
        {"hessian": sharp_figures.spectra(found)},
        hessian.to_markdown(found),
    )


def of_steepness(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    found = steepness.site_steepness(runs.opened, _sites(runs, options), options.cases, options.seed)
    words = in_words(found, lambda one: f"{100 * one.steep:.0f} %")
    yield Finding(
        "steepness",
        "Which gradients the ascent changes",
        f"Share of parameters whose gradient changes by more than its own size. {words}",
        {"sites": as_json(found)},
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
