"""Federated averaging as one would write it without a package: torch, MONAI's loss, shared memory.

Nothing is logged, checked, saved or scored; only data, seeds and the network are taken from the package, so that the
same steps are made on the same batches.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from consilium.data.cache import open_site
from consilium.data.site_arrays import SiteArrays
from consilium.randomness import numpy_generator, torch_generator
from consilium.study import Study
from consilium.study_reading import load_study


@dataclass(frozen=True)
class Orders:
    """What a training process needs beside its data."""

    study_file: Path
    queue: Any  # (site, round, loop) or None: the end
    done: Any  # site names
    shared: dict[str, Tensor]  # by loop: all weights in a row, in shared memory
    replies: dict[str, dict[str, Tensor]]  # by loop and site


def open_data(study: Study) -> dict[str, SiteArrays]:
    """The preprocessed arrays every site has on disk, memory-mapped."""
    federation = study.federation()
    return {name: open_site(federation, site, study.preprocess) for name, site in sorted(federation.sites.items())}


def train_site(
    network: nn.Module, data: SiteArrays, study: Study, site: str, round: int, layout: torch.memory_format, fused: bool
) -> None:
    from monai.losses import DiceLoss

    criterion = DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=study.local.lr, fused=fused)
    network.train()
    for images, masks in _batches(data, study, site, round):
        truth = torch.stack([masks > 0, masks == 2], dim=1).float()  # the disc holds the cup
        loss = criterion(network(images.contiguous(memory_format=layout)), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_selector(network: nn.Module, data: SiteArrays, study: Study, site: str, round: int, own: int) -> None:
    """The gradient of a site's round for a selector whose right answer is always `own`; the server will step."""
    network.train()
    network.zero_grad()
    for images, _ in _batches(data, study, site, round):
        output = network(images.contiguous(memory_format=torch.channels_last))
        nn.functional.cross_entropy(output, torch.full((len(images),), own), reduction="sum").backward()  # type: ignore[no-untyped-call]


def _batches(data: SiteArrays, study: Study, site: str, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    local, places = study.local, data.indices("train")
    seed = torch_generator(study.plan.seed, site, round, "batches").initial_seed()
    for epoch in range(local.epochs):
        order = numpy_generator(seed, epoch).permutation(len(places))
        for chunk in np.array_split(order, math.ceil(len(places) / local.batch_size)):
            images = torch.from_numpy(np.stack([data.image(places[i]) for i in chunk]))
            yield images, torch.from_numpy(np.stack([np.asarray(data.truth(places[i])) for i in chunk]))


def copy_in(vector: Tensor, network: nn.Module) -> None:
    with torch.no_grad():
        for parameter, part in _pairs(vector, network):
            parameter.copy_(part)


def copy_out(network: nn.Module, vector: Tensor, gradients: bool = False) -> None:
    with torch.no_grad():
        for parameter, part in _pairs(vector, network):
            part.copy_(parameter.grad if gradients and parameter.grad is not None else parameter)


def _shared(vector: Tensor) -> Tensor:
    """A copy that other processes see."""
    return vector.clone().share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _pairs(vector: Tensor, network: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    parameters = list(network.parameters())
    parts = torch.split(vector, [p.numel() for p in parameters])
    return [(p, part.view(p.shape)) for p, part in zip(parameters, parts)]


# ---------------------------------------------------------------------------------------------- the best one can do


def serve(orders: Orders) -> None:
    """One training process: whatever site is next."""
    torch.set_num_threads(1)
    study = load_study(orders.study_file)
    data = open_data(study)
    model = study.task.network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    selector = study.task.network("selector", list(data)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    while (order := orders.queue.get()) is not None:
        site, round, loop = order
        network = selector if loop == SELECTOR else model
        copy_in(orders.shared[loop], network)
        if loop == SELECTOR:
            train_selector(network, data[site], study, site, round, list(data).index(site))
        else:
            train_site(network, data[site], study, site, round, torch.channels_last, fused=True)
        copy_out(network, orders.replies[loop][site], gradients=loop == SELECTOR)
        orders.done.put(site)


GLOBAL, PERSONAL, SELECTOR = "global", "personal", "selector"  # the loops


class BareLoop:
    """Long-lived processes of one thread each, the largest site first, weights in shared memory."""

    def __init__(self, study_file: Path, processes: int) -> None:
        study = load_study(study_file)
        sizes = {name: len(data.indices("train")) for name, data in open_data(study).items()}
        self._shares = {name: size / sum(sizes.values()) for name, size in sizes.items()}
        self._order = sorted(sizes, key=lambda name: (-sizes[name], name))
        starts = {GLOBAL: study.task.initial(), SELECTOR: study.task.initial("selector", sorted(sizes))}
        starts[PERSONAL] = starts[GLOBAL]
        rows = {loop: torch.cat([tensor.reshape(-1) for tensor in w.values()]) for loop, w in starts.items()}
        self._rows = rows
        self._shared = {loop: _shared(row) for loop, row in rows.items()}
        self._replies = {loop: {name: _shared(row) for name in sizes} for loop, row in rows.items()}
        context = multiprocessing.get_context("spawn")
        self._queue, self._done = context.SimpleQueue(), context.SimpleQueue()
        orders = Orders(study_file, self._queue, self._done, self._shared, self._replies)
        self._processes = [context.Process(target=serve, args=(orders,), daemon=True) for _ in range(processes)]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def restart(self) -> None:
        for loop, row in self._rows.items():
            self._shared[loop].copy_(row)

    def round(self, index: int, loop: str = GLOBAL) -> None:
        for site in self._order:
            self._queue.put((site, index, loop))
        for _ in self._order:
            self._done.get()
        names, replies = sorted(self._order), self._replies[loop]
        total = replies[names[0]] * self._shares[names[0]]
        for name in names[1:]:
            total.add_(replies[name], alpha=self._shares[name])
        if loop == SELECTOR:
            self._shared[loop].sub_(total, alpha=1e-3)  # a gradient: the cheapest step there is
        else:
            self._shared[loop].copy_(total)

    def weights(self, study: Study) -> dict[str, Tensor]:
        """By name, to compare with ours."""
        network = study.task.network()
        copy_in(self._shared[GLOBAL], network)
        return dict(network.state_dict())

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _ in self._processes:
            self._queue.put(None)
        for process in self._processes:
            process.join()


class ThreeLoops:
    """A round of each of FedSM's three models, one bare loop after the other: what training them apart would take."""

    def __init__(self, bare: BareLoop) -> None:
        self._bare, self.pids = bare, bare.pids
        self.restart = bare.restart

    def round(self, index: int) -> None:
        for loop in (GLOBAL, PERSONAL, SELECTOR):
            self._bare.round(index, loop)


# ---------------------------------------------------------------------------------------------- what one writes first


def serve_in_turn(study_file: Path, queue: Any, done: Any) -> None:
    """One process, all its default threads, sites in turn, memory layout and optimiser as they come."""
    study = load_study(study_file)
    data = open_data(study)
    sizes = {name: len(arrays.indices("train")) for name, arrays in data.items()}
    network = study.task.network()
    while (round := queue.get()) is not None:
        if round == 0:
            network.load_state_dict(dict(study.task.initial()))
        trained: dict[str, dict[str, Tensor]] = {}
        for site, arrays in data.items():
            own = copy.deepcopy(network)
            train_site(own, arrays, study, site, round, torch.contiguous_format, fused=False)
            trained[site] = own.state_dict()
        network.load_state_dict(_average(trained, sizes))
        done.put(round)


def _average(models: dict[str, dict[str, Tensor]], sizes: dict[str, int]) -> dict[str, Tensor]:
    total = sum(sizes.values())
    names: Sequence[str] = list(next(iter(models.values())))
    return {
        name: torch.stack([model[name] * (sizes[site] / total) for site, model in models.items()]).sum(0)
        for name in names
    }


class FirstTry:
    """The loop in turn, in a process of its own so that its threads are its own too."""

    def __init__(self, study_file: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue, self._done = context.SimpleQueue(), context.SimpleQueue()
        self._process = context.Process(target=serve_in_turn, args=(study_file, self._queue, self._done), daemon=True)
        self._process.start()

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process.pid is not None else []

    def restart(self) -> None:
        """Its round 0 begins anew."""

    def round(self, index: int) -> None:
        self._queue.put(index)
        self._done.get()

    def __enter__(self) -> FirstTry:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._queue.put(None)
        self._process.join()
