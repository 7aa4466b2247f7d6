"""Classification of whole images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilium.networks import Network
from consilium.site import Batch, Mark, Task
from consilium.tasks.features import pooled_activations
from consilium.tasks.inference import averaged, on_bench
from consilium.weights import Weights


@dataclass(frozen=True, eq=False)
class Classification(Task):
    """The class names are the labels, in the order of the outputs."""

    labels: tuple[str, ...]
    dimensions: int
    channels: int
    model: Network
    selector: Network
    seed: int = 0
    device: str = "cpu"

    headline = "accuracy"
    needs_all = True

    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        network = self.selector if kind == "selector" else self.model
        return network.build(self.dimensions, self.channels, len(self.labels if labels is None else labels))

    def loss(
        self, output: Any, batch: Batch, labels: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> Tensor:
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
    ) -> list[Mark]:
        return [Mark("class", "accuracy", float(output.argmax() == truth))]

    def score_all(self, outputs: Sequence[Tensor], truths: Sequence[Tensor], full: bool) -> list[Mark]:
        """The area under the ROC curve, one class against the rest, mean over the classes seen at the site."""
        from sklearn.metrics import roc_auc_score

        if not full or not outputs:
            return []
        chances, truth = torch.stack(list(outputs)).softmax(1).numpy(), torch.stack(list(truths)).numpy()
        areas = [
            float(roc_auc_score(truth == i, chances[:, i]))
            for i in range(len(self.labels))
            if 0 < (truth == i).sum() < len(truth)
        ]
        return [Mark("class", "auc", sum(areas) / len(areas))] if areas else []

    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        network = on_bench(self, weights, kind, labels)
        with torch.no_grad():
            return network(images.to(self.device)).cpu()  # type: ignore[no-any-return]

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        return pooled_activations(on_bench(self, weights, "model", None), images.to(self.device))
