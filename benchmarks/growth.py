"""The same cases at 6, 24, 96 and 384 sites: what a round costs for its number of sites, and what the server holds."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.measuring import Clock, Measured, Peak, load
from consilium import simulation
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.machine import default_workers
from consilium.study import Study
from consilium.study_reading import make_study
from consilium.wires.processes import Pool

CASES, BATCH, SIDE = 3072, 8, 32
SITES = (6, 24, 96, 384)
ROUNDS = 3  # the first is not counted
LIMIT = 1.20


def write_sites(folder: Path, sites: int) -> Path:
    """`CASES` pictures, the same number at every site, all of them for training, and one per split for scores."""
    place = folder / f"{sites}-sites"
    if place.exists():
        return place
    write_federation_toml(place, "segmentation", ["blob"], 2, 1)
    noise = np.random.default_rng(0)
    for number in range(sites):
        name, cases = f"site{number:03d}", []
        for i in range(CASES // sites + 2):
            image, mask = (place / name / f"{i}-{kind}.png" for kind in ("image", "mask"))
            image.parent.mkdir(exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (SIDE, SIDE), dtype=np.uint8)).save(image)
            Image.fromarray(noise.integers(0, 2, (SIDE, SIDE), dtype=np.uint8)).save(mask)
            split = "valid" if i == 0 else "test" if i == 1 else "train"
            cases.append(Case(str(i), str(i), split, image, mask))
        write_site(place, name, cases)
    return place


def study_of(data: Path, method: Mapping[str, Any], optimizer_state: str = "kept") -> Study:
    return make_study({
        "study": {"rounds": ROUNDS, "score_every": ROUNDS, "firewall": "off"},
        "data": {"federation": str(data)},
        "task": {"widths": [8, 16, 32, 64], "residual_units": 0, "loss": "dice"},
        "local": {"batch_size": BATCH, "optimizer_state": optimizer_state},
        "method": dict(method),
    })  # fmt: skip


class Rounds:
    """Watches a run: seconds and processor time of all processes by round, and the most this process held."""

    def __init__(self, pids: list[int]) -> None:
        self._clocks = [Clock([pid]) for pid in pids]
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.peak = Peak()

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] not in ("start", "round"):
            return
        spent = [clock.stop() for clock in self._clocks]
        own = spent[0].own
        if event["event"] == "round":
            self.seconds.append(spent[0].seconds)
            self.processor.append(own + sum(each.chain - each.own for each in spent))
        self.peak.look([])
        for clock in self._clocks:
            clock.start()


def more_sites(folder: Path, repeats: int) -> list[Measured]:
    """FedAvg, whose cost should be that of its cases; what kept optimisers add; FedSM, which has a model per site."""
    found = []
    for name, method, state, sites, limit in (
        ("fedavg", {"name": "fedavg"}, "fresh", SITES, LIMIT),  # as published, and as in the loops of `peers`
        ("fedavg, optimisers kept", {"name": "fedavg"}, "kept", SITES, float("inf")),
        ("fedsm", {"name": "fedsm", "confidence": 0.5}, "kept", SITES[:2], float("inf")),
    ):
        base: tuple[float, float, float] | None = None
        for number in sites:
            seconds, processor, memory = _measured(folder, number, method, state)
            base = base or (seconds, processor, memory)
            what = f"{name}, {number} sites: processor time of a round"
            facts = {
                "seconds": seconds,
                "seconds with 6": base[0],
                "server's memory in MB": memory,
                "MB with 6": base[2],
                "load": load(),
            }
            found.append(
                Measured("growth", what, processor, "6 sites", base[1], "s", processor / base[1], limit, facts=facts)
            )
    return found


def _measured(folder: Path, sites: int, method: Mapping[str, Any], state: str) -> tuple[float, float, float]:
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    with Pool(default_workers()) as pool:
        watch = Rounds([process.pid for process in pool.processes])
        simulation.run(study_of(write_sites(folder, sites), method, state), runs, pool=pool, watch=watch)
    return median(watch.seconds[1:]), median(watch.processor[1:]), watch.peak.server / 1e6
