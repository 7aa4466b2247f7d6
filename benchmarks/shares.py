"""What a run spends on other things than training: the firewall's share of a round, and the scores' share of a run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measuring import Clock, Measured, load
from benchmarks.training import demo_study
from consilium import simulation
from consilium.machine import default_workers
from consilium.privacy.firewall import EMPTY, Firewall, judged
from consilium.privacy.measuring import WIDTH, Update
from consilium.site import SiteCard
from consilium.study import Study
from consilium.wires.processes import Pool

ROUNDS = 12  # of a run with or without the firewall; the first two are not counted
RUN = 100  # the demo's own
SITES, MANY = 6, 384  # among which the firewall judges


class Stretches:
    """Watches a run: seconds and processor time of all processes, by the event that ended each stretch."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._clocks = [Clock([pid]) for pid in pids]
        self.seconds: dict[str, list[float]] = {}
        self.processor: dict[str, list[float]] = {}
        self.server: dict[str, list[float]] = {}  # processor time of this process alone

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind not in ("start", "round", "score", "finish"):
            return
        spent = [clock.stop() for clock in self._clocks]
        own = spent[0].own
        self.seconds.setdefault(kind, []).append(spent[0].seconds)
        self.processor.setdefault(kind, []).append(own + sum(each.chain - each.own for each in spent))
        self.server.setdefault(kind, []).append(own)
        for clock in self._clocks:
            clock.start()


def watched(study: Study, folder: Path, pool: Pool) -> Stretches:
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    seen = Stretches([process.pid for process in pool.processes])
    simulation.run(study, runs, pool=pool, watch=seen)
    return seen


def firewall(folder: Path, repeats: int) -> list[Measured]:
    """The server's processor time for a round with the default firewall, less that without, of the whole round's."""
    with_it, without = (
        demo_study(folder, 1, ROUNDS, more={"study.firewall": f'"{mode}"'}) for mode in ("observe", "off")
    )
    extra, rounds, shares, slower = [], [], [], []
    with Pool(default_workers()) as pool:
        for _ in range(repeats):
            on, off = (watched(study, folder, pool) for study in (with_it, without))
            cost = median(on.server["round"][2:]) - median(off.server["round"][2:])
            whole = median(off.processor["round"][2:])
            extra.append(cost)
            rounds.append(whole)
            shares.append(cost / whole)
            slower.append(median(on.seconds["round"][2:]) / median(off.seconds["round"][2:]))
    facts = {"seconds of a round, with / without": median(slower), "load": load()}
    few, many = (median(_judging(sites) for _ in range(repeats)) for sites in (SITES, MANY))
    return [
        Measured(
            "firewall", "what the firewall takes in a round of the demo, processor time", median(extra),
            "the round", median(rounds), "s", median(shares), 0.02, facts=facts,
        ),
        Measured(
            "firewall", f"a verdict on one of {MANY} sites, processor time", many, f"on one of {SITES}", few, "s",
            many / few, 1.5, facts={"load": load()},
        ),
    ]  # fmt: skip


def _judging(sites: int) -> float:
    """Processor time of a verdict on a made-up update, when every site has a past of ten."""
    roster = {f"site{i:03d}": SiteCard(f"site{i:03d}", i, 8 + i, ()) for i in range(sites)}
    noise, history, spent = torch.Generator().manual_seed(0), EMPTY, 0.0
    for _ in range(11):
        drawn = torch.randn(sites, WIDTH, generator=noise)
        updates = {
            name: {"model": Update(sketch.norm().item(), 0.0, sketch, sketch.norm().item().hex(), 1e-6, True)}
            for name, sketch in zip(roster, drawn, strict=True)
        }
        began = time.process_time()
        _, history = judged(Firewall(), history, updates, roster, "train")
        spent = time.process_time() - began
    return spent / sites


def scoring(folder: Path, repeats: int) -> list[Measured]:
    """What is not training in a run of the demo, from its first round to its end: scores, releases, the summary."""
    found = []
    for method in ("fedavg", "fedsm"):
        study = demo_study(folder, 1, RUN, f"demo_{method}.toml", {"study.score_every": 10})
        with Pool(default_workers()) as pool:
            runs = [watched(study, folder, pool) for _ in range(max(1, repeats // 3))]
        shares = {
            of: median(_outside(getattr(run, of)) / _whole(getattr(run, of)) for run in runs)
            for of in ("seconds", "processor")
        }
        found.append(
            Measured(
                "scoring", f"all but training in a demo run of {method}, {RUN} rounds, processor time",
                median(_outside(run.processor) for run in runs), "the run",
                median(_whole(run.processor) for run in runs), "s", shares["processor"], 0.25,
                facts={"share of the seconds": shares["seconds"], "load": load()},
            )
        )  # fmt: skip
    return found


def _outside(spent: Mapping[str, Sequence[float]]) -> float:
    return sum(spent["score"]) + sum(spent["finish"])


def _whole(spent: Mapping[str, Sequence[float]]) -> float:
    return _outside(spent) + sum(spent["round"])
