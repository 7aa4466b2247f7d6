"""What a method is replayed with: contiguous networks, plain autograd, optimisers that take one tensor after another.

Of the package it takes the data of a study (each site's batches by round), the loss of a task, and the first weights.
Nothing here knows channels-last memory, fused steps, networks that are used again, or messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilium import simulation
from consilium.batch import Batch
from consilium.data.cases import Cases
from consilium.data.site_folder import read_federation
from consilium.local_norm import LocalNorm
from consilium.local_training import Local
from consilium.run_folder import RunFolder
from consilium.site import POOLED, Round, Site, SiteCard
from consilium.site_opening import open_arrays
from consilium.store import MemoryStore
from consilium.study import Study
from consilium.timeline import timeline

State = dict[str, Tensor]  # the weights of a model, or a gradient
Ended = tuple[Any, dict[str, Any]]  # the server's last state, and the sites' memories


# ------------------------------------------------------------------------------------------------ arithmetic


def is_trained(name: str) -> bool:
    """Whether a tensor is a parameter; the others are statistics of normalisation layers."""
    return name.rpartition(".")[2] not in ("running_mean", "running_var", "num_batches_tracked")


def average(models: Mapping[str, State], shares: Mapping[str, float]) -> State:
    """Σ_k share_k w_k / Σ_k share_k over the sites in `models`."""
    total = sum(shares[name] for name in models)
    return combined(*((shares[name] / total, model) for name, model in models.items()))


def combined(*parts: tuple[Any, State]) -> State:
    """Σ a w over pairs (a, w); a gradient has no statistics, and counters are those of the first."""
    return {
        key: sum(factor * state[key] for factor, state in parts if key in state) if part.is_floating_point() else part
        for key, part in parts[0][1].items()
    }


def squared(a: State, b: Mapping[str, Tensor] | None = None) -> Tensor:
    """‖a − b‖² over all parameters of a together; without b, ‖a‖²."""
    parts = [(part if b is None else part - b[key]) for key, part in a.items() if is_trained(key)]
    return torch.stack([part.square().sum() for part in parts]).sum()


def dot(a: State, b: State) -> Tensor:
    return torch.stack([(part * b[key]).sum() for key, part in a.items() if is_trained(key)]).sum()


def leaves(state: State) -> State:
    """Parameters to differentiate by; statistics stay the same tensors, which every pass writes to."""
    return {key: part.detach().clone().requires_grad_() if is_trained(key) else part for key, part in state.items()}


def slope(value: Tensor, of: State) -> State:
    """The gradient of a value, by autograd."""
    names = [key for key, part in of.items() if part.requires_grad]
    return dict(zip(names, torch.autograd.grad(value, [of[key] for key in names])))


# ------------------------------------------------------------------------------------------------ a site


class Descent:
    """Parameters and their optimiser, and the statistics that go with them."""

    def __init__(self, start: State, local: Local, lr: float) -> None:
        self._parts = {key: nn.Parameter(part.clone().contiguous()) for key, part in start.items() if is_trained(key)}
        self._statistics = {key: part.clone() for key, part in start.items() if not is_trained(key)}
        slow: dict[str, Any] = {"lr": lr, "weight_decay": local.weight_decay, "foreach": False, "fused": False}
        self.clip = local.clip
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self._parts.values(), momentum=local.momentum, **slow)
            if local.optimizer == "sgd"
            else {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[local.optimizer](self._parts.values(), **slow)
        )

    @property
    def now(self) -> State:
        return {**{key: part.detach().clone() for key, part in self._parts.items()}, **self._statistics}

    def step(self, gradient: State) -> None:
        length = float(squared({key: gradient[key] for key in self._parts})) ** 0.5
        shorter = min(1.0, self.clip / length) if self.clip else 1.0
        for key, part in self._parts.items():
            part.grad = (shorter * gradient[key]).detach().clone().contiguous()
        self.optimizer.step()

    @torch.no_grad()
    def move(self, to: State, lr: float) -> None:
        """The same optimiser, with all that it has gathered, at other weights."""
        for key, part in self._parts.items():
            part.copy_(to[key])
        self._statistics = {key: to[key].clone() for key in self._statistics}
        for group in self.optimizer.param_groups:
            group["lr"] = lr


@dataclass
class Hospital:
    """A site: its batches, the loss of any weights on them, and its optimisers."""

    site: Site
    module: nn.Module
    _kept: dict[str, Descent] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.site.card.n

    def batches(self, round: Round) -> Iterator[Batch]:
        return self.site.batches(round)

    def whole(self, split: str) -> Iterator[Batch]:
        return self.site.data.whole(split, self.site.local.batch_size)

    def output(self, at: State, images: Tensor, training: bool = False) -> Tensor:
        return functional_call(self.module.train(training), at, (images,))

    def loss(self, at: State, batch: Batch, training: bool = True) -> Tensor:
        return self.site.task.loss(self.output(at, batch.images, training), batch)

    def gradient(self, at: State, batch: Batch) -> State:
        here = leaves(at)
        return slope(self.loss(here, batch), here)

    def valid_loss(self, at: State) -> float:
        with torch.no_grad():
            found = [(float(self.loss(at, batch, training=False)), len(batch.cases)) for batch in self.whole("valid")]
        return sum(loss * n for loss, n in found) / sum(n for _, n in found)

    def rate(self, round: Round) -> float:
        local = self.site.local
        return local.lr * (local.decay**round.step if local.schedule == "decay" else 1.0)

    def descent(self, name: str, start: State, round: Round, fresh: bool = False) -> Descent:
        """The study's optimiser for the model of this name: with its state of the last round if that is kept."""
        local = self.site.local
        if local.optimizer_state == "fresh" or fresh or name not in self._kept:
            self._kept[name] = Descent(start, local, self.rate(round))
        else:
            self._kept[name].move(start, self.rate(round))
        return self._kept[name]

    def trained(self, name: str, start: State, round: Round, fresh: bool = False) -> State:
        """One pass over the batches, a step on each."""
        model = self.descent(name, start, round, fresh)
        for batch in self.batches(round):
            model.step(self.gradient(model.now, batch))
        return model.now


# ------------------------------------------------------------------------------------------------ a study


class Play:
    """A study that is replayed: its sites, its rounds and who takes part in them."""

    def __init__(self, study: Study) -> None:
        federation = read_federation(Path(study.data.federation))
        self.study, self.method, self.task = study, study.method, study.task
        arrays = {name: open_arrays(study, federation, name) for name in sorted(federation.sites)}
        parts = {POOLED: tuple(arrays.values())} if study.pooled else {name: (arrays[name],) for name in arrays}
        data = {name: Cases(each) for name, each in parts.items()}
        cards = {name: SiteCard(name, i, len(data[name]), self.task.labels) for i, name in enumerate(data)}
        self.n = {name: card.n for name, card in cards.items()}
        self.sites = {
            name: Hospital(
                Site(card, cards, self.task, data[name], study.local, "cpu", study.plan.seed), self.task.network()
            )
            for name, card in cards.items()
        }

    def first(self, kind: str = "model", labels: Sequence[str] | None = None, draw: int = 0) -> State:
        return {key: part.clone() for key, part in self.task.initial(kind, labels, draw).items()}

    def rounds(self, phase: str = "") -> Iterator[tuple[Round, dict[str, Hospital]]]:
        """The rounds of a phase (default: the first), each with the sites that take part."""
        line = timeline(self.study.method, self.study.plan.rounds)
        for _, round in line:
            if round.phase == (phase or line[0][0].name):
                away = self.study.plan.away
                yield round, {k: s for k, s in self.sites.items() if round.number not in away.get(k, ())}

    def all(self, value: Any) -> dict[str, Any]:
        """The same value for every site."""
        return dict.fromkeys(self.sites, value)


def ended(study: Study, runs: Path) -> Ended:
    """The study run by the package: the server after the last round, and what the sites remember."""
    folder = RunFolder.open(simulation.run(study, runs, workers=0).folder)
    state = folder.states.resume(study.method)
    assert state is not None
    memories = {}
    for site, last in state.merged.items():
        norm = LocalNorm(frozenset(), site)
        if norm.remembers(study.method, study.local):
            held: Any = MemoryStore(folder.path / "sites" / site / "memory", site).at(last, norm.kept(study.method))
            memories[site] = held.memory
    return state.server, memories


def apart(ours: Mapping[str, Tensor], theirs: State, start: State) -> float:
    """How far two models are from each other, in units of the way from the start."""
    assert set(ours) == set(theirs)
    floats = [key for key, part in theirs.items() if part.is_floating_point()]
    apart, moved = (
        float(torch.stack([(theirs[key] - other[key]).square().sum() for key in floats]).sum()) ** 0.5
        for other in (ours, start)
    )
    assert moved > 0, "nothing was trained"
    return apart / moved
