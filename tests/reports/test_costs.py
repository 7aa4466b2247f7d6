"""The cost table: passes per case beside traffic and time per round, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from consilium.reports.costs import CostTable, cost_of


def run(passes: int | None, seconds: float) -> Any:
    headline = {"sites": {"a": 0.5, "b": 0.6}}
    summary = {
        "bytes_up": 8e6,
        "bytes_down": 4e6,
        "seconds": seconds,
        "rounds": 4,
        "peak_memory_mb": 1,
        "headline": headline,
    }
    return SimpleNamespace(summary=summary | ({} if passes is None else {"passes": passes}))


def texts(table: CostTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.grid()]


def test_a_line_by_hand() -> None:
    """8 MB up by two sites in four rounds: 1 MB each; two runs of 8 and 12 s: 2.5 s a round."""
    lines = texts(
        CostTable((cost_of("SOLO", [run(3, 8.0), run(3, 12.0)]), cost_of("FedAvg*", [run(1, 5.0)])), "FedAvg*")
    )
    assert lines[0][-1] == "time against FedAvg*"
    assert lines[1] == ["SOLO", "3", "1.000", "0.500", "2.50", "2.00 ×"]
    assert lines[2] == ["FedAvg*", "1", "1.000", "0.500", "1.25", "1.00 ×"]


def test_a_run_of_an_earlier_version_says_no_passes() -> None:
    table = CostTable((cost_of("FedAvg", [run(None, 4.0)]),))
    assert texts(table)[1][1] == "–" and table.to_json()[0]["passes"] is None
    assert "| FedAvg | – |" in table.to_markdown() and CostTable(()).to_rich() == []
