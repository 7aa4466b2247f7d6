"""A task: network, loss, prediction and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.randomness import torch_generator
from consilium.starting_weights import started
from consilium.weights import Weights


@dataclass(frozen=True)
class CaseScore:
    """One score of one case."""

    label: str
    metric: str
    value: float


class Task(ABC):
    """Network, loss, prediction and scores. It holds no data."""

    labels: tuple[str, ...]
    dimensions: int
    channels: int
    seed: int
    device: str
    start: str = ""  # a run or file with the initial weights; "": seeded
    headline: str  # the metric that chooses the best round
    decides: str = "slice"  # volumes trained as slices: whose score that is, a slice's or a "volume"'s
    needs_all = False  # whether `score_all` has scores that need all cases of a site at once

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of all scores that cases can have; which of them a case has depends on the case."""

    @abstractmethod
    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        """A new network. `kind`: "model", "selector" (one output per label given), "teacher"."""

    @abstractmethod
    def loss(
        self, output: Any, batch: Batch, labels: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """The loss of a network's output on a batch; `labels` are those of the output, if not all.

        With `weights` (batch,) it is Σ_j w_j L_j / B. A label that a truth does not show (`batch.labels`) has no loss,
        neither for its presence nor for its absence.
        """

    @abstractmethod
    def score(
        self,
        output: Tensor,
        truth: Tensor,
        full: bool,
        labels: Sequence[str] | None = None,
        spacing: Sequence[float] | None = None,
    ) -> list[CaseScore]:
        """The scores of one case from its logits, for the `labels` that its truth shows; `full` adds slow scores."""

    def score_all(self, outputs: Sequence[Tensor], truths: Sequence[Tensor], full: bool) -> list[CaseScore]:
        """Scores that need all cases of a site at once."""
        return []

    @abstractmethod
    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        """Logits of whole images on the CPU; in sliding windows if the study uses patches."""

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        """The pooled features of whole images in the model's encoder: (batch, features), float64, on the CPU."""
        raise StudyError(f"{type(self).__name__} gives no features of images; use a selector that is trained.")

    @abstractmethod
    def blend(self, outputs: Sequence[Tensor], shares: Tensor) -> Tensor:
        """Logits whose probabilities are the models' probabilities averaged by `shares` (batch, models)."""

    @abstractmethod
    def decide(self, output: Tensor) -> Tensor:
        """The prediction from the logits of one case: an integer mask, or a class index."""

    def initial(self, kind: str = "model", labels: Sequence[str] | None = None, draw: int = 0) -> Weights:
        """The seeded starting weights, the same at every site; another `draw` gives another start.

        For the model they are those of `start`, if the study names one.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_generator(self.seed, "initial", kind, draw).initial_seed())
            own = dict(self.network(kind, labels).state_dict())
        if self.start and kind == "model":
            own = started(own, self.start)
        return Weights.over(own)  # nothing else uses this network

    def shape(self, kind: str = "model", labels: Sequence[str] | None = None) -> Weights:
        """The weights' names, shapes and types, on the meta device."""
        return _blueprint(self, kind, None if labels is None else tuple(labels))[0]

    def parameters(self, kind: str = "model", labels: Sequence[str] | None = None) -> set[str]:
        """The names of the trained tensors; the other tensors of `initial` are statistics."""
        return set(_blueprint(self, kind, None if labels is None else tuple(labels))[1])

    def generator(self, purpose: str, *names: object) -> torch.Generator:
        return torch_generator(self.seed, purpose, *names)

    def on(self, device: str) -> Task:
        return replace(self, device=device)  # type: ignore[type-var]


@lru_cache(maxsize=64)
def _blueprint(task: Task, kind: str, labels: tuple[str, ...] | None) -> tuple[Weights, frozenset[str]]:
    """A network's weights on the meta device, and its parameters' names; cached."""
    with torch.device("meta"):
        network = task.network(kind, labels)
    return Weights.over(dict(network.state_dict())), frozenset(name for name, _ in network.named_parameters())
