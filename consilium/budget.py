"""What a hospital has let out so far beside what its hospital.toml allows; counted from its own log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from consilium.caps import held_by
from consilium.hospital import Limits
from consilium.left_log import FAILED, Line, different, left, seconds, study_of
from consilium.privacy.ledger import ledger, total


@dataclass(frozen=True)
class BudgetUse:
    """One budget: how much of it is used."""

    what: str  # the key of [limits] that caps it
    study: str  # with all its runs; empty: all studies together
    used: float
    allowed: float  # 0: no limit

    @property
    def text(self) -> str:
        used = f"{self.what}: {_written(self.used)}"
        if not self.allowed:
            return f"{used}, no limit"
        share = f" ({100 * self.used / self.allowed:.0f} %)" if math.isfinite(self.used) else ""
        return f"{used} of {_written(self.allowed)}{share}"


def _written(number: float) -> str:
    if math.isinf(number):
        return "without bound"
    return f"{number:,.0f}" if number >= 1e4 else f"{number:g}"


def budgets(memory: Path, limits: Limits) -> list[BudgetUse]:
    """All studies together first, then every one, in the order in which they came."""
    lines = list(left(memory))
    found = [
        BudgetUse("rounds", "", different("train", lines), limits.rounds),
        BudgetUse("scorings", "", different("score", lines), limits.scorings),
        BudgetUse("bytes", "", sum(int(line["bytes"]) for line in lines), limits.bytes),
        BudgetUse("epsilon", "", _epsilon(lines, limits), limits.epsilon),
        BudgetUse("disk_bytes", "", held_by(memory), limits.disk_bytes),
    ]
    for study in dict.fromkeys(study_of(str(line["run"])) for line in lines if line["what"] != FAILED):
        here = [line for line in lines if study_of(str(line["run"])) == study]
        found += [
            BudgetUse("study_rounds", study, different("train", here), limits.study_rounds),
            BudgetUse("study_scorings", study, different("score", here), limits.study_scorings),
            BudgetUse("study_bytes", study, sum(int(line["bytes"]) for line in here), limits.study_bytes),
            BudgetUse("study_seconds", study, round(seconds(here), 1), limits.study_seconds),
            BudgetUse("study_epsilon", study, _epsilon(here, limits), limits.study_epsilon),
        ]
    return found


def _epsilon(lines: Sequence[Line], limits: Limits) -> float:
    return float(f"{total(ledger(lines), limits.delta):.4g}")
