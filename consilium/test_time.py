"""Test-time augmentation: the mean of the probabilities over all mirror images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from consilium.predictor import Answer, Predictor
from consilium.task import Task


class Mirrored(Predictor):
    """A predictor that runs 2^d times: on the image and its mirror images along every set of axes.

    The chosen model and the reason are those of the image itself.
    """

    def __init__(self, task: Task, first: Predictor) -> None:
        self.task, self.first = task, first
        self.model, self.of, self.when = first.model, first.of, first.when

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        axes = range(2, images.dim())
        sets = [chosen for n in range(len(axes) + 1) for chosen in itertools.combinations(axes, n)]
        plain = self.first.answer(images, volume)
        outputs = [plain.output]
        for chosen in sets[1:]:
            output = self.first.answer(images.flip(chosen), volume).output
            outputs.append(output.flip(chosen) if output.dim() == images.dim() else output)
        shares = torch.full((len(images), len(outputs)), 1 / len(outputs))
        return Answer(self.task.blend(outputs, shares), plain.choices)

    def others(self) -> Sequence[Predictor]:
        return [Mirrored(self.task, other) for other in self.first.others()]

    def elsewhere(self) -> Sequence[Predictor]:
        return [Mirrored(self.task, other) for other in self.first.elsewhere()]
