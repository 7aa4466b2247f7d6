"""How the values of a stored mask become label numbers: 0 is background, 1 the first label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.errors import DataError

Labelled = NDArray[np.uint8]
Rule = Callable[[NDArray[Any]], Labelled]  # from what one file holds to label numbers, of the same shape


@dataclass(frozen=True)
class ByValue:
    """Each stored value becomes a label; values that are not named are background, or a fault."""

    labels: Mapping[int, int]
    others: bool = False  # other values may occur and are background

    def __call__(self, stored: NDArray[Any]) -> Labelled:
        painted = np.zeros(stored.shape, np.uint8)
        known = np.zeros(stored.shape, bool) if 0 in self.labels else stored == 0
        for value, label in self.labels.items():
            here = stored == value
            painted[here] = label
            known |= here
        if not self.others and not known.all():
            strange = np.unique(stored[~known]).tolist()
            few = ", ".join(f"{value:g}" for value in strange[:6]) + (", …" if len(strange) > 6 else "")
            raise DataError(
                f"has the values {few}, which no rule names; say what they are, for instance with --values."
            )
        return painted


@dataclass(frozen=True)
class AtLeast:
    """What is as high as a threshold, or higher, is the label: soft maps, and masks of any two values."""

    threshold: float
    label: int

    def __call__(self, stored: NDArray[Any]) -> Labelled:
        return np.where(stored >= self.threshold, np.uint8(self.label), np.uint8(0))


@dataclass(frozen=True)
class Foreground:
    """A mask of two values, whichever they are: the higher one is the label. An empty mask has none."""

    label: int

    def __call__(self, stored: NDArray[Any]) -> Labelled:
        low, high = stored.min(), stored.max()
        middle = (float(low) + float(high)) / 2
        between = (stored > low) & (stored < high) & (np.abs(stored - middle) < (float(high) - float(low)) / 4)
        if between.mean() > 0.02:  # JPEG's edges are far fewer
            raise DataError("has values between background and label; say with --threshold where the label begins.")
        inside = stored > middle if high > low else np.full(stored.shape, low > 0)
        return np.where(inside, np.uint8(self.label), np.uint8(0))


def painted(layers: list[Labelled]) -> Labelled:
    """Layers one over the other: the last that shows a label is seen."""
    whole = layers[0].copy()
    for layer in layers[1:]:
        whole[layer > 0] = layer[layer > 0]
    return whole


def majority(raters: list[Labelled], inside: Mapping[int, set[int]], labels: int) -> Labelled:
    """What more than half of the raters drew.

    `inside`: by label, the labels whose region lies in its region, so that a cup also counts as disc.
    """
    voted = np.zeros(raters[0].shape, np.uint8)
    outer_first = sorted(range(1, labels + 1), key=lambda label: -len(inside.get(label, ())))
    for label in outer_first:
        region = [label, *inside.get(label, ())]
        votes = np.sum([np.isin(mask, region) for mask in raters], axis=0)
        voted[votes * 2 > len(raters)] = label
    return voted
