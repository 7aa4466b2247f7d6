"""What methods cost: forward passes per case when they predict, traffic and time per round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from consilium.reports.figures import Cost
from consilium.reports.reading import RunView
from consilium.reports.tables import TextCell, markdown_table, rich_table

if TYPE_CHECKING:
    from rich.table import Table

TITLE = "Cost"
NOTE = (
    "Passes of the network that one case costs when the headline model predicts. MB (10⁶ bytes) and seconds are per "
    "round: traffic of one site, time of this machine for all sites."
)


@dataclass(frozen=True)
class CostTable:
    """A line per method, in the order given."""

    costs: tuple[Cost, ...]
    reference: str = ""  # the line whose time the others' is divided by

    def grid(self) -> list[list[TextCell]]:
        base = next((cost.round_seconds for cost in self.costs if cost.name == self.reference), 0.0)
        heads = ["method", "passes per case", "a site sends, MB", "a site gets, MB", "seconds"]
        rows = [heads + ([f"time against {self.reference}"] if base else [])]
        for cost in self.costs:
            passes = "–" if cost.passes is None else f"{cost.passes:g}"  # runs of earlier versions do not say
            row = [
                cost.name,
                passes,
                f"{cost.up_turn_mb:,.3f}",
                f"{cost.down_turn_mb:,.3f}",
                f"{cost.round_seconds:,.2f}",
            ]
            rows.append(row + ([f"{cost.round_seconds / base:.2f} ×"] if base else []))
        return [[TextCell(text) for text in row] for row in rows]

    def to_rich(self) -> list[Table]:
        return [rich_table(TITLE, self.grid(), NOTE)] if self.costs else []

    def to_markdown(self) -> str:
        return f"## {TITLE}\n\n{markdown_table(self.grid())}\n\n{NOTE}\n"

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(cost) for cost in self.costs]


def cost_of(name: str, runs: Sequence[RunView]) -> Cost:
    """The mean over finished runs of one method; there must be one."""
    summaries: list[Mapping[str, Any]] = [run.summary for run in runs if run.summary]

    def mean(key: str) -> float:
        return statistics.fmean(float(summary.get(key) or 0) for summary in summaries)

    up, down = mean("bytes_up") / 1e6, mean("bytes_down") / 1e6
    turns = mean("rounds") * statistics.fmean(len(summary["headline"]["sites"]) for summary in summaries) or 1
    passes = [summary["passes"] for summary in summaries if "passes" in summary]
    return Cost(
        name=name,
        up_mb=up,
        down_mb=down,
        minutes=mean("seconds") / 60,
        memory_mb=mean("peak_memory_mb"),
        up_turn_mb=up / turns,
        down_turn_mb=down / turns,
        round_seconds=mean("seconds") / (mean("rounds") or 1),
        passes=statistics.fmean(passes) if passes else None,
    )
