"""Oscillation over rounds, by hand, and a suite that asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consilium.reports.reading import Curve
from consilium.suites import run_suite
from consilium.suites.oscillation import oscillation, oscillation_table
from tests.toy import write_organs


def test_the_last_half_by_hand() -> None:
    """Of six values the last three: |0.4 − 0.5| and |0.7 − 0.4|."""
    assert oscillation([0.0, 0.9, 0.1, 0.5, 0.4, 0.7]) == pytest.approx((0.1 + 0.3) / 2)
    assert oscillation([0.1, 0.2]) is None and oscillation([]) is None
    assert oscillation([0.0, float("nan"), 0.5, 0.6]) == pytest.approx(0.1)


def standing(name: str, *curves: tuple[float, ...]) -> Any:
    runs = {seed: SimpleNamespace(test_curve=Curve((1, 2, 3, 4), values, {})) for seed, values in enumerate(curves)}
    return SimpleNamespace(name=name, runs=runs)


def test_a_table_over_seeds() -> None:
    table = oscillation_table([standing("A", (0, 0, 0.2, 0.4), (0, 0, 0.2, 0.2)), standing("none")])
    lines = [[cell.text for cell in row] for row in table.grid()]
    assert lines[1:] == [["A", "0.1000 ± 0.1414", "0.3000", "0.3000", "2"]]
    assert table.to_json()[0]["oscillation"] == pytest.approx([0.2, 0.0])
    assert "| A | 0.1000 ± 0.1414 |" in table.to_markdown()
    assert len(table.figure().axes) == 4


SUITE = """
[suite]
name = "waves"
methods = ["fedavg-foreground", "multi-decoder"]
oscillation = true
[base.study]
rounds = 4
score_every = 1
[base.data]
federation = "organs"
[base.task]
widths = [4, 8]
residual_units = 0
[base.local]
batch_size = 8
"""


def test_a_suite_draws_it_and_says_what_rows_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_organs(tmp_path / "organs")
    (tmp_path / "waves.toml").write_text(SUITE)
    result = run_suite(tmp_path / "waves.toml", tmp_path / "runs", workers=0)
    assert not result.failed
    told = json.loads((result.folder / "table.json").read_text())
    assert [row["name"] for row in told["oscillation"]] == ["FedAvg, own foreground", "Multi-decoder"]
    assert all(len(row["oscillation"]) == 1 and row["rounds"] == [1, 2, 3, 4] for row in told["oscillation"])
    assert [cost["passes"] for cost in told["costs"]] == [1, 3]
    assert (result.folder / "oscillation.png").stat().st_size > 1000
    text = (result.folder / "table.md").read_text()
    assert "## Oscillation over rounds" in text and "passes per case" in text
