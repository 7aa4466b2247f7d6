"""Which analyses suit which runs, and the files they leave: figures, numbers as JSON, tables as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilium.analysis import (
    ablation,
    agreement,
    features,
    figures,
    gallery,
    hessian,
    label_curves,
    loss_surface,
    overlays,
    progress,
    pseudo_labels,
    relation_figures,
    relationships,
    schedules,
    sharp_figures,
    similarity,
    steepness,
    sweeps,
)
from consilium.analysis.opening import Runs
from consilium.errors import RunError, StudyError, UserError
from consilium.fields import nearest
from consilium.method import timeline
from consilium.methods.ufps import UFPS
from consilium.reports.figures import relation_map, to_bytes
from consilium.reports.grouping import groups
from consilium.reports.reading import RunView
from consilium.reports.tables import called
from consilium.store import write_json
from consilium.study import load_study
from consilium.tasks.segmentation import Segmentation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What an analysis may be told; the defaults suit a first look."""

    site: str | None = None  # whose cases, whose relationships; None: the first site
    radius: float | None = None  # of the loss surface; None: half the length of the first model
    points: int = 21
    directions: int = 10
    seed: int = 0
    filterwise: bool = False
    layout: str = "tsne"  # of the features; "pca" is fast
    cases: int = 16  # about so many training cases of a site, for what needs gradients or many passes


@dataclass(frozen=True)
class Finding:
    """What one analysis found; `caption` says it to those who cannot see the figures."""

    name: str  # of its files
    title: str
    caption: str
    numbers: Mapping[str, Any]
    figures: Mapping[str, Figure]  # by file name without suffix
    table: str = ""  # Markdown
    run: Path | None = None  # the run it is about; None: all of them together


@dataclass(frozen=True)
class Analysis:
    """How an analysis is made, and for which of the given runs it is made unasked; long ones never are."""

    make: Callable[[Runs, Options, Say], Iterable[Finding]]
    suits: Callable[[Runs], bool]


def analyse(
    paths: Sequence[Path],
    what: Sequence[str] = (),
    to: Path | None = None,
    options: Options | None = None,
    say: Say = lambda _: None,
) -> list[Path]:
    """Make the analyses named, or all that suit the runs; returns the files written.

    They go into `to`, else into `analysis/` of the run they are about (of several together: of the first).
    """
    for name in what:
        if name not in ANALYSES:
            raise StudyError(f"there is no analysis '{name}'; {nearest(name, list(ANALYSES))}")
    runs, options = Runs(paths), options or Options()
    chosen = list(dict.fromkeys(what)) or [name for name, analysis in ANALYSES.items() if analysis.suits(runs)]
    files: list[Path] = []
    for name in chosen:
        for finding in ANALYSES[name].make(runs, options, say):
            mark = f"-{finding.run.name}" if to and finding.run and len(runs.paths) > 1 else ""
            files += write(name, finding, to or (finding.run or runs.paths[0]) / "analysis", mark)
    return files


def write(analysis: str, finding: Finding, folder: Path, mark: str = "") -> list[Path]:
    """The files of one finding; `mark` tells apart those of several runs in one folder."""
    files: dict[Path, bytes] = {}
    for name, figure in finding.figures.items():
        files[folder / f"{name}{mark}.svg"] = to_bytes(figure, "svg")
        files[folder / f"{name}{mark}.png"] = to_bytes(figure, "png")
    if finding.table:
        files[folder / f"{finding.name}{mark}.md"] = finding.table.encode()
    facts = {
        "analysis": analysis,
        "title": finding.title,
        "caption": finding.caption,
        "figures": [f"{name}{mark}.svg" for name in finding.figures],
        **finding.numbers,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in files.items():
            path.write_bytes(data)
        write_json(facts, folder / f"{finding.name}{mark}.json")
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror or error}; choose another place with --to."
        ) from error
    return [*files, folder / f"{finding.name}{mark}.json"]


# --------------------------------------------------------------------------------------------------- the analyses


def _gallery(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """Once for every federation among the runs."""
    once = {(run.federation.folder, tuple(run.sites)): run for run in reversed(runs.opened)}
    for run in reversed(once.values()):
        say(f"example images of {len(run.sites)} sites")
        counts = gallery.counts(run)
        yield Finding(
            "gallery",
            "What the sites hold",
            "Cases per site: " + ", ".join(f"{site} {gallery.total(row).cases}" for site, row in counts.items()),
            gallery.to_json(counts, run.guests),
            {
                "gallery": figures.gallery(gallery.examples(run), counts),
                "counts": figures.count_bars(counts, run.guests),
            },
            gallery.to_markdown(counts, run.guests),
            run.path,
        )


def _loss_surface(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def _features(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    # of runs without a selector the first is asked and says so
    for run in [run for run in runs.opened if run.selects] or runs.opened[:1]:
        say(f"selector features of {run.name}")
        found = features.selector_features(run)
        points = features.laid_out(found.values, options.layout, options.seed)
        facts = features.to_json(found, points, options.layout)
        apart = facts["separation"]
        yield Finding(
            "features",
            "What the selector sees",
            f"{len(found.seen)} cases of {len(run.sites)} sites by the selector's last hidden features"
            + ("" if apart is None else f"; silhouette of the sites {apart:.2f}"),
            facts,
            {"features": figures.feature_map(points, found.seen, options.layout)},
            run=run.path,
        )


def _gamma(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if run.thresholded] or runs.opened[:1]:
        sweep = sweeps.gamma_sweep(run, say)
        at = {split: dict(zip(sweep.grid, means)) for split in sweeps.SPLITS if (means := sweep.site_mean(split))}
        words = [
            f"{split} {means[0.0]:.3f} at γ = 0, {means[sweep.chosen]:.3f} at the run's {sweep.chosen:g}, "
            f"{means[1.0]:.3f} at 1"
            for split, means in at.items()
        ]
        oracle = [f"{site}'s own test cases would like γ = {o.gamma:g}" for site, o in sweep.oracle_gamma.items()]
        yield Finding(
            "gamma",
            "How sure the selector must be",
            "; ".join(["Site means: " + "; ".join(words), *oracle]),
            sweep.to_json(),
            {"gamma": figures.gamma(sweep, called(run.study.task.headline))},
            run=run.path,
        )


def _lambda(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    sweep = sweeps.lambda_sweep(runs.views)
    words = [f"λ = {one.pull:g}: {one.test[sweep.headline]}" for one in sweep.pulls if sweep.headline in one.test]
    yield Finding(
        "lambda",
        "How much a site keeps of its own model",
        f"Test {called(sweep.metric)} of the {sweep.headline} model. {'; '.join(words)}",
        sweep.to_json(),
        {"lambda": figures.pulls(sweep, called(sweep.metric))},
        sweep.to_markdown(),
    )


def _relationships(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for view in [view for view in runs.views if relationships.has_relationships(view)] or runs.views[:1]:
        found = relationships.read_relationships(view)
        site = options.site or next(iter(found.p))
        if site not in found.p:
            raise StudyError(f"there is no site '{site}' with relationships; there are {', '.join(found.p)}.")
        study = load_study(view.folder / "study.toml")
        method: Any = study.method
        fading = [method.fading(round) for _, round in timeline(method, study.plan.rounds)]
        words = [f"{one} {found.own(one)[-1]:.2f} from itself, most else from {found.friend(one)}" for one in found.p]
        yield Finding(
            "relationships",
            "Which hospitals help which",
            "After the last round: " + "; ".join(words),
            found.to_json(),
            {
                "relationships": relation_map(found.matrix(), found.sites),
                f"relationships-{site}": relation_figures.of_one_site(found, site),
                "self-relationships": relation_figures.of_all_selves(found),
                "scheduler": relation_figures.fading(fading, method.scheduler),
            },
            run=view.folder,
        )


def _progress(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure."""
    found = {runs.names[view.folder]: progress.progress_of(view) for view in runs.views}
    about = runs.views[0].headline
    if not about or any(not one.test.rounds for one in found.values()):
        raise RunError("these runs have no test scores by round; set study.score_every below study.rounds.")
    ends = ", ".join(f"{name} {one.test.site_mean[-1]:.3f}" for name, one in found.items())
    yield Finding(
        "progress",
        "Round by round",
        f"Test {called(about.metric)}, mean over sites, in the last round: {ends}",
        {"runs": {name: one.to_json() for name, one in found.items()}},
        {"progress": progress.draw(found, called(about.metric))},
    )


def _landscape(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def _hessian(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def _steepness(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def _similarity(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def _overlays(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs side by side on the first test case of every site."""
    first = runs.opened[0]
    sites = [options.site] if options.site else first.sites
    found = overlays.shown_cases(runs.opened, sites)
    labels, values = first.study.task.labels, overlays.scores(found, first.study.task.labels)
    words = "; ".join(
        f"{site}: " + ", ".join(f"{name} {_mean(by)}" for name, by in runs_.items()) for site, runs_ in values.items()
    )
    drawn = {"overlays": overlays.slices(found, labels)}
    if all(one.volume for one in found):
        drawn["projections"] = overlays.projections(found, labels)
    yield Finding(
        "overlays",
        "What the models draw",
        f"The first test case of every site; mean Dice of its labels. {words}",
        {"labels": list(labels), "cases": {one.site: one.case for one in found}, "dice": values},
        drawn,
    )


def _schedules(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for view in [view for view in runs.views if view.method == "ufps"] or runs.views[:1]:
        method = load_study(view.folder / "study.toml").method
        if not isinstance(method, UFPS):
            raise RunError(f"{view.folder} weighs no cases by their uncertainty; give a run of ufps.")
        found = schedules.of_method(method)
        yield Finding(
            "schedules",
            "How much a case counts by its uncertainty",
            f"Weights in the loss over the rounds of the schedule; this run: {method.scheduler}",
            {"scheduler": method.scheduler, "weights": {kind: dict(by) for kind, by in found.items()}},
            {"schedules": schedules.draw(found, method.scheduler)},
            run=view.folder,
        )


def _labels(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure."""
    first = runs.views[0]
    labels, about = label_curves.labels_of(first), first.headline
    found = {runs.names[view.folder]: label_curves.curves_of(view) for view in runs.views}
    if len(labels) < 2 or about is None:
        raise RunError(f"{first.folder} has one label only; its rounds are what --what progress shows.")
    if not all(found.values()):
        raise RunError("these runs have no scores by round; set study.score_every below study.rounds.")
    words = "; ".join(
        f"{name}: " + ", ".join(f"{label} {curve.site_mean[-1]:.3f}" for label, curve in last.items() if curve.rounds)
        for name, by in found.items()
        for last in [list(by.values())[-1]]
    )
    yield Finding(
        "labels",
        "Label by label, round by round",
        f"{called(about.metric)} in the last round, mean over the sites whose masks show the label. {words}",
        {"runs": {name: label_curves.to_json(by) for name, by in found.items()}},
        {"labels": label_curves.draw(found, labels, called(about.metric))},
    )


def _ablation(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure; those that differ only in their seed are one row."""
    found = ablation.standings(runs.views)
    about = runs.views[0].headline
    what = called(about.metric) if about else ""
    drawn = {"ablation": ablation.bars(found, what)}
    if values := ablation.axes_of(found):
        drawn["radar"] = ablation.radar(values, what)
    words = ", ".join(f"{name} {one.mean.text(3)}" for name, one in found.items())
    yield Finding(
        "ablation",
        "Row by row",
        f"Test {what} at the round best on validation, mean over sites: {words}",
        {"rows": {name: one.to_json() for name, one in found.items()}},
        drawn,
    )


def _pseudo_labels(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if pseudo_labels.teaches(run)] or runs.opened[:1]:
        pseudo_labels.checked(run)
        sites = pseudo_labels.taught_sites(run, options.site)
        say(f"pseudo labels of {run.name}")
        found = pseudo_labels.qualities(run, run.server, sites)
        if not found:
            raise RunError(
                f"{run.name}: the masks of these sites' training cases show only what the sites annotate, so nobody "
                "knows how good the other labels are."
            )
        kept = list(pseudo_labels.by_round(run, sites))
        drawn = {"pseudo-labels": pseudo_labels.bars(found)}
        if len(kept) > 1:
            drawn["pseudo-labels-rounds"] = pseudo_labels.curves(kept, run.study.task.labels)
        worst = min(
            (one.dice, label, site)
            for site, organs in found.items()
            for label, by in organs.items()
            for one in [by[pseudo_labels.TEACHERS]]
            if one.dice is not None
        )
        yield Finding(
            "pseudo-labels",
            "How good the labels are that sites are taught with",
            f"Dice against the hidden masks of the training cases, by the run's best state; the teachers' worst is "
            f"{worst[1]} at {worst[2]}, {worst[0]:.3f}",
            {
                "sites": pseudo_labels.to_json(found),
                "rounds": {
                    str(one.round): {"taught": one.teaches, "sites": pseudo_labels.to_json(one.found)} for one in kept
                },
            },
            drawn,
            pseudo_labels.to_markdown(found),
            run.path,
        )


def _agreement(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for run in [run for run in runs.opened if pseudo_labels.main_teacher(run.study.method)] or runs.opened[:1]:
        found = agreement.examples(run, pseudo_labels.taught_sites(run, options.site))
        words = ", ".join(f"{one.shown.site} {one.words}" for one in found)
        yield Finding(
            "agreement",
            "Where the teachers and the global model agree",
            f"The first training case of every site; the share of the global model's foreground that the teachers "
            f"share: {words}",
            {
                "sites": {
                    one.shown.site: {"case": one.shown.case, "share": one.share, "organs": dict(one.organs)}
                    for one in found
                }
            },
            {"agreement": overlays.slices([one.shown for one in found], run.study.task.labels)},
            agreement.to_markdown(found),
            run.path,
        )


def _has_label_curves(view: RunView) -> bool:
    """Several labels, and more than one round of scores."""
    labels = label_curves.labels_of(view)
    return len(labels) > 1 and len(view.label_curve(labels[0], "test").rounds) > 1


def _segments(runs: Runs) -> bool:
    return isinstance(runs.opened[0].study.task, Segmentation)


def _mean(values: Mapping[str, float]) -> str:
    return f"{sum(values.values()) / len(values):.3f}" if values else "–"


def _sites(runs: Runs, options: Options) -> list[str]:
    return [options.site] if options.site else runs.opened[0].members


ANALYSES: dict[str, Analysis] = {
    "gallery": Analysis(_gallery, lambda runs: True),
    "loss-surface": Analysis(_loss_surface, lambda runs: True),
    "features": Analysis(_features, lambda runs: any(run.selects for run in runs.opened)),
    "gamma": Analysis(_gamma, lambda runs: any(run.thresholded for run in runs.opened)),
    "lambda": Analysis(_lambda, lambda runs: sweeps.is_lambda_sweep(runs.views)),
    "progress": Analysis(_progress, lambda runs: all(len(view.test_curve.rounds) > 1 for view in runs.views)),
    "relationships": Analysis(_relationships, lambda runs: any(map(relationships.has_relationships, runs.views))),
    "overlays": Analysis(_overlays, lambda runs: len(runs.opened[0].study.task.labels) > 2 and _segments(runs)),
    "schedules": Analysis(_schedules, lambda runs: any(view.method == "ufps" for view in runs.views)),
    "landscape": Analysis(_landscape, lambda runs: False),
    "hessian": Analysis(_hessian, lambda runs: False),
    "steepness": Analysis(_steepness, lambda runs: False),
    "similarity": Analysis(_similarity, lambda runs: False),
    "labels": Analysis(_labels, lambda runs: all(map(_has_label_curves, runs.views))),
    "ablation": Analysis(_ablation, lambda runs: len(groups(runs.views)) > 1),
    "pseudo-labels": Analysis(_pseudo_labels, lambda runs: False),
    "agreement": Analysis(_agreement, lambda runs: False),
}
