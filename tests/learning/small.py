"""A site small enough to follow by hand: one weight w, images that are single numbers x, loss (w x − t)² / 2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.local_training import Local
from consilium.site import Round, Site, SiteCard
from consilium.task import CaseScore, Task
from consilium.weights import Weights

FIRST = Round(0, "train", 0, 4)


@dataclass(frozen=True, eq=False)
class Line(Task):
    """y = w x for `inputs` weights, without bias."""

    inputs: int = 1
    labels: tuple[str, ...] = ("y",)
    dimensions: int = 1
    seed: int = 0
    device: str = "cpu"
    headline = "error"
    metrics = ("error",)

    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        return nn.Linear(self.inputs, len(labels) if labels else 1, bias=False)

    def loss(
        self, output: Any, batch: Batch, labels: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> Tensor:
        return (output[:, 0] - batch.truth).square().mean() / 2

    def score(
        self,
        output: Tensor,
        truth: Tensor,
        full: bool,
        labels: Sequence[str] | None = None,
        spacing: Sequence[float] | None = None,
    ) -> list[CaseScore]:
        return [CaseScore("y", "error", float((output[0] - truth).abs()))]

    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        return images @ weights["weight"].T

    def decide(self, output: Tensor) -> Tensor:
        return output

    def blend(self, outputs: Sequence[Tensor], shares: Tensor) -> Tensor:
        return (torch.stack(list(outputs), 1) * shares[..., None]).sum(1)


@dataclass(frozen=True)
class Given:
    """The same batches in every round and epoch."""

    all: tuple[Batch, ...]

    def batches(self, batch_size: int, epoch: int, seed: int) -> Iterator[Batch]:
        return iter(self.all)

    def __len__(self) -> int:
        return sum(len(batch.cases) for batch in self.all)

    def cases(self, split: str) -> Sequence[str]:
        return [case for batch in self.all for case in batch.cases]

    def whole(self, split: str, batch_size: int) -> Iterator[Batch]:
        return iter(self.all)


def batch(x: Sequence[Any], t: Sequence[float]) -> Batch:
    images = torch.tensor(x, dtype=torch.float32)
    cases = tuple(f"case{value}" for value in x)
    return Batch(images.reshape(len(t), -1), torch.tensor(t, dtype=torch.float32), cases)


def site(*batches: Batch, name: str = "ada", roster: Sequence[str] = ("ada",), inputs: int = 1, **local: Any) -> Site:
    """A site with these batches; `local` are the fields of [local], with plain SGD at 0.1 unless said otherwise."""
    cards = {n: SiteCard(n, i, sum(len(b.cases) for b in batches), ("y",)) for i, n in enumerate(sorted(roster))}
    how = Local(**{"optimizer": "sgd", "momentum": 0.0, "lr": 0.1, **local})
    return Site(cards[name], cards, Line(inputs), Given(batches), how, "cpu", 0)


def line(*w: float) -> Weights:
    return Weights({"weight": torch.tensor([w], dtype=torch.float32)})


def value(weights: Weights) -> float:
    return float(weights["weight"].squeeze())
