"""What a hospital has let out so far beside what its hospital.toml allows; counted from its own log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from consilium.caps import held_by
from consilium.hospital import Limits
from consilium.left_log import Line, left
from consilium.privacy.ledger import ledger, total


@dataclass(frozen=True)
class BudgetUse:
    """One budget: how much of it is used."""

    what: str  # the key of [limits] that caps it
    run: str  # empty: of all studies together
    used: float
    allowed: float  # 0: no limit

    @property
    def text(self) -> str:
        most, used = _written(self.allowed) if self.allowed else "no limit", _written(self.used)
        share = f" ({100 * self.used / self.allowed:.0f} %)" if self.allowed and math.isfinite(self.used) else ""
        return f"{self.what}: {used} of {most}{share}"


def _written(number: float) -> str:
    if math.isinf(number):
        return "without bound"
    return f"{number:,.0f}" if number >= 1e6 else f"{number:g}"


def budgets(memory: Path, limits: Limits) -> list[BudgetUse]:
    """All studies together first, then every run, in the order in which they came."""
    lines = list(left(memory))
    found = [
        BudgetUse("total_rounds", "", _count("train", lines), limits.total_rounds),
        BudgetUse("total_scorings", "", _count("score", lines), limits.total_scorings),
        BudgetUse("total_bytes", "", sum(int(line["bytes"]) for line in lines), limits.total_bytes),
        BudgetUse("total_epsilon", "", _epsilon(lines, limits), limits.total_epsilon),
        BudgetUse("disk_bytes", "", held_by(memory), limits.disk_bytes),
    ]
    for run in dict.fromkeys(str(line["run"]) for line in lines):
        here = [line for line in lines if line["run"] == run]
        seconds = sum(float(line.get("facts", {}).get("seconds", 0.0)) for line in here)
        found += [
            BudgetUse("rounds", run, _count("train", here), limits.rounds),
            BudgetUse("scorings", run, _count("score", here), limits.scorings),
            BudgetUse("run_bytes", run, sum(int(line["bytes"]) for line in here), limits.run_bytes),
            BudgetUse("run_seconds", run, round(seconds, 1), limits.run_seconds),
            BudgetUse("epsilon", run, _epsilon(here, limits), limits.epsilon),
        ]
    return found


def _count(what: str, lines: Sequence[Line]) -> int:
    """Different messages: one that left twice, to the last bit, counts once."""
    return len({(line["run"], line["sha256"]) for line in lines if line["what"] == what})


def _epsilon(lines: Sequence[Line], limits: Limits) -> float:
    return float(f"{total(ledger(lines), limits.delta):.4g}")
