"""Findings from scores alone: round by round, label by label, row by row."""

from __future__ import annotations

from collections.abc import Iterable

from consilium.analysis import ablation, label_curves, progress
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.reports.reading import RunView
from consilium.reports.tables import called


def of_progress(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def of_labels(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def of_ablation(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
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


def has_label_curves(view: RunView) -> bool:
    """Several labels, and more than one round of scores."""
    labels = label_curves.labels_of(view)
    return len(labels) > 1 and len(view.label_curve(labels[0], "test").rounds) > 1
