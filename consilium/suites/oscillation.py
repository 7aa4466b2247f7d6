"""The oscillation of a method's score over rounds: figure 2 of the UFPS paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from consilium.reports.style import colours, sheet
from consilium.reports.tables import TextCell, markdown_table, rich_table
from consilium.suites.entries import RowRuns

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

TITLE = "Oscillation over rounds"
NOTE = (
    "Oscillation: the mean absolute difference of the test site mean between consecutive scored rounds, over the last "
    "half of them; ± over seeds. Nothing is chosen by it."
)
_COLUMNS = 4  # panels side by side


@dataclass(frozen=True)
class Oscillation:
    """One row of a suite: a curve per seed."""

    name: str
    rounds: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]  # by seed, the test site mean at these rounds

    @property
    def by_seed(self) -> list[float]:
        return [found for curve in self.curves if (found := oscillation(curve)) is not None]

    @property
    def text(self) -> str:
        if not self.by_seed:
            return "–"
        spread = f" ± {statistics.stdev(self.by_seed):.4f}" if len(self.by_seed) > 1 else ""
        return f"{statistics.fmean(self.by_seed):.4f}{spread}"

    @property
    def mean(self) -> list[float]:
        """The mean over seeds, round by round."""
        return [statistics.fmean(values) for values in zip(*self.curves, strict=True)]


def oscillation(values: Sequence[float]) -> float | None:
    """Mean |Δ| between consecutive values of the last half; None where there are not two."""
    late = [value for value in values[len(values) // 2 :] if math.isfinite(value)]
    steps = [abs(after - before) for before, after in pairwise(late)]
    return statistics.fmean(steps) if steps else None


@dataclass(frozen=True)
class OscillationTable:
    """A line per row of the suite."""

    rows: tuple[Oscillation, ...]

    def grid(self) -> list[list[TextCell]]:
        lines = [["method", "oscillation", "last", "highest", "seeds"]]
        for row in self.rows:
            last, top = (f"{row.mean[-1]:.4f}", f"{max(row.mean):.4f}") if row.rounds else ("–", "–")
            lines.append([row.name, row.text, last, top, str(len(row.curves))])
        return [[TextCell(text) for text in line] for line in lines]

    def to_rich(self) -> list[Table]:
        return [rich_table(TITLE, self.grid(), NOTE)]

    def to_markdown(self) -> str:
        return f"## {TITLE}\n\n{markdown_table(self.grid())}\n\n{NOTE}\n"

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": row.name,
                "oscillation": row.by_seed,
                "rounds": list(row.rounds),
                "curves": list(map(list, row.curves)),
            }
            for row in self.rows
        ]

    def figure(self) -> Figure:
        """A panel per row: every seed thin, their mean thick, all on one scale."""
        tint = colours([row.name for row in self.rows])
        lines = math.ceil(len(self.rows) / _COLUMNS)
        with sheet(height=0.6 + 1.9 * lines) as figure:
            panels = figure.subplots(lines, _COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
            for axes, row in zip(panels, self.rows, strict=False):
                for curve in row.curves if len(row.curves) > 1 else ():
                    axes.plot(row.rounds, curve, color=tint[row.name], linewidth=0.7, alpha=0.4)
                axes.plot(row.rounds, row.mean, color=tint[row.name], linewidth=1.5)
                axes.set_title(f"{row.name}\n|Δ| {row.text}", fontsize=8)
                axes.grid(axis="y")
            for axes in panels[len(self.rows) :]:
                axes.set_axis_off()
            figure.supxlabel("round", fontsize=9)
            figure.supylabel("test score, mean over sites", fontsize=9)
            return figure


def oscillation_table(standings: Sequence[RowRuns]) -> OscillationTable:
    """Of all rows with a finished run, at the rounds that all its seeds were scored at."""
    found = []
    for standing in standings:
        curves = [run.test_curve for run in standing.runs.values()]
        if curves:
            shared = sorted(set.intersection(*(set(curve.rounds) for curve in curves)))
            series = [dict(zip(curve.rounds, curve.site_mean, strict=True)) for curve in curves]
            values = tuple(tuple(one[round_] for round_ in shared) for one in series)
            found.append(Oscillation(standing.name, tuple(shared), values))
    return OscillationTable(tuple(found))
