"""Segmentation in 2-D and 3-D: exclusive labels by softmax, overlapping ones by a sigmoid each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from consilium.data.site_folder import inside_of
from consilium.networks import Network
from consilium.site import Batch, Mark, Task
from consilium.tasks.inference import averaged, on_bench
from consilium.weights import Weights


@dataclass(frozen=True, eq=False)
class Segmentation(Task):
    """Labels are mask values 1, 2, …; with `contains`, the disc's channel includes the cup's voxels."""

    labels: tuple[str, ...]
    dimensions: int
    channels: int
    model: Network
    selector: Network
    contains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loss_name: str = "dice"  # "dice+ce"
    patch: tuple[int, ...] = ()  # sliding windows of this size; () takes the whole image
    overlap: float = 0.5
    seed: int = 0
    device: str = "cpu"

    headline = "dice"

    @property
    def overlapping(self) -> bool:
        return bool(self.contains)

    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        labels = self.labels if labels is None else labels
        if kind == "selector":
            return self.selector.build(self.dimensions, self.channels, len(labels))
        return self.model.build(self.dimensions, self.channels, len(labels) + (not self.overlapping))

    @cached_property
    def _criterion(self) -> nn.Module:
        from monai.losses import DiceCELoss, DiceLoss

        kind = DiceLoss if self.loss_name == "dice" else DiceCELoss
        if self.overlapping:
            return kind(sigmoid=True)  # type: ignore[no-any-return]
        return kind(softmax=True, to_onehot_y=True, include_background=False)  # type: ignore[no-any-return]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        target = self.channels_of(batch.truth).to(output.dtype) if self.overlapping else batch.truth.unsqueeze(1)
        return self._criterion(output.float(), target)  # type: ignore[no-any-return]

    @cached_property
    def _values(self) -> list[list[int]]:
        """For each label, the mask values that belong to it."""
        value = {label: i + 1 for i, label in enumerate(self.labels)}
        inside = {label: sorted(inside_of(label, self.contains)) for label in self.labels}
        return [[value[label], *(value[inner] for inner in inside[label])] for label in self.labels]

    def channels_of(self, mask: Tensor) -> Tensor:
        """Integer masks (batch, *spatial) as one Boolean channel per label (batch, labels, *spatial)."""
        inside = [reduce(torch.logical_or, [mask == value for value in values]) for values in self._values]
        return torch.stack(inside, dim=1)

    def blend(self, outputs: Sequence[Tensor], shares: Tensor) -> Tensor:
        if self.overlapping:
            return torch.logit(averaged([output.sigmoid() for output in outputs], shares), eps=1e-6)
        return averaged([output.softmax(1) for output in outputs], shares).clamp_min(1e-6).log()

    def decide(self, output: Tensor) -> Tensor:
        """Logits (channels, *spatial) of one case as an integer mask; inner structures overwrite outer ones."""
        if not self.overlapping:
            return output.argmax(0).to(torch.uint8)
        mask = torch.zeros(output.shape[1:], dtype=torch.uint8)
        for i in sorted(range(len(self.labels)), key=lambda i: -len(self._values[i])):
            mask[output[i] > 0] = i + 1
        return mask

    def decided_channels(self, output: Tensor) -> Tensor:
        """Logits of one case as one Boolean channel per label: of the mask that is delivered, so a cup is also disc."""
        return self.channels_of(self.decide(output)[None])[0]

    def score(self, output: Tensor, truth: Tensor, full: bool) -> list[Mark]:
        predicted, true = self.decided_channels(output), self.channels_of(truth.unsqueeze(0))[0]
        marks: list[Mark] = []
        for i, label in enumerate(self.labels):
            marks += [Mark(label, name, value) for name, value in _scores(predicted[i], true[i], full).items()]
        return marks

    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        network = on_bench(self, weights, kind, labels)
        images = images.to(self.device)
        if self.dimensions == 2:
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            if self.patch and kind != "selector":
                from monai.inferers import sliding_window_inference

                return sliding_window_inference(images, self.patch, 4, network, overlap=self.overlap).cpu()  # type: ignore[no-any-return]
            return network(images).cpu()  # type: ignore[no-any-return]


def _scores(predicted: Tensor, true: Tensor, full: bool) -> dict[str, float]:
    """Scores of one Boolean mask; an empty truth is counted, not scored."""
    both, either = (predicted & true).sum().item(), (predicted | true).sum().item()
    size, found = true.sum().item(), predicted.sum().item()
    if not size:
        return {"empty": 1.0, "false_positive_volume": float(found)} if full else {"empty": 1.0}
    scores = {"dice": 2 * both / (size + found)}
    if full:
        outside = true.numel() - size
        scores["jaccard"] = both / either
        scores["sensitivity"] = both / size
        if outside:
            scores["specificity"] = (outside - (found - both)) / outside
        scores["volume_error"] = (found - size) / size
        if found:
            scores["hd95"] = _hd95(predicted, true)
        else:
            scores["missed"] = 1.0  # no distance to an empty prediction: counted instead
    return scores


def _hd95(predicted: Tensor, true: Tensor) -> float:
    """The 95th percentile of surface distances, in pixels of the preprocessed image."""
    from monai.metrics import compute_hausdorff_distance

    with warnings.catch_warnings():  # MONAI calls its own deprecated argument
        warnings.simplefilter("ignore", FutureWarning)
        distance = compute_hausdorff_distance(
            predicted[None, None], true[None, None], include_background=True, percentile=95
        )
    return float(distance)
