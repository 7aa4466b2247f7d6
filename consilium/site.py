"""All a method may touch at a hospital, and the task it learns there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.fields import NAME
from consilium.randomness import torch_generator
from consilium.tree import Items, Range, Text
from consilium.weights import SiteName, Weights

ROUNDS = 1_000_000  # more than any run has
POOLED = "(pooled)"  # the virtual site that holds all cases: no site can be called so
Count = Annotated[int, Range(0, 2**40)]
RoundIndex = Annotated[int, Range(0, ROUNDS)]
SiteId = Annotated[str, Text(100, rf"{NAME}|\(pooled\)")]
Label = Annotated[str, Text(200)]
Labels = Annotated[tuple[Label, ...], Items(255)]


@dataclass(frozen=True)
class SiteCard:
    """Public facts about a site, exchanged at roll call."""

    name: SiteId
    index: Annotated[int, Range(-1, 2**20)]  # its place in the roster, in site-name order; -1: not a member
    n: Count  # training cases
    labels: Labels  # what it annotates
    unlabelled: Count = 0  # more training cases, without a mask: only methods that make labels learn from them


Roster = Mapping[SiteName, SiteCard]


@dataclass(frozen=True)
class Round:
    """Where in the run we are."""

    index: RoundIndex  # counted over all phases, from 0
    phase: Annotated[str, Text(40)]
    step: RoundIndex  # counted within the phase, from 0
    total: RoundIndex  # rounds of this phase
    before: RoundIndex = 0  # rounds before it that are not the paper's, and so are not counted in `number`
    scored: bool = False  # scores are taken after it

    @property
    def number(self) -> int:
        """As users count: the paper's rounds are 1, 2, …; a phase that is not the paper's counts on from there."""
        return self.index + 1 - self.before


@dataclass(frozen=True)
class Batch:
    """A few cases, augmented."""

    images: Tensor  # (batch, channels, *spatial)
    truth: Tensor  # segmentation: (batch, *spatial) integers; classification: (batch,)
    cases: tuple[str, ...]
    volume: str = ""  # the images are all slices of this case, a volume, in order; empty: they are cases of their own
    labels: tuple[tuple[str, ...], ...] | None = None  # what each truth shows; 0 is background or unknown. None: all
    spacings: tuple[tuple[float, ...] | None, ...] | None = None  # of each case's voxels, mm; None: not known
    beside: Tensor | None = None  # (batch, maps, *spatial): what a method knows of every voxel, cut and turned alike

    def labels_of(self, i: int) -> tuple[str, ...] | None:
        """The labels that are annotated in case `i`; what is not annotated there is unknown, not absent."""
        return None if self.labels is None else self.labels[i]

    @property
    def bare(self) -> Tensor:
        """Boolean, (batch,): cases without a mask."""
        return torch.tensor([self.labels_of(i) == () for i in range(len(self.cases))], device=self.images.device)

    def spacing_of(self, i: int) -> tuple[float, ...] | None:
        return None if self.spacings is None else self.spacings[i]

    def only(self, i: int) -> Batch:
        """Case `i` alone."""
        return replace(
            self,
            images=self.images[i : i + 1],
            truth=self.truth[i : i + 1],
            cases=self.cases[i : i + 1],
            labels=None if self.labels is None else self.labels[i : i + 1],
            spacings=None if self.spacings is None else self.spacings[i : i + 1],
            beside=None if self.beside is None else self.beside[i : i + 1],
        )


@dataclass(frozen=True)
class Local:
    """How sites train; shared by all methods, so that comparisons are fair."""

    optimizer: str = "adam"  # adam, adamw, sgd
    lr: float = 1e-3
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0
    schedule: str = "constant"  # "decay", "warmup-cosine", "warmup-restarts"
    decay: float = 0.99  # of the learning rate per round, for "decay"
    warmup: float = 0.02  # share of the rounds, for "warmup-cosine" and "warmup-restarts"
    restart: int = 3  # rounds per cosine, for "warmup-restarts"
    epochs: int = 1
    batch_size: int = 8
    clip: float = 0.0  # > 0: the gradient's norm is clipped to this
    threads: int = 1  # fixed per site: the number of threads changes the bits of a training step
    device: str = "auto"  # cpu, cuda, cuda:1, mps
    precision: str = "float32"  # "bfloat16", "float16": mixed precision
    batchnorm: str = "average"  # "local-statistics", "local"
    optimizer_state: str = "kept"  # from round to round, at the site; "fresh": every round starts without it

    def __post_init__(self) -> None:
        choices = {
            "optimizer": ("adam", "adamw", "sgd"),
            "schedule": ("constant", "decay", "warmup-cosine", "warmup-restarts"),
            "precision": ("float32", "bfloat16", "float16"),
            "batchnorm": ("average", "local-statistics", "local"),
            "optimizer_state": ("kept", "fresh"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise StudyError(f"[local] {name} = {getattr(self, name)!r}: it must be one of {', '.join(allowed)}.")
        for name in ("epochs", "batch_size", "threads", "restart"):
            if getattr(self, name) < 1:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be at least 1.")
        if not 0 < self.lr < 1e3:
            raise StudyError(f"[local] lr = {self.lr}: it must be positive (and below 1000).")
        for name in ("momentum", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be in [0, 1).")
        if not 0 < self.decay <= 1:
            raise StudyError(f"[local] decay = {self.decay}: it must be in (0, 1].")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StudyError(f"[local] {name} = {getattr(self, name)}: it must be a number from 0 up.")


# --------------------------------------------------------------------------------------------------- prediction


@dataclass(frozen=True)
class Choice:
    """Which model answered for one image, and why."""

    model: str  # "global", "personal", "local", "pooled"
    of: SiteName = ""
    confidence: float | None = None  # the selector's largest probability
    why: str = "the only model"
    chances: Mapping[str, float] = field(default_factory=dict)  # the selector's probabilities by site

    @property
    def key(self) -> str:
        return f"{self.model}/{self.of}" if self.of else self.model


@dataclass(frozen=True)
class Answer:
    output: Tensor  # logits, (batch, channels, *spatial) or (batch, classes)
    choices: tuple[Choice, ...]  # one per image


class Predictor(ABC):
    """A model in use. `model`, `of` and `when` name it in every score."""

    model: str
    of: SiteName
    when: str  # "merged", "trained", "adapted"

    @abstractmethod
    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        """Logits for a batch of images; `volume`: they are the slices of one volume."""

    def others(self) -> Sequence[Predictor]:
        """Further models worth a score of their own, for instance the parts of a super model."""
        return ()

    def elsewhere(self) -> Sequence[Predictor]:
        """Models of other sites, scored here once at the end: how do they do away from home?"""
        return ()

    def of_site(self, site: SiteName) -> Predictor:
        """The model of one hospital, for `predict --site`."""
        for predictor in (self, *self.others(), *self.elsewhere()):
            if predictor.of == site:
                return predictor
        raise StudyError(f"this run holds no model of its own for site '{site}'; leave out --site.")


class OneModel(Predictor):
    """A single network with fixed weights."""

    def __init__(
        self, task: Task, weights: Weights, model: str = "global", of: SiteName = "", when: str = "merged"
    ) -> None:
        self.task, self.weights = task, weights
        self.model, self.of, self.when = model, of, when

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        choice = Choice(self.model, self.of)
        return Answer(self.task.infer(self.weights, images), (choice,) * len(images))


class WithOthers(Predictor):
    """A predictor, and further models to score beside it."""

    def __init__(self, first: Predictor, others: Sequence[Predictor] = (), elsewhere: Sequence[Predictor] = ()) -> None:
        self.first, self._others, self._elsewhere = first, others, elsewhere
        self.model, self.of, self.when = first.model, first.of, first.when

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        return self.first.answer(images, volume)

    def others(self) -> Sequence[Predictor]:
        return self._others

    def elsewhere(self) -> Sequence[Predictor]:
        return self._elsewhere


# --------------------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Mark:
    """One score of one case."""

    label: str
    metric: str
    value: float


class Task(ABC):
    """What is learned: network, loss, prediction, scores. It holds no data."""

    labels: tuple[str, ...]
    dimensions: int
    channels: int
    seed: int
    device: str
    headline: str  # the metric that decides
    needs_all = False  # whether `score_all` has scores that need all cases of a site at once

    @abstractmethod
    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        """A new network. `kind`: "model", "selector" (one output per label given), "teacher"."""

    @abstractmethod
    def loss(
        self, output: Any, batch: Batch, labels: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """What a network's output is worth on a batch; `labels` are those of its outputs, if not all.

        With `weights` (batch) it is Σ_j w_j L_j / B: how much each case counts.
        Where a truth does not show a label (`batch.labels`), nothing is learned about it, not even its absence.
        """

    @abstractmethod
    def score(
        self,
        output: Tensor,
        truth: Tensor,
        full: bool,
        labels: Sequence[str] | None = None,
        spacing: Sequence[float] | None = None,
    ) -> list[Mark]:
        """The scores of one case from its logits, of the `labels` its truth shows; `full` adds the slow ones."""

    def score_all(self, outputs: Sequence[Tensor], truths: Sequence[Tensor], full: bool) -> list[Mark]:
        """Scores that need all cases of a site at once."""
        return []

    @abstractmethod
    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        """Logits of whole images, in sliding windows where the study asks for patches; on the CPU."""

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        """What the model's encoder sees in whole images, pooled: (batch, features), float64, on the CPU."""
        raise StudyError(f"{type(self).__name__} gives no features of images; use a selector that is trained.")

    @abstractmethod
    def blend(self, outputs: Sequence[Tensor], shares: Tensor) -> Tensor:
        """Logits whose probabilities are the models' probabilities averaged by `shares` (batch, models)."""

    @abstractmethod
    def decide(self, output: Tensor) -> Tensor:
        """The prediction from the logits of one case: an integer mask, or a class index."""

    def initial(self, kind: str = "model", labels: Sequence[str] | None = None, draw: int = 0) -> Weights:
        """The seeded starting weights, the same at every site; another `draw` gives another start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_generator(self.seed, "initial", kind, draw).initial_seed())
            return Weights.over(dict(self.network(kind, labels).state_dict()))  # nobody else holds the network

    def shape(self, kind: str = "model", labels: Sequence[str] | None = None) -> Weights:
        """The weights' names, shapes and types, on the meta device."""
        return _blueprint(self, kind, None if labels is None else tuple(labels))[0]

    def parameters(self, kind: str = "model", labels: Sequence[str] | None = None) -> set[str]:
        """The names of what is trained; the other names of `initial` are statistics."""
        return set(_blueprint(self, kind, None if labels is None else tuple(labels))[1])

    def generator(self, purpose: str, *names: object) -> torch.Generator:
        return torch_generator(self.seed, purpose, *names)

    def on(self, device: str) -> Task:
        return replace(self, device=device)  # type: ignore[type-var]


@lru_cache(maxsize=16)
def _blueprint(task: Task, kind: str, labels: tuple[str, ...] | None) -> tuple[Weights, frozenset[str]]:
    """A network's weights without memory, and its parameters' names; asked for once per site and round."""
    with torch.device("meta"):
        network = task.network(kind, labels)
    return Weights.over(dict(network.state_dict())), frozenset(name for name, _ in network.named_parameters())


# --------------------------------------------------------------------------------------------------- the site


class SiteData(Protocol):
    """The cases of one site, preprocessed."""

    def batches(self, batch_size: int, epoch: int, seed: int) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...
    def cases(self, split: str) -> Sequence[str]: ...
    def whole(self, split: str, batch_size: int) -> Iterator[Batch]: ...

    def with_unlabelled(self) -> SiteData:
        """The same cases and those without a mask; nothing is annotated in these, `batch.labels` says so."""
        ...

    def with_maps(self, maps: Callable[[str], Tensor]) -> SiteData:
        """The same cases, with maps (maps, *spatial) of each beside it in training batches."""
        ...


@dataclass(frozen=True)
class Site:
    """One hospital, as a method sees it."""

    card: SiteCard
    roster: Roster
    task: Task
    data: SiteData
    local: Local
    device: str
    seed: int

    def batches(self, round: Round) -> Iterator[Batch]:
        """The training cases in this round's order, `epochs` times."""
        for epoch in range(self.local.epochs):
            yield from self.data.batches(self.local.batch_size, epoch, self._seed(round, "batches"))

    def generator(self, round: Round, purpose: str) -> torch.Generator:
        name = self.card.name.strip("()")  # the virtual site draws as it did when it was called without them
        return torch_generator(self.seed, name, round.index, purpose)

    def _seed(self, round: Round, purpose: str) -> int:
        return self.generator(round, purpose).initial_seed()

    def loss(self, weights: Weights, split: str = "train") -> float:
        """The mean loss of a model on this site's own cases, unaugmented."""
        total, count = 0.0, 0
        for batch in self.data.whole(split, self.local.batch_size):
            output = self.task.infer(weights, batch.images)
            total += float(self.task.loss(output, batch)) * len(batch.cases)
            count += len(batch.cases)
        if not count:
            raise StudyError(f"site '{self.card.name}' has no {split} cases; give it some or leave it out.")
        return total / count
