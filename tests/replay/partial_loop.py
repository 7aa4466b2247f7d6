"""Plain PyTorch for replays of methods for partial annotation: contiguous networks, unfused optimisers, dictionaries.

A replay takes of the package a site's batches, the layers of networks, their first weights and the random numbers.
Labels and losses (`partial_labels`), steps, masks and averages are its own, written from the papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.contract import Stage
from consilium.networks.plain_unet import Supervised
from consilium.site import Round, Site
from consilium.study import Study
from consilium.task import Task
from consilium.timeline import present, timeline
from consilium.tree import flatten, unflatten
from tests.toy import toy_study

Model = dict[str, Tensor]
Organs = tuple[str, ...]

ENCODER = ("net.model.0.", "net.model.1.submodule.0.", "net.model.1.submodule.1.submodule.")  # of a U-Net of 3 levels
DECODER = ("net.model.2.", "net.model.1.submodule.2.")
OPTIMISERS: dict[str, dict[str, Any]] = {
    "momentum": {"local__optimizer": "sgd", "local__momentum": 0.9, "local__lr": 0.05},
    "adamw": {"local__optimizer": "adamw", "local__weight_decay": 0.01, "local__lr": 0.01},
    "adamw fresh": {"local__optimizer": "adamw", "local__lr": 0.01, "local__optimizer_state": "fresh"},
}


def small_study(organs: Path, name: str, how: str, **changes: Any) -> Study:
    """Two rounds in batches of three, on a U-Net of three levels; one round of teachers where there are any."""
    fields = {
        "study__rounds": 2,
        "local__batch_size": 3,
        "task__widths": [4, 8, 8],
        **({"method__teachers__rounds": 1} if name.endswith("-pl") or name == "ufps" else {}),
        **OPTIMISERS[how],
    }
    return toy_study(organs, name, **{**fields, **changes})


# ------------------------------------------------------------------------------------------- the package's own run


class Played(NamedTuple):
    """The server after the package's run, and every site's last memory."""

    server: Any
    memories: Mapping[str, Any]
    stage: Stage


def played(study: Study, place: Path) -> Played:
    """The package's run of a study, without scores."""
    stage = Stage(study, place)
    line = timeline(stage.method, study.plan.rounds)
    merged = dict.fromkeys(stage.roster, -1)
    for phase, round in line:
        replies = {}
        for name in present(study.plan.away, line, stage.roster, phase, round):
            order = flatten(stage.method.send(stage.server, stage.roster[name], round))
            replies[name] = unflatten(stage.train(name, order, round.index, merged[name]), stage.method.Uplink)
            merged[name] = round.index
        stage.server = stage.method.merge(stage.server, replies, round)
    kept = {name: stage.workers[name].kept(merged[name]) for name in stage.roster}
    return Played(stage.server, {name: one.memory for name, one in kept.items() if one is not None}, stage)


# ------------------------------------------------------------------------------------------- a site, a step


class Student:
    """A contiguous network and its optimiser."""

    def __init__(self, network: nn.Module, weights: Mapping[str, Tensor], learned: Sequence[str] = ()) -> None:
        self.network = loaded(network, weights).train()
        self.parameters = {k: p for k, p in network.named_parameters() if not learned or k.startswith(tuple(learned))}
        self.optimiser: torch.optim.Optimizer | None = None
        self.clip = 0.0

    def __call__(self, images: Tensor) -> Any:
        return self.network(images)

    def slope(self, loss: Tensor) -> Model:
        """∇ loss, clipped as the study says."""
        found = torch.autograd.grad(loss, list(self.parameters.values()))
        length = torch.cat([slope.flatten() for slope in found]).norm()
        factor = min(1.0, self.clip / (float(length) + 1e-6)) if self.clip else 1.0
        return {name: slope * factor for name, slope in zip(self.parameters, found, strict=True)}

    def step(self, loss: Tensor) -> None:
        self.descend(self.slope(loss))

    def descend(self, slope: Model) -> None:
        assert self.optimiser is not None
        for name, parameter in self.parameters.items():
            parameter.grad = slope[name].contiguous()
        self.optimiser.step()

    def weights(self) -> Model:
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}


@dataclass
class Hospital:
    """A site and what it remembers."""

    site: Site
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.site.card.name

    @property
    def labels(self) -> Organs:
        return self.site.card.labels

    @property
    def n(self) -> int:
        return self.site.card.n

    @property
    def task(self) -> Any:
        return self.site.task

    @property
    def crossed(self) -> bool:
        """Whether the loss is Dice and cross entropy, or Dice alone."""
        return bool(self.task.loss_name == "dice+ce")

    def batches(self, round: Round) -> Iterator[Batch]:
        return self.site.batches(round)

    def student(
        self,
        network: nn.Module,
        weights: Mapping[str, Tensor],
        round: Round,
        name: str = "",
        learned: Sequence[str] = (),
    ) -> Student:
        """A network with the study's optimiser, which continues from the state kept under a name."""
        made, local = Student(network, weights, learned), self.site.local
        lr = local.lr * local.decay**round.step if local.schedule == "decay" else local.lr
        plain: dict[str, Any] = {"lr": lr, "weight_decay": local.weight_decay, "foreach": False, "fused": False}
        parameters = list(made.parameters.values())
        if local.optimizer == "sgd":
            made.optimiser = torch.optim.SGD(parameters, momentum=local.momentum, **plain)
        else:
            kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
            made.optimiser = kinds[local.optimizer](parameters, **plain)
        if f"optimiser {name}" in self.memory:
            made.optimiser.load_state_dict(
                {**made.optimiser.state_dict(), "state": deepcopy(self.memory[f"optimiser {name}"])}
            )
        made.clip = local.clip
        return made

    def keep(self, student: Student, name: str = "") -> None:
        """Remember the optimiser's state, if the study says so."""
        assert student.optimiser is not None
        if self.site.local.optimizer_state == "kept":
            self.memory[f"optimiser {name}"] = deepcopy(student.optimiser.state_dict()["state"])


@dataclass
class Replay:
    """A federation whose rounds a naive loop goes through."""

    task: Any
    method: Any
    hospitals: Mapping[str, Hospital]
    rounds: Sequence[Round]
    away: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, stage: Stage) -> Replay:
        hospitals = {name: Hospital(worker.site) for name, worker in stage.workers.items()}
        return cls(stage.task, stage.method, hospitals, stage.rounds, stage.study.plan.away)

    def at(self, round: Round) -> list[Hospital]:
        """The sites that are there."""
        return [h for name, h in self.hospitals.items() if round.number not in self.away.get(name, ())]


def loaded(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    network.load_state_dict({name: tensor.clone() for name, tensor in weights.items()})
    return network


def first(task: Task, **which: Any) -> Model:
    return dict(task.initial(**which))


def average(models: Mapping[str, Model], shares: Mapping[str, float]) -> Model:
    """Σ_k a_k w_k, with shares a_k that are made to sum to one over the sites that answered."""
    total = sum(shares[name] for name in models)
    names = list(next(iter(models.values())))
    return {n: torch.stack([shares[k] / total * model[n] for k, model in models.items()]).sum(0) for n in names}


def part_of(model: Mapping[str, Tensor], prefixes: Sequence[str]) -> Model:
    return {name: tensor for name, tensor in model.items() if name.startswith(tuple(prefixes))}


# ------------------------------------------------------------------------------------------- comparing


def heads(output: Any) -> list[tuple[float, Tensor]]:
    """The logits of every head with its weight in the loss."""
    if isinstance(output, Supervised):
        return [(1.0, output.main), *output.asides]
    return [(1.0, output)]


def felt(network: nn.Module, weights: Mapping[str, Tensor], channels: int = 1, dimensions: int = 2) -> Model:
    """Where a weight changes the output at all. A bias that a normalisation takes out has a gradient of rounding errors
    only, which Adam makes to steps of full length."""
    network = loaded(network, weights).double().train()
    draw = torch.Generator().manual_seed(0)
    output = network(torch.rand(2, channels, *[16] * dimensions, generator=draw).double())
    parts = [logits for _, logits in heads(output[0] if hasattr(output, "features") else output)]
    total = torch.stack([(torch.rand(p.shape, generator=draw).double() * p).sum() for p in parts]).sum()
    found = dict(network.named_parameters())
    slopes = torch.autograd.grad(total, list(found.values()), allow_unused=True)
    most = max(float(s.abs().max()) for s in slopes if s is not None)
    return {k: torch.ones_like(p).bool() if s is None else s.abs() > 1e-11 * most
            for (k, p), s in zip(found.items(), slopes, strict=True)}  # fmt: skip


def apart(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], start: Mapping[str, Tensor], where: Model) -> float:
    """The distance of two models, in units of the way from the start."""
    assert theirs.keys() == ours.keys()

    def length(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        gaps = [((one[k] - other[k]).double() * where.get(k, torch.ones(()))).square().sum() for k in theirs]
        return float(torch.stack(gaps).sum().sqrt())

    moved = length(ours, start)
    assert moved > 1e-3, "nothing was learned"
    return length(theirs, ours) / moved
