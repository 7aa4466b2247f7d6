"""Classification of whole images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.networks import Network
from consilium.scores.classes import area_under_roc
from consilium.scores.rows import OWN
from consilium.task import CaseScore, Task
from consilium.tasks.features import pooled_activations
from consilium.tasks.inference import averaged, loaded
from consilium.tasks.own_code import OwnLoss, OwnScore, value_of
from consilium.weights import Weights


@dataclass(frozen=True, eq=False)
class Classification(Task):
    """The class names are the labels, in the order of the outputs."""

    labels: tuple[str, ...]
    dimensions: int
    channels: int
    model: Network
    selector: Network
    own_loss: OwnLoss | None = None  # (logits (batch, classes), classes (batch,)) → a number, or one per case
    own_scores: Mapping[str, OwnScore] = field(default_factory=dict)  # (predicted class, true class) → a number
    seed: int = 0
    device: str = "cpu"
    start: str = ""  # the file of the initial weights

    headline = "accuracy"
    needs_all = True

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "auc", *(f"{OWN}{name}" for name in self.own_scores))

    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        network = self.selector if kind == "selector" else self.model
        return network.build(self.dimensions, self.channels, len(self.labels if labels is None else labels))

    def loss(
        self, output: Any, batch: Batch, labels: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if self.own_loss is not None:
            return value_of(self.own_loss, output.float(), batch.truth, weights)
        if weights is None:
            return nn.functional.cross_entropy(output.float(), batch.truth)
        return (weights * nn.functional.cross_entropy(output.float(), batch.truth, reduction="none")).mean()

    def blend(self, outputs: Sequence[Tensor], shares: Tensor) -> Tensor:
        return averaged([output.softmax(1) for output in outputs], shares).clamp_min(1e-6).log()

    def decide(self, output: Tensor) -> Tensor:
        return output.argmax(-1)

    def score(
        self,
        output: Tensor,
        truth: Tensor,
        full: bool,
        labels: Sequence[str] | None = None,
        spacing: Sequence[float] | None = None,
    ) -> list[CaseScore]:
        marks = [CaseScore("class", "accuracy", float(output.argmax() == truth))]
        if full:
            predicted, true = int(output.argmax()), int(truth)
            marks += [
                CaseScore("class", f"{OWN}{name}", float(own(predicted, true))) for name, own in self.own_scores.items()
            ]
        return marks

    def score_all(self, outputs: Sequence[Tensor], truths: Sequence[Tensor], full: bool) -> list[CaseScore]:
        """The area under the ROC curve, one class against the rest, mean over the classes seen at the site."""
        if not full or not outputs:
            return []
        chances, truth = torch.stack(list(outputs)).softmax(1).numpy(), torch.stack(list(truths)).numpy()
        areas = [
            area_under_roc(truth == i, chances[:, i])
            for i in range(len(self.labels))
            if 0 < (truth == i).sum() < len(truth)
        ]
        return [CaseScore("class", "auc", sum(areas) / len(areas))] if areas else []

    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        network = loaded(self, weights, kind, labels)
        with torch.no_grad():
            return network(images.to(self.device)).cpu()  # type: ignore[no-any-return]

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        return pooled_activations(loaded(self, weights, "model", None), images.to(self.device))
