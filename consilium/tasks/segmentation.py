"""Segmentation in 2-D and 3-D: exclusive labels by softmax, overlapping ones by a sigmoid each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from consilium.data.site_folder import inside_of
from consilium.networks import Network
from consilium.networks.plain_unet import Supervised
from consilium.site import Batch, Mark, Task
from consilium.tasks.features import pooled_activations, windows
from consilium.tasks.inference import averaged, on_bench
from consilium.tasks.overlap import cleaned, overlap
from consilium.weights import Weights

UNANNOTATED = ("unknown", "background", "ignored")


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
    unannotated: str = "unknown"  # or "background", "ignored": what a truth says of labels it does not show
    clean_up: bool = False  # final scores of cleaned masks stand beside the others; delivered masks are cleaned
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

        return DiceLoss(**self._how) if self.loss_name == "dice" else DiceCELoss(**self._how)  # type: ignore[no-any-return]

    @cached_property
    def _dice_by_case(self) -> nn.Module:
        from monai.losses import DiceLoss

        return DiceLoss(**self._how, reduction="none")  # type: ignore[no-any-return]

    @property
    def _how(self) -> dict[str, Any]:
        if self.overlapping or self.unannotated == "ignored":
            return {"sigmoid": True}
        return {"softmax": True, "to_onehot_y": True, "include_background": False}

    def loss(
        self, output: Any, batch: Batch, labels: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if isinstance(output, Supervised):
            losses = [weight * self.loss(logits, batch, labels, weights) for weight, logits in output.asides]
            return sum(losses, self.loss(output.main, batch, labels, weights))
        outputs = self.labels if labels is None else tuple(labels)
        known = batch.labels or (self.labels,) * len(batch.truth)
        kinds = sorted(set(known))
        if len(kinds) == 1:
            return self._loss(output, batch.truth, outputs, kinds[0], weights)
        parts = []
        for shown in kinds:  # pooled sites may annotate different labels
            rows = [i for i, one in enumerate(known) if one == shown]
            counts = None if weights is None else weights[rows]
            parts.append(self._loss(output[rows], batch.truth[rows], outputs, shown, counts) * (len(rows) / len(known)))
        return torch.stack(parts).sum()

    def _loss(
        self, output: Tensor, truth: Tensor, outputs: tuple[str, ...], shown: tuple[str, ...], weights: Tensor | None
    ) -> Tensor:
        """The loss of cases that all show the same labels, of a network with these outputs."""
        judged = [label for label in outputs if label in shown]
        if not judged:
            raise ValueError(f"the truth shows {shown}, the network answers {outputs}: there is nothing to learn from")
        output = output.float()
        if self.overlapping:
            if len(judged) < len(outputs):
                output = output[:, [outputs.index(label) for label in judged]]
            return self._judged(output, self._channels(truth, judged).to(output.dtype), weights)
        if self.unannotated == "ignored":  # only the annotated labels are judged, each by itself
            output = output[:, [1 + outputs.index(label) for label in judged]]
            return self._judged(output, self._channels(truth, judged).to(output.dtype), weights)
        if len(judged) < len(outputs) and self.unannotated == "background":
            judged = list(outputs)
        if len(judged) < len(outputs):
            # an unknown voxel is background or a label not shown: their probabilities add up to what the truth calls 0
            either = [0, *(1 + i for i, label in enumerate(outputs) if label not in shown)]
            background = output[:, either].logsumexp(1, keepdim=True)
            output = torch.cat([background, output[:, [1 + outputs.index(label) for label in judged]]], dim=1)
        if tuple(judged) != self.labels:
            values = [0, *(judged.index(label) + 1 if label in judged else 0 for label in self.labels)]
            truth = torch.tensor(values, device=truth.device)[truth.long()]
        return self._judged(output, truth.unsqueeze(1), weights)

    def _judged(self, output: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """The criterion's mean over cases, each as much as it counts."""
        if weights is None:
            return self._criterion(output, target)  # type: ignore[no-any-return]
        each = self._dice_by_case(output, target).flatten(1).mean(1)
        if self.loss_name == "dice+ce":
            each = each + _cross_entropy(output, target).flatten(1).mean(1)
        return torch.mean(weights * each)

    @cached_property
    def _values(self) -> list[list[int]]:
        """For each label, the mask values that belong to it."""
        value = {label: i + 1 for i, label in enumerate(self.labels)}
        inside = {label: sorted(inside_of(label, self.contains)) for label in self.labels}
        return [[value[label], *(value[inner] for inner in inside[label])] for label in self.labels]

    def channels_of(self, mask: Tensor) -> Tensor:
        """Integer masks (batch, *spatial) as one Boolean channel per label (batch, labels, *spatial)."""
        return self._channels(mask, self.labels)

    def _channels(self, mask: Tensor, labels: Sequence[str]) -> Tensor:
        return torch.stack([self._where(mask, self._values[self.labels.index(label)]) for label in labels], dim=1)

    def _where(self, mask: Tensor, values: Sequence[int]) -> Tensor:
        if len(values) == len(self.labels):
            return mask > 0
        return reduce(torch.logical_or, [mask == value for value in values])

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

    def score(
        self,
        output: Tensor,
        truth: Tensor,
        full: bool,
        labels: Sequence[str] | None = None,
        spacing: Sequence[float] | None = None,
    ) -> list[Mark]:
        decided = self.decide(output)
        masks = {"": decided}
        if full and self.clean_up:
            masks["clean_"] = torch.from_numpy(cleaned(decided.numpy()))
        true = self.channels_of(truth.unsqueeze(0))[0].numpy()
        marks: list[Mark] = []
        for prefix, mask in masks.items():
            predicted = self.channels_of(mask[None])[0].numpy()
            for i, label in enumerate(self.labels):
                if labels is not None and label not in labels:
                    continue
                found = overlap(predicted[i], true[i], full, spacing)
                marks += [
                    Mark(label, prefix + name, value) for name, value in found.items() if not prefix or name != "empty"
                ]
        return marks

    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        network = on_bench(self, weights, kind, labels)
        images = self._placed(images)
        with torch.no_grad():
            if self.patch and kind != "selector":
                from monai.inferers import sliding_window_inference

                output = sliding_window_inference(images, self.patch, 4, network, overlap=self.overlap).cpu()
            else:
                output = network(images).cpu()
        if self.unannotated == "ignored" and kind == "model" and not self.overlapping:
            output[:, 0] = 0.0  # nothing was learned about background: it is where every label's own logit is negative
        return output  # type: ignore[no-any-return]

    def _placed(self, images: Tensor) -> Tensor:
        images = images.to(self.device)
        return images.contiguous(memory_format=torch.channels_last) if self.dimensions == 2 else images

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        network = on_bench(self, weights, "model", None)
        images = self._placed(images)
        # the mean over windows where the study asks for patches: a whole volume may not fit
        parts = [pooled_activations(network, images[:, :, *window]) for window in windows(images.shape[2:], self.patch)]
        return torch.stack(parts).mean(0)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Per voxel, as MONAI's DiceCELoss takes it, which itself gives nothing but the mean."""
    if output.shape[1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(output, target, reduction="none")
    return nn.functional.cross_entropy(
        output, target[:, 0].long() if target.shape[1] == 1 else target, reduction="none"
    )
