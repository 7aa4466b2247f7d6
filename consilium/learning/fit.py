"""The one local loop: one pass over the batches, in which every job steps on the same batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from consilium.method import OptimizerState
from consilium.site import Batch, Local, Round, Site, Task
from consilium.weights import Weights


@dataclass(frozen=True)
class Job:
    """One model to train."""

    weights: Weights
    kind: str = "model"
    labels: Sequence[str] | None = None
    loss: Callable[[Any, Batch], Tensor] | None = None  # default: the task's
    penalty: Callable[[Mapping[str, Tensor]], Tensor] | None = None  # of the parameters, added to the loss
    correct: Weights | None = None  # added to every gradient
    lr: float | None = None  # default: the study's
    step: bool = True  # False: the weights stay, the mean gradient over all cases is returned
    fresh: bool = False  # True: its optimiser's state is not kept, whatever the study says


@dataclass(frozen=True)
class Fit:
    """What became of a job."""

    weights: Weights
    steps: int
    cases: int  # seen, over all epochs
    loss: float  # mean over cases, of the loss without penalty
    read: Callable[[], OptimizerState | None]
    gradient: Weights | None = None

    @property
    def state(self) -> OptimizerState | None:
        """The optimiser's, copied only where it is kept."""
        return self.read()


class Fits(dict[str, Fit]):
    """What became of every job, and the optimiser states to keep for the next round."""

    def __init__(self, fits: Mapping[str, Fit], kept: Collection[str]) -> None:
        super().__init__(fits)
        self._kept = kept

    @property
    def states(self) -> dict[str, OptimizerState]:
        """By job; empty where the study or the method keeps none. Read it before the next `fit`."""
        return {name: state for name in self._kept if (state := self[name].state) is not None}


def fit(site: Site, jobs: Mapping[str, Job], round: Round, states: Mapping[str, OptimizerState] | None = None) -> Fits:
    """Train every job on the site's batches of this round; data are read and augmented once per batch.

    `states` are the optimiser states that the last round left, by job; `Fits.states` are those of this one. Both count
    only under [local] optimizer_state = "kept". None: a method that starts afresh and keeps nothing.
    """
    keeps = states is not None and site.local.optimizer_state == "kept"
    kept = [name for name, job in jobs.items() if keeps and not job.fresh]
    before = {name: states[name] for name in kept if name in states} if states else {}
    with torch.random.fork_rng(devices=[]):
        runs = {name: _Run(site, job, slot, round, before.get(name)) for slot, (name, job) in enumerate(jobs.items())}
        for number, batch in enumerate(site.batches(round)):
            batch = placed(batch, site)
            seed = site.generator(round, f"dropout {number}").initial_seed()
            for run in runs.values():
                seed_dropout(seed, site.device)  # what a job drops does not depend on the jobs beside it
                run.learn(batch)
    return Fits({name: run.result() for name, run in runs.items()}, kept)


def seed_dropout(seed: int, device: str) -> None:
    """Seed the device in use; `torch.manual_seed` also notes a stack trace for every device that is not."""
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.manual_seed(seed)


def learning_rate(local: Local, round: Round) -> float:
    """The study's learning rate in this round."""
    if local.schedule == "decay":
        return float(local.lr * local.decay**round.step)
    if local.schedule == "constant":
        return local.lr
    warm = max(1, math.ceil(local.warmup * round.total))
    if round.step < warm:
        return local.lr * (round.step + 1) / warm
    if local.schedule == "warmup-restarts":  # down to a hundredth, and up again at once
        share = 0.5 * (1 + math.cos(math.pi * ((round.step - warm) % local.restart) / local.restart))
        return local.lr * (0.01 + 0.99 * share)
    done = (round.step - warm) / max(1, round.total - warm)
    return local.lr * 0.5 * (1 + math.cos(math.pi * done))


def placed(batch: Batch, site: Site) -> Batch:
    """Channels-last makes 2-D convolutions faster on CPUs and GPUs alike."""
    images = batch.images.to(site.device, non_blocking=True)
    if images.dim() == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    beside = None if batch.beside is None else batch.beside.to(site.device, non_blocking=True)
    return replace(batch, images=images, truth=batch.truth.to(site.device, non_blocking=True), beside=beside)


class Workbench:
    """A network to train in, built once per process; every use loads all of its weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        self.parameters = dict(module.named_parameters())
        self._tensors = dict(module.state_dict())  # the module's own, not copies

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        if weights.keys() != self._tensors.keys():
            raise ValueError(f"weights of another network: {sorted(weights.keys() ^ self._tensors.keys())[:3]}")
        for name, tensor in self._tensors.items():
            given = weights[name]
            if given.shape != tensor.shape:
                raise ValueError(f"'{name}' is {tuple(given.shape)}, where the network has {tuple(tensor.shape)}")
            tensor.copy_(given)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients, without the bookkeeping of `Optimizer.zero_grad`: a hundredth of a small step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def weights(self, changed: Mapping[str, Tensor] | None = None) -> Weights:
        """A copy of what the network holds now, with these in place of its own."""
        return Weights({**self._tensors, **(changed or {})})


@lru_cache(maxsize=16)
def workbench(task: Task, kind: str, labels: tuple[str, ...] | None, slot: int, device: str) -> Workbench:
    module = task.network(kind, labels).to(device)
    if task.dimensions == 2:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Workbench(module)


class _Run:
    """A job under way."""

    def __init__(self, site: Site, job: Job, slot: int, round: Round, state: OptimizerState | None) -> None:
        self.job, self.site = job, site
        labels = None if job.labels is None else tuple(job.labels)
        self.bench = workbench(site.task, job.kind, labels, slot, site.device)
        self.bench.load(job.weights)
        self.module = self.bench.module
        self.names, self.parameters = list(self.bench.parameters), list(self.bench.parameters.values())
        self.correct = [job.correct[name].to(site.device) for name in self.names] if job.correct is not None else None
        self.optimizer = optimizer(self.parameters, site.local, job.lr or learning_rate(site.local, round))
        if state is not None:
            load_state(self.optimizer, self.names, self.parameters, state)
        self.scaler = torch.amp.GradScaler(site.device.split(":")[0], enabled=site.local.precision == "float16")
        self.loss = job.loss or partial(site.task.loss, labels=job.labels)
        self.total, self.cases, self.steps = 0.0, 0, 0

    def learn(self, batch: Batch) -> None:
        with precision(self.site):
            loss = self.loss(self.module(batch.images), batch)
        self.total += loss.item() * len(batch.cases)
        self.cases += len(batch.cases)
        if not self.job.step:
            (loss * len(batch.cases)).backward()  # type: ignore[no-untyped-call]
            return
        if self.job.penalty is not None:
            loss = loss + self.job.penalty(dict(zip(self.names, self.parameters)))
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._step()

    def _step(self) -> None:
        if self.correct is not None or self.site.local.clip:
            self.scaler.unscale_(self.optimizer)
        if self.correct is not None:
            for parameter, extra in zip(self.parameters, self.correct):
                assert parameter.grad is not None
                parameter.grad.add_(extra)
        if self.site.local.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.site.local.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.bench.clear()
        self.steps += 1

    def result(self) -> Fit:
        gradient = None if self.job.step else self._mean_gradient()
        return Fit(self.bench.weights(), self.steps, self.cases, self.total / max(1, self.cases), self._state, gradient)

    def _state(self) -> OptimizerState | None:
        return read_state(self.optimizer, self.names, self.parameters) if self.job.step else None

    def _mean_gradient(self) -> Weights:
        gradients = {}
        for name, parameter in zip(self.names, self.parameters):
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = total / max(1, self.cases)
            parameter.grad = None
        return Weights(gradients)


def precision(site: Site) -> AbstractContextManager[Any]:
    """Mixed precision where the study asks for it."""
    if site.local.precision == "float32":
        return nullcontext()
    return torch.autocast(site.device.split(":")[0], dtype=getattr(torch, site.local.precision))


def optimizer(parameters: Sequence[nn.Parameter], local: Local, lr: float) -> torch.optim.Optimizer:
    """The study's optimiser; fused kernels step all parameters in one call."""
    fused = parameters[0].device.type in ("cpu", "cuda")
    if local.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=fused)
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr, weight_decay=local.weight_decay, fused=fused)


def read_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> OptimizerState | None:
    kept = [optimizer.state.get(p, {}) for p in parameters]
    if not kept or not all(kept):
        return None
    slots = [key for key, value in kept[0].items() if isinstance(value, Tensor) and key != "step"]
    return OptimizerState(
        step=int(kept[0].get("step", 0)),
        slots={slot: Weights({name: part[slot] for name, part in zip(names, kept)}) for slot in slots},
    )


def load_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], parameters: Sequence[nn.Parameter], state: OptimizerState
) -> None:
    fused = optimizer.defaults.get("fused")  # its kernels want the count beside the parameter
    for name, parameter in zip(names, parameters):
        step = torch.tensor(float(state.step), device=parameter.device if fused else "cpu")
        slots = {slot: torch.empty_like(parameter).copy_(weights[name]) for slot, weights in state.slots.items()}
        optimizer.state[parameter] = {"step": step, **slots}
