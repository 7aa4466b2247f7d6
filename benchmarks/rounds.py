"""Whether a round costs the same however many were before it: one run of a thousand rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks.measuring import Clock, Measured, Spent, load
from benchmarks.nothing import Drift
from benchmarks.small import small_study, write_small
from consilium import simulation
from consilium.randomness import torch_generator
from consilium.site import Round, Site
from consilium.study import with_plan

ROUNDS, SITES, WINDOW = 1000, 3, 50


@dataclass(frozen=True)
class Walk(Drift):
    """Sites move every weight a little, at random: updates that the firewall measures and remembers."""

    paper: ClassVar[str] = "none"

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        draw = torch_generator(site.seed, "walk", site.card.name, round.index)
        moved = got.global_.map(lambda tensor: tensor + 0.01 * tensor.new_empty(tensor.shape).normal_(generator=draw))
        return self.Uplink(moved, 0.0, 0), memory


class Growth:
    """Watches a run: what every round took, and how large its folder was after half of them and at the end."""

    def __init__(self, runs: Path) -> None:
        self._runs, self._clock = runs, Clock()
        self.laps: list[Spent] = []
        self.sizes: dict[str, list[int]] = {"run folder": [], "journal": []}

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "round":
            self.laps.append(self._clock.stop())
            if len(self.laps) in (ROUNDS // 2, ROUNDS):
                files = [path for path in self._runs.rglob("*") if path.is_file()]
                self.sizes["run folder"].append(sum(path.stat().st_size for path in files))
                self.sizes["journal"].append(sum(p.stat().st_size for p in files if p.name == "journal.jsonl"))
            self._clock.start()


def thousand_rounds(folder: Path, repeats: int) -> list[Measured]:
    """Firewall on, every state kept: rounds 951 to 1,000 against rounds 6 to 55, and what is on disk."""
    data = write_small(folder / "small")
    study = small_study(data, "benchmarks.rounds:Walk", SITES, rounds=ROUNDS, widths=(4, 8))
    rules = type(study.plan.firewall)(mode="observe")
    growth = Growth(folder / "thousand")
    simulation.run(with_plan(study, firewall=rules, keep_rounds="all"), folder / "thousand", 0, watch=growth)
    early, late = growth.laps[5 : 5 + WINDOW], growth.laps[-WINDOW:]
    first, last = _typical(early, "chain"), _typical(late, "chain")  # seconds are mostly the disk's
    facts = {"in seconds": _typical(late, "seconds") / _typical(early, "seconds"), "load": load()}
    what = f"processor time of a round after {ROUNDS}, firewall on, every state kept"
    lines = [Measured("rounds", what, last, "after ten", first, "s", last / first, 1.25, facts=facts)]
    for name, (half, whole) in growth.sizes.items():
        what = f"growth of the {name} in the second {ROUNDS // 2} rounds"
        ratio = (whole - half) / half
        lines.append(Measured("rounds", what, (whole - half) / 1e6, "in the first", half / 1e6, "MB", ratio, 1.05))
    return lines


def _typical(laps: Sequence[Spent], of: str) -> float:
    return float(median(getattr(spent, of) for spent in laps))
