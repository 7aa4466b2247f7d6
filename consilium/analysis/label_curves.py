"""How runs get on with every label, round by round: figure S2 of UFPS, from the scores alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from consilium.analysis.figures import model_tints, side_labels
from consilium.reports.figures import WIDTH, sheet
from consilium.reports.reading import Curve, RunView
from consilium.scores import MEAN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLITS = {"valid": "validation", "test": "test"}

Curves = Mapping[str, Mapping[str, Curve]]  # split → label


def labels_of(run: RunView) -> list[str]:
    """Those the headline score is taken of, in the task's order; one alone is what `progress` shows."""
    about = run.headline
    rows = [row for row in run.rows if about and (row.model, row.metric) == (about.model, about.metric)]
    return [label for label in dict.fromkeys(row.label for row in rows) if label not in ("", MEAN)]


def curves_of(run: RunView) -> Curves:
    """Of every split that was scored by round."""
    found = {split: {label: run.label_curve(label, split) for label in labels_of(run)} for split in SPLITS}
    return {split: by for split, by in found.items() if any(curve.rounds for curve in by.values())}


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
