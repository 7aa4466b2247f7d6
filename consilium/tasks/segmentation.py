"""Segmentation in 2-D and 3-D: exclusive labels by softmax, overlapping ones by a sigmoid each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.data.site_folder import inside_of
from consilium.networks import Network
from consilium.networks.plain_unet import Supervised
from consilium.scores.rows import OWN
from consilium.task import CaseScore, Task
from consilium.tasks.dice import dice_loss
from consilium.tasks.features import pooled_activations, windows
from consilium.tasks.inference import averaged, loaded
from consilium.tasks.overlap import SCORES, cleaned, overlap
from consilium.tasks.own_code import OwnLoss, OwnScore, value_of
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
    dice_background: bool = False  # Dice also covers background, where labels exclude each other
    own_loss: OwnLoss | None = None  # replaces `loss_name`
    own_scores: Mapping[str, OwnScore] = field(default_factory=dict)  # of every label, beside Dice and the others
    patch: tuple[int, ...] = ()  # sliding windows of this size; () takes the whole image
    overlap: float = 0.5
    unannotated: str = "unknown"  # or "background", "ignored": how the loss treats labels that a truth does not show
    clean_up: bool = False  # clean predicted masks, and add the scores of cleaned masks at the end
    seed: int = 0
    device: str = "cpu"
    start: str = ""  # the file of the initial weights
    decides: str = "slice"  # or "volume": whose Dice chooses rounds and settings, of volumes trained as slices

    headline = "dice"

    @property
    def metrics(self) -> tuple[str, ...]:
        plain = (*SCORES, *(f"{OWN}{name}" for name in self.own_scores))
        return (*plain, *(f"clean_{name}" for name in plain)) if self.clean_up else plain

    @property
    def overlapping(self) -> bool:
        return bool(self.contains)

    def network(self, kind: str = "model", labels: Sequence[str] | None = None) -> nn.Module:
        labels = self.labels if labels is None else labels
        if kind == "selector":
            return self.selector.build(self.dimensions, self.channels, len(labels))
        return self.model.build(self.dimensions, self.channels, len(labels) + (not self.overlapping))

    @property
    def _exclusive(self) -> bool:
        """Whether a voxel has one label, by a softmax; otherwise each label is judged by itself, by a sigmoid."""
        return not self.overlapping and self.unannotated != "ignored"

    def _dice(self, output: Tensor, target: Tensor) -> Tensor:
        """By case and channel."""
        return dice_loss(output, target, self._exclusive, self.dice_background)

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
        """The loss of cases that all show the same labels, for these outputs of a network."""
        counted = [label for label in outputs if label in shown]
        if not counted:
            raise ValueError(f"the truth shows {shown}, the network answers {outputs}: there is nothing to learn from")
        output = output.float()
        if self.overlapping:
            if len(counted) < len(outputs):
                output = output[:, [outputs.index(label) for label in counted]]
            return self._weighted_mean(output, self._channels(truth, counted).to(output.dtype), weights)
        if self.unannotated == "ignored":  # only the annotated labels have a loss, each separately
            output = output[:, [1 + outputs.index(label) for label in counted]]
            return self._weighted_mean(output, self._channels(truth, counted).to(output.dtype), weights)
        if len(counted) < len(outputs) and self.unannotated == "background":
            counted = list(outputs)
        if len(counted) < len(outputs):
            # an unlabelled voxel is background or a label not shown: their probabilities are added up
            either = [0, *(1 + i for i, label in enumerate(outputs) if label not in shown)]
            background = output[:, either].logsumexp(1, keepdim=True)
            output = torch.cat([background, output[:, [1 + outputs.index(label) for label in counted]]], dim=1)
        if tuple(counted) != self.labels:
            values = [0, *(counted.index(label) + 1 if label in counted else 0 for label in self.labels)]
            truth = torch.tensor(values, device=truth.device)[truth.long()]
        return self._weighted_mean(output, truth.unsqueeze(1), weights)

    def _weighted_mean(self, output: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """The weighted mean of the criterion over cases."""
        if self.own_loss is not None:
            truth = target if target.is_floating_point() else target[:, 0].long()
            return value_of(self.own_loss, output, truth, weights)
        dice = self._dice(output, target)
        crossed = self.loss_name == "dice+ce"
        if weights is None:
            loss = torch.mean(dice)
            return loss + _cross_entropy(output, target, "mean") if crossed else loss
        each = dice.mean(1)
        if crossed:
            each = each + _cross_entropy(output, target, "none").flatten(1).mean(1)
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
        """Logits of one case as one Boolean channel per label, from the predicted mask: a cup voxel is also disc."""
        return self.channels_of(self.decide(output)[None])[0]

    def score(
        self,
        output: Tensor,
        truth: Tensor,
        full: bool,
        labels: Sequence[str] | None = None,
        spacing: Sequence[float] | None = None,
    ) -> list[CaseScore]:
        decided = self.decide(output)
        masks = {"": decided}
        if full and self.clean_up:
            masks["clean_"] = torch.from_numpy(cleaned(decided.numpy()))
        true = self.channels_of(truth.unsqueeze(0))[0].numpy()
        marks: list[CaseScore] = []
        for prefix, mask in masks.items():
            predicted = self.channels_of(mask[None])[0].numpy()
            for i, label in enumerate(self.labels):
                if labels is not None and label not in labels:
                    continue
                found = overlap(predicted[i], true[i], full, spacing)
                if full and true[i].any():
                    own = {name: score(predicted[i], true[i], spacing) for name, score in self.own_scores.items()}
                    found |= {f"{OWN}{name}": float(value) for name, value in own.items()}
                marks += [
                    CaseScore(label, prefix + name, value)
                    for name, value in found.items()
                    if not prefix or name != "empty"
                ]
        return marks

    def infer(
        self, weights: Weights, images: Tensor, kind: str = "model", labels: Sequence[str] | None = None
    ) -> Tensor:
        network = loaded(self, weights, kind, labels)
        images = self._placed(images)
        with torch.no_grad():
            if self.patch and kind != "selector":
                from monai.inferers import sliding_window_inference

                output = sliding_window_inference(images, self.patch, 4, network, overlap=self.overlap).cpu()
            else:
                output = network(images).cpu()
        if self.unannotated == "ignored" and kind == "model" and not self.overlapping:
            output[:, 0] = 0.0  # background is not trained: it is where all labels' logits are negative
        return output  # type: ignore[no-any-return]

    def _placed(self, images: Tensor) -> Tensor:
        images = images.to(self.device)
        return images.contiguous(memory_format=torch.channels_last) if self.dimensions == 2 else images

    def features(self, weights: Weights, images: Tensor) -> Tensor:
        network = loaded(self, weights, "model", None)
        images = self._placed(images)
        # the mean over windows if the study uses patches: a whole volume may not fit into memory
        parts = [pooled_activations(network, images[:, :, *window]) for window in windows(images.shape[2:], self.patch)]
        return torch.stack(parts).mean(0)


def _cross_entropy(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Of labels that exclude each other as MONAI's DiceCELoss takes it, of others each by itself."""
    if target.is_floating_point():
        each = nn.functional.binary_cross_entropy_with_logits(output, target, reduction="none")
        return each.mean() if reduction == "mean" else each
    return nn.functional.cross_entropy(
        output, target[:, 0].long() if target.shape[1] == 1 else target, reduction=reduction
    )
