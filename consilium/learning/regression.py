"""Predicts which of several models has the least loss on an image: a ridge regression in closed form, from sums.

Sites send sums of their training images' features and of the models' losses on them, side by side. The strength of
the ridge is chosen on validation cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from consilium.learning.discriminant import FeatureSums, added, symmetric
from consilium.tree import message

STRENGTHS = tuple(10.0**i for i in range(-4, 4))  # tried on validation cases; of standardised features, per image
FIRST_STRENGTH = 1.0  # without validation cases


@message
class Regression:
    """From an image's features to the loss of every model."""

    sums: FeatureSums  # over all sites' training images: features, then the losses of the models
    models: int  # how many of the last columns are losses
    strength: float  # of the ridge


def regression(sums: Iterable[FeatureSums], models: int) -> Regression:
    """From the sums of every site, in a fixed order."""
    return Regression(reduce(added, sums), models, FIRST_STRENGTH)


class LossForecast:
    """Predicts losses by a regression, at any strength of its ridge."""

    def __init__(self, found: Regression) -> None:
        self.strength = found.strength
        count = len(found.sums.mean) - found.models
        scatter = symmetric(found.sums.scatter, count + found.models) / found.sums.n
        self.mean, self.losses = found.sums.mean[:count], found.sums.mean[count:]
        self.scale = scatter.diagonal()[:count].clamp_min(1e-12).sqrt()
        correlation = scatter[:count, :count] / torch.outer(self.scale, self.scale)
        self._values, self._vectors = torch.linalg.eigh(correlation)
        self._turned = self._vectors.T @ (scatter[:count, count:] / self.scale[:, None])

    def expected(self, features: Tensor, strength: float | None = None) -> Tensor:
        """The expected losses (images, models) of images with these features (images, features)."""
        ridge = self.strength if strength is None else strength
        weights = self._turned / (self._values.clamp_min(0.0) + ridge)[:, None]
        expected: Tensor = (features.double() - self.mean) / self.scale @ self._vectors @ weights + self.losses
        return expected


def chosen_strength(tallies: Sequence[tuple[Sequence[float], int]]) -> float | None:
    """The strength with the best validation score, with equal shares of sites; ties go to the strongest.

    `tallies`: by site the sum of its cases' scores for every strength, and their number. None: no site had cases.
    """
    means = [[total / cases for total in totals] for totals, cases in tallies if cases]
    if not means:
        return None
    levels = [sum(column) for column in zip(*means)]
    return max(s for s, level in zip(STRENGTHS, levels) if level >= max(levels) - 1e-9)
