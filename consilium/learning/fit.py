"""The local training loop: one pass over the batches, in which every job takes a step on the same batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.loss_scaling import gradients_of
from consilium.learning.optimizers import learning_rate, load_state, read_state
from consilium.learning.per_patient import ClippedSum, PatientGradients
from consilium.learning.training_networks import training_network
from consilium.method import OptimizerState
from consilium.privacy.sampling import Draw, covered, draws
from consilium.site import Round, Site
from consilium.weights import Weights


@dataclass(frozen=True)
class Job:
    """One model to train."""

    weights: Weights
    kind: str = "model"
    labels: Sequence[str] | None = None
    loss: Callable[[Any, Batch], Tensor] | None = None  # of the output; default: the task's
    objective: Callable[[nn.Module, Batch], Tensor] | None = None  # of the network itself, in place of `loss`
    before_step: Callable[[nn.Module, Batch], None] | None = None  # sees the network before any job steps on the batch
    penalty: Callable[[Mapping[str, Tensor]], Tensor] | None = None  # of the parameters, added to the loss
    correct: Weights | None = None  # added to every gradient
    lr: float | None = None  # default: the study's
    step: bool = True  # False: the weights do not change, and the mean gradient over all cases is returned
    fresh: bool = False  # True: the optimiser's state is never kept


@dataclass(frozen=True)
class Fit:
    """The result of a job."""

    weights: Weights
    steps: int
    cases: int  # seen, over all epochs
    loss: float  # mean over cases, of the loss without penalty
    read: Callable[[], OptimizerState | None]
    gradient: Weights | None = None

    @property
    def state(self) -> OptimizerState | None:
        """The optimiser's state, copied only if it is kept."""
        return self.read()


class Fits(dict[str, Fit]):
    """The results of all jobs, and the optimiser states to keep for the next round."""

    def __init__(self, fits: Mapping[str, Fit], kept: Collection[str]) -> None:
        super().__init__(fits)
        self._kept = kept

    @property
    def states(self) -> dict[str, OptimizerState]:
        """By job; empty if the study or the method keeps none. Read it before the next `fit`."""
        return {name: state for name in self._kept if (state := self[name].state) is not None}


def fit(site: Site, jobs: Mapping[str, Job], round: Round, states: Mapping[str, OptimizerState] | None = None) -> Fits:
    """Train every job on the site's batches of this round; data are read and augmented once per batch.

    `states` are the optimiser states of the last round, by job; `Fits.states` are those of this round. Both are used
    only with [local] optimizer_state = "kept". None: the method always starts fresh and keeps nothing.
    """
    keeps = states is not None and site.local.optimizer_state == "kept"
    kept = [name for name, job in jobs.items() if keeps and not job.fresh]
    before = {name: states[name] for name in kept if name in states} if states else {}
    with torch.random.fork_rng(devices=[]):
        runs = {
            name: _ActiveJob(site, job, slot, round, before.get(name)) for slot, (name, job) in enumerate(jobs.items())
        }
        if site.private is not None:
            _learn_privately(site, runs, round, before)
            return Fits({name: run.result() for name, run in runs.items()}, kept)
        for number, batch in enumerate(site.batches(round)):
            batch = placed(batch, site)
            seed = site.generator(round, f"dropout {number}").initial_seed()
            for run in runs.values():
                if run.job.before_step is not None:
                    run.job.before_step(run.module, batch)
            for run in runs.values():
                seed_dropout(seed, site.device)  # dropout of a job does not depend on the other jobs
                run.learn(batch)
    return Fits({name: run.result() for name, run in runs.items()}, kept)


def _learn_privately(
    site: Site, runs: Mapping[str, _ActiveJob], round: Round, before: Mapping[str, OptimizerState]
) -> None:
    """The same pass by DP-SGD: every job steps on the noised sum of clipped gradients of the same drawn patients."""
    for name, run in runs.items():
        if run.job.objective is not None or run.job.before_step is not None:
            raise StudyError(
                f"[privacy] unit = 'patient': the job '{name}' has an objective of its own, which cannot be taken "
                "patient by patient; a method that sets private = True gives `loss` instead."
            )
    start = [run.job.weights for run in runs.values()]
    start += [slots for state in before.values() for slots in state.slots.values()]
    largest = max((sum(p.numel() for p in run.parameters) for run in runs.values()), default=0)
    for draw in draws(site, round, start, largest, list(runs)):
        batches = [placed(batch, site) for batch in draw.batches]
        seed = site.generator(round, f"dropout {draw.number}").initial_seed()
        for name, run in runs.items():
            seed_dropout(seed, site.device)
            run.learn_privately(replace(draw, batches=batches), name, len(runs))


def seed_dropout(seed: int, device: str) -> None:
    """Seed the device in use; `torch.manual_seed` also records a stack trace for every other device, which is slow."""
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.manual_seed(seed)


def placed(batch: Batch, site: Site) -> Batch:
    """The batch on the site's device. Channels-last makes 2-D convolutions faster on CPUs and GPUs."""
    images = moved(batch.images, site.device)
    if images.dim() == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    beside = None if batch.beside is None else moved(batch.beside, site.device)
    return replace(batch, images=images, truth=moved(batch.truth, site.device), beside=beside)


def moved(tensor: Tensor, device: str) -> Tensor:
    """On the device; to a GPU from pinned memory, or the copy would not go on beside the work before it."""
    if device == "cpu":
        return tensor
    return (tensor.pin_memory() if device.startswith("cuda") else tensor).to(device, non_blocking=True)


class _ActiveJob:
    """A job during its training."""

    def __init__(self, site: Site, job: Job, slot: int, round: Round, state: OptimizerState | None) -> None:
        self.job, self.site = job, site
        labels = None if job.labels is None else tuple(job.labels)
        self.network = training_network(site.task, job.kind, labels, slot, site.device)
        self.network.load(job.weights)
        self.module = self.network.module
        self.forward = self.network.compiled if site.local.compile else self.module
        self.names, self.parameters = list(self.network.parameters), list(self.network.parameters.values())
        self.correct = [job.correct[name].to(site.device) for name in self.names] if job.correct is not None else None
        self.optimizer = self.network.optimizer(site.local, job.lr or learning_rate(site.local, round))
        if state is not None:
            load_state(self.optimizer, self.names, self.parameters, state)
        self.scaler = torch.amp.GradScaler(site.device.split(":")[0], enabled=site.local.precision == "float16")
        self.loss = job.loss or partial(site.task.loss, labels=job.labels)
        self.total, self.cases, self.steps = 0.0, 0, 0
        self.losses: list[tuple[Tensor, int]] = []

    def learn(self, batch: Batch) -> None:
        with precision(self.site):
            objective = self.job.objective
            loss = objective(self.module, batch) if objective else self.loss(self.forward(batch.images), batch)
        self.losses.append((loss.detach(), len(batch.cases)))  # read at the end: a GPU need not wait for every batch
        self.cases += len(batch.cases)
        if not self.job.step:
            self._add_gradient(loss * len(batch.cases))
            return
        if self.job.penalty is not None:
            loss = loss + self.job.penalty(dict(zip(self.names, self.parameters)))
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._step()

    def _add_gradient(self, loss: Tensor) -> None:
        if self.site.local.precision != "float16":
            loss.backward()  # type: ignore[no-untyped-call]
            return
        for parameter, slope in zip(self.parameters, gradients_of(loss, self.parameters, "float16")):
            parameter.grad = slope if parameter.grad is None else parameter.grad + slope

    def learn_privately(self, draw: Draw, name: str, models: int) -> None:
        """A step on the noised mean gradient of the drawn patients; `models` are trained on the same draw.

        Together their gradients are one vector of at most √models clips, so each gets √models as much noise.
        """
        found = private_gradient(self.site, self.patients, self.network.parameters, draw, self.loss, name, models)
        self.total, self.cases = self.total + found.loss, self.cases + found.cases
        start = 0
        for parameter in self.parameters:
            part = found.gradient[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # in the parameter's own layout: fused steps need it
            parameter.grad += part
        if not self.job.step:
            self.steps += 1
            return
        if self.job.penalty is not None:  # it contains no patient data
            pull = self.job.penalty(dict(zip(self.names, self.parameters)))
            for parameter, slope in zip(self.parameters, torch.autograd.grad(pull, self.parameters)):
                assert parameter.grad is not None
                parameter.grad += slope
        self._step()

    @cached_property
    def patients(self) -> PatientGradients:
        return PatientGradients(self.module)

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
        self.network.clear()
        self.steps += 1

    def result(self) -> Fit:
        gradient = None if self.job.step else self._mean_gradient()
        steps = self.steps if self.job.step else 0
        for found, cases in self.losses:
            self.total += found.item() * cases
        loss = self.total / max(1, self.cases)
        # the number of drawn cases is not public; the number of all cases is
        cases = self.cases if self.site.private is None else len(self.site.data) * self.site.local.epochs
        return Fit(self.network.weights(), steps, cases, loss, self._state, gradient)

    def _state(self) -> OptimizerState | None:
        return read_state(self.optimizer, self.names, self.parameters) if self.job.step else None

    def _mean_gradient(self) -> Weights:
        gradients = {}
        for name, parameter in zip(self.names, self.parameters):
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = total / max(1, self.steps or self.cases)  # of a private pass, each step is already a mean
            parameter.grad = None
        return Weights(gradients)


def private_gradient(
    site: Site,
    patients: PatientGradients,
    parameters: Mapping[str, Tensor],
    draw: Draw,
    loss: Callable[[Any, Batch], Tensor],
    name: str,
    models: int = 1,
) -> ClippedSum:
    """The mean gradient (parameters,) of the drawn patients with its noise; the loss beside it has none."""
    private = site.private
    assert private is not None
    with precision(site):
        found = patients.summed(parameters, draw.batches, loss, private.clip)
    noised = covered(found.gradient, private.clip, private.noise * math.sqrt(models), draw.key, name)
    return replace(found, gradient=noised / draw.expected)


def precision(site: Site) -> AbstractContextManager[Any]:
    """Mixed precision, if the study asks for it."""
    if site.local.precision == "float32":
        return nullcontext()
    return torch.autocast(site.device.split(":")[0], dtype=getattr(torch, site.local.precision))
