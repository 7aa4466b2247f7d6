"""The same cases at 6, 24, 96 and 384 sites: what a round costs for its number of sites, and what the server holds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.measuring import Clock, Measured, Peak, load
from consilium import simulation
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.machine import default_workers, threads_of_torch
from consilium.networks.nested_unet import NestedUNet
from consilium.study import Study
from consilium.study_reading import make_study
from consilium.wires.processes import Pool

CASES, BATCH, SIDE = 3072, 8, 32
WIDTHS = (8, 16, 32, 64)
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
        "task": {"widths": list(WIDTHS), "residual_units": 0, "loss": "dice"},
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
    return found + plain_loop(repeats)


def plain_loop(repeats: int) -> list[Measured]:
    """What the same sites cost in loops of twenty lines that check, send and store nothing: no number to keep."""
    found = []
    with threads_of_torch(1):
        for name, loop in (("a plain loop", _round_of_a_loop), ("a loop with one optimiser", _round_of_a_lean_loop)):
            loop(SITES[0])  # not counted: torch's optimisers import its compiler
            spent = {sites: median(loop(sites) for _ in range(repeats)) for sites in SITES}
            few = spent[SITES[0]]
            found += [
                Measured(
                    "growth", f"{name}, {sites} sites: processor time of a round", each, "6 sites", few, "s",
                    each / few, float("inf"), facts={"load": load()},
                )
                for sites, each in spent.items()
            ]  # fmt: skip
    return found


def _round_of_a_loop(sites: int) -> float:
    """Load the weights, make an optimiser, step, add to the mean; data in memory."""
    network, images, truth = _work()
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    began = time.process_time()
    for own in torch.arange(CASES).chunk(sites):
        network.load_state_dict(start)
        _steps(network, torch.optim.Adam(network.parameters(), 1e-3, fused=True), images, truth, own)
        for name, tensor in network.state_dict().items():
            mean[name].add_(tensor, alpha=1 / sites)
    return time.process_time() - began


@torch.no_grad()
def _round_of_a_lean_loop(sites: int) -> float:
    """The same with one optimiser for all sites, whose state is set to zero, and all tensors copied by one call."""
    network, images, truth = _work()
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, 1e-3, fused=True)
    start = [parameter.clone() for parameter in parameters]
    mean = [torch.zeros_like(parameter) for parameter in parameters]
    began = time.process_time()
    for own in torch.arange(CASES).chunk(sites):
        torch._foreach_copy_(parameters, start)
        for state in optimizer.state.values():
            torch._foreach_zero_(list(state.values()))
        _steps(network, optimizer, images, truth, own)
        torch._foreach_add_(mean, parameters, alpha=1 / sites)
    return time.process_time() - began


def _work() -> tuple[NestedUNet, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    images = torch.rand(CASES, 1, SIDE, SIDE, generator=noise)
    truth = (torch.rand(CASES, 1, SIDE, SIDE, generator=noise) > 0.5).float()
    return NestedUNet(2, 1, 1, WIDTHS, 0, "instance", 0.0).to(memory_format=torch.channels_last), images, truth


@torch.enable_grad()
def _steps(network: NestedUNet, optimizer: torch.optim.Optimizer, images: Tensor, truth: Tensor, own: Tensor) -> None:
    for batch in own.split(BATCH):
        chance = network(images[batch].contiguous(memory_format=torch.channels_last)).sigmoid()
        loss = 1 - 2 * (chance * truth[batch]).sum() / (chance + truth[batch]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _measured(folder: Path, sites: int, method: Mapping[str, Any], state: str) -> tuple[float, float, float]:
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    with Pool(default_workers()) as pool:
        watch = Rounds([process.pid for process in pool.processes])
        simulation.run(study_of(write_sites(folder, sites), method, state), runs, pool=pool, watch=watch)
    return median(watch.seconds[1:]), median(watch.processor[1:]), watch.peak.server / 1e6
