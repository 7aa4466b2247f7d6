"""Compares runs as bars and as a radar chart: figures 7 and 8 of UFPS, from the summaries alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from consilium.analysis.figures import model_tints
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.reports.comparing import cells, compare
from consilium.reports.reading import RunView
from consilium.reports.style import INK, RULE, bare, sheet
from consilium.reports.tables import SITE_MEAN, Cell, Column, called
from consilium.scores.means import MEAN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_ROOM = 0.05  # the least range of an axis, so that small differences look small


@dataclass(frozen=True)
class AblationRow:
    """Test scores of one method, or one row of an ablation, at its best round."""

    mean: Cell  # over sites; ± over seeds
    labels: Mapping[str, Cell]  # mean over sites
    sites: Mapping[str, Cell]  # mean over labels

    def to_json(self) -> dict[str, Any]:
        return {
            "site_mean": asdict(self.mean),
            "labels": {label: asdict(cell) for label, cell in self.labels.items()},
            "sites": {site: asdict(cell) for site, cell in self.sites.items()},
        }


def standings(runs: Sequence[RunView]) -> dict[str, AblationRow]:
    """Rows by the method's name and its differing settings; runs that differ in their seed are one row."""
    comparison = compare(runs)
    found = {}
    for group in comparison.groups:
        about = group.runs[0].headline
        assert about is not None  # finished runs have one
        by_label = {
            label: cells(run.entry(about.model, comparison.metric, label) for run in group.runs)
            for label in dict.fromkeys((*_labels(group.runs[0], comparison.metric), comparison.label))
        }
        means = {label: by[SITE_MEAN] for label, by in by_label.items() if SITE_MEAN in by}
        if comparison.label in means:
            sites = {c.site: cell for c, cell in by_label[comparison.label].items() if c == Column("site", c.site)}
            organs = {label: cell for label, cell in means.items() if label not in ("", MEAN)}
            found[group.name] = AblationRow(means[comparison.label], organs, sites)
    if len(found) < 2:
        raise RunError("bars compare methods or rows of an ablation; give at least two that are scored on test cases.")
    return found


def _labels(run: RunView, metric: str) -> list[str]:
    """Labels in the task's order, which a summary does not keep."""
    return list(dict.fromkeys(row.label for row in run.best_rows if row.metric == metric))


def axes_of(found: Mapping[str, AblationRow]) -> dict[str, dict[str, float]]:
    """Name → axis → value of the radar: the labels that all rows have, else the sites; {} with fewer than three."""
    for kind in ("labels", "sites"):
        each = [getattr(one, kind) for one in found.values()]
        common = [axis for axis in each[0] if all(axis in other for other in each)]
        if len(common) >= 3:
            return {name: {axis: getattr(one, kind)[axis].value for axis in common} for name, one in found.items()}
    return {}


def _room(values: Sequence[float], margins: float) -> float:
    """The length whose share `margins` is left free around the values, so that the axis is long enough."""
    spread = max(values) - min(values)
    return max(LEAST_ROOM, spread, (LEAST_ROOM - spread) / margins)


def bars(found: Mapping[str, AblationRow], what: str) -> Figure:
    """The mean over sites of every row, with ± over seeds; the axis starts just below the least value."""
    tint = model_tints(list(found))
    ends = [one.mean.value + sign * (one.mean.sd or 0.0) for one in found.values() for sign in (-1, 1)]
    room = _room(ends, 0.5)
    with sheet(height=0.8 + 0.34 * len(found)) as figure:
        axes = figure.subplots()
        for i, (name, one) in enumerate(found.items()):
            axes.barh(i, one.mean.value, height=0.62, color=tint[name], xerr=one.mean.sd, ecolor=INK, capsize=3)
            axes.annotate(
                one.mean.text(3), (1, i), xycoords=("axes fraction", "data"), xytext=(6, 0),
                textcoords="offset points", va="center", color=tint[name], fontweight="bold",
            )  # fmt: skip
        axes.set_yticks(range(len(found)), list(found))
        axes.set(xlabel=f"test {what}, mean over sites (the axis does not begin at 0)")
        axes.set_xlim(min(ends) - 0.4 * room, max(ends) + 0.1 * room)
        axes.grid(axis="x")
        bare(axes)
        return figure


def radar(values: Mapping[str, Mapping[str, float]], what: str) -> Figure:
    """An axis per label or site, a closed line per row; the centre is just below the least value, at least 0."""
    tint = model_tints(list(values))
    names = list(next(iter(values.values())))
    angles = [2 * math.pi * k / len(names) for k in range(len(names))]
    every = [value for by in values.values() for value in by.values()]
    room = _room(every, 0.35)
    with sheet(height=4.6, width=6.4) as figure:
        axes = figure.subplots(subplot_kw={"projection": "polar"})
        for name, by in values.items():
            line = [by[axis] for axis in names]
            axes.plot([*angles, angles[0]], [*line, line[0]], color=tint[name], linewidth=1.5, label=name)
        axes.set_xticks(angles, names)
        axes.set_ylim(max(min(0.0, *every), min(every) - 0.3 * room), max(every) + 0.05 * room)
        axes.tick_params(axis="x", pad=10)
        axes.tick_params(axis="y", labelsize=7)
        axes.set_title(f"test {what}")
        axes.grid(color=RULE)
        figure.legend(loc="outside right upper", frameon=False)
        return figure


def analyse_ablation(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure; those that differ only in their seed are one row."""
    found = standings(runs.views)
    about = runs.views[0].headline
    what = called(about.metric) if about else ""
    drawn = {"ablation": bars(found, what)}
    if values := axes_of(found):
        drawn["radar"] = radar(values, what)
    words = ", ".join(f"{name} {one.mean.text(3)}" for name, one in found.items())
    yield Finding(
        "ablation",
        "Row by row",
        f"Test {what} at the round best on validation, mean over sites: {words}",
        {"rows": {name: one.to_json() for name, one in found.items()}},
        drawn,
    )
