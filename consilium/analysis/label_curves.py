"""Scores of each label over the rounds: figure S2 of UFPS and figure 2 of FedSM, from the scores alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from consilium.analysis.figures import model_tints, side_labels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.reports.reading import Curve, RunView
from consilium.reports.style import WIDTH, sheet
from consilium.reports.tables import called
from consilium.scores.means import MEAN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLITS = {"valid": "validation", "test": "test"}

Curves = Mapping[str, Mapping[str, Curve]]  # split → label


def labels_of(run: RunView) -> list[str]:
    """The labels of the headline score in the task's order, without their mean."""
    about = run.headline
    rows = [row for row in run.rows if about and (row.model, row.metric) == (about.model, about.metric)]
    return [label for label in dict.fromkeys(row.label for row in rows) if label not in ("", MEAN)]


def curves_of(run: RunView) -> Curves:
    """The curves of every split that was scored by round."""
    found = {split: {label: run.label_curve(label, split) for label in labels_of(run)} for split in SPLITS}
    return {split: by for split, by in found.items() if any(curve.rounds for curve in by.values())}


def so_far(found: Curves) -> Curves:
    """The best level up to each round: curves that never fall, as figure 2 of FedSM draws them."""
    return {split: {label: _highest(curve) for label, curve in by.items()} for split, by in found.items()}


def _highest(curve: Curve) -> Curve:
    return replace(curve, site_mean=_running(curve.site_mean), sites={s: _running(v) for s, v in curve.sites.items()})


def _running(values: Sequence[float]) -> tuple[float, ...]:
    """The largest value so far; NaN until there is one."""
    found: list[float] = []
    for value in values:
        before = found[-1] if found else math.nan
        found.append(before if math.isnan(value) or value < before else value)
    return tuple(found)


def to_json(found: Curves) -> dict[str, Any]:
    return {
        split: {
            label: {"rounds": list(curve.rounds), "site_mean": list(curve.site_mean)} for label, curve in by.items()
        }
        for split, by in found.items()
    }


def draw(found: Mapping[str, Curves], labels: Sequence[str], what: str) -> Figure:
    """A row per split, a panel per label, a line per run: the mean over the sites whose truth shows the label."""
    tint = model_tints(list(found))
    splits = [split for split in SPLITS if any(split in by for by in found.values())]
    with sheet(height=2.3 * len(splits) + 0.3, width=WIDTH) as figure:
        panels = figure.subplots(len(splits), len(labels), sharex=True, sharey=True, squeeze=False)
        for row, split in zip(panels, splits, strict=True):
            for axes, label in zip(row, labels, strict=True):
                ends = {}
                for name, by in found.items():
                    curve = by.get(split, {}).get(label)
                    if curve and curve.rounds:
                        axes.plot(curve.rounds, curve.site_mean, color=tint[name], linewidth=1.3)
                        ends[name] = curve.site_mean[-1]
                axes.grid(axis="y")
                axes.locator_params(axis="x", integer=True)
            row[0].set_ylabel(f"{SPLITS[split]} {what}")
            side_labels(row[-1], ends, tint)
        for axes, label in zip(panels[0], labels, strict=True):
            axes.set_title(label)
        figure.supxlabel("round", fontsize=9)
        return figure


def analyse_labels(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure."""
    first = runs.views[0]
    labels, about = labels_of(first), first.headline
    found = {runs.names[view.folder]: curves_of(view) for view in runs.views}
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
        {"runs": {name: {**to_json(by), "so_far": to_json(so_far(by))} for name, by in found.items()}},
        {
            "labels": draw(found, labels, called(about.metric)),
            "labels-so-far": draw({n: so_far(by) for n, by in found.items()}, labels, f"best {called(about.metric)}"),
        },
    )


def has_label_curves(view: RunView) -> bool:
    """Whether there are several labels and more than one scored round."""
    labels = labels_of(view)
    return len(labels) > 1 and len(view.label_curve(labels[0], "test").rounds) > 1
