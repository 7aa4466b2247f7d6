"""Combines models that know different organs into one prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.pseudo_labels import TeacherOutput, merged_chances
from consilium.predictor import Answer, ModelChoice, Predictor
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName, Weights

BACKGROUNDS = ("product", "mean")
SMALLEST = 1e-30  # of a probability whose logarithm is taken


def merged_logits(
    outputs: Sequence[tuple[Sequence[str], Tensor]], labels: Sequence[str], background: str = "product"
) -> Tensor:
    """Logits (batch, 1 + labels, *spatial) from models with (1 + their labels) channels.

    They are the logarithms of `merged_chances`. Background is the product of all models' backgrounds; otherwise models
    that do not know an organ would outvote the one that does. `background` = "mean" is the rule of the UFPS paper: it
    averages an organ's logits over the models that know it, and background's over all.
    """
    if background == "mean":
        return _mean_logits(outputs, labels)
    given = [TeacherOutput(tuple(known), output.float().softmax(1)) for known, output in outputs]
    return merged_chances(given, labels).clamp_min(SMALLEST).log()


def _mean_logits(outputs: Sequence[tuple[Sequence[str], Tensor]], labels: Sequence[str]) -> Tensor:
    parts = [torch.stack([output[:, 0].float() for _, output in outputs]).mean(0)]
    for label in labels:
        voices = [output[:, 1 + list(known).index(label)].float() for known, output in outputs if label in known]
        parts.append(torch.stack(voices).mean(0) if voices else torch.full_like(parts[0], math.log(SMALLEST)))
    return torch.stack(parts, dim=1)


class MergedModel(Predictor):
    """Models of sites that annotate different organs; together they predict all organs."""

    when = "trained"

    def __init__(
        self,
        task: Task,
        models: Mapping[SiteName, Weights],
        labels: Mapping[SiteName, tuple[str, ...]],
        model: str,
        of: SiteName = "",
    ) -> None:
        self.task, self.models, self.labels = task, models, labels
        self.model, self.of = model, of

    @property
    def passes(self) -> int:
        return len(self.models)

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        outputs = [
            (self.labels[name], self.task.infer(weights, images, "teacher", self.labels[name]))
            for name, weights in sorted(self.models.items())
        ]
        choice = ModelChoice(self.model, self.of)
        return Answer(merged_logits(outputs, self.task.labels), (choice,) * len(images))


def check_exclusive(task: Task, local_batchnorm: str, what: str) -> None:
    """Reject overlapping labels and local normalisation: teachers have a background channel and run at other sites."""
    if not isinstance(task, Segmentation) or task.overlapping:
        raise StudyError(f"{what} needs masks whose labels exclude each other; this task is of another kind.")
    if task.unannotated != "unknown":
        raise StudyError(f"[task] unannotated = '{task.unannotated}' is for methods without teachers; remove the key.")
    if local_batchnorm != "average":
        raise StudyError(
            f"[local] batchnorm = '{local_batchnorm}' keeps normalisation at its site, so what other sites send cannot "
            f"be used; {what} needs batchnorm = 'average'."
        )
