"""Cuts whole fundus photographs around the disc, as the papers do before they train.

With a mask: a square around the label's box, three times as long as the box's longer side. Without one: the disc is
taken to be the brightest place of the smoothed red and green light inside the field of view, and the square is 0.42
times as long as the field is wide (a disc is about 0.14 of a field of 45 degrees, three times that). A square is moved
to lie in the picture, and is no longer than the picture's shorter side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ImageError
from consilium.data.importers.reading import ReadCase

MARGIN = 3.0  # times the box's longer side
UNSEEN = 0.42  # times the field's width
_DARK = 0.1  # of the brightest value: below, a pixel is outside the field of view
_SMOOTH = 1 / 40  # of the field's width


@dataclass(frozen=True)
class CropAround:
    """Cuts a picture and its mask around one label (and what lies inside it)."""

    values: Sequence[int]  # the mask values of the label and of the labels inside it

    def __call__(self, case: ReadCase) -> ReadCase:
        if len(case.image.spacing) != 2:
            raise ImageError(case.image.origin_file, "is a volume; --crop is for pictures.")
        if case.mask is None:
            centre, side = bright_place(case.image.array)
        else:
            rows, columns = np.nonzero(np.isin(case.mask, self.values))
            if not len(rows):
                raise ImageError(case.image.origin_file, "has a mask without the label to crop around; leave it out.")
            box = (rows.min(), rows.max() + 1), (columns.min(), columns.max() + 1)
            centre = tuple((low + high) / 2 for low, high in box)
            side = MARGIN * max(high - low for low, high in box)
        window = _square(centre, side, case.image.array.shape[1:])
        image = replace(case.image, array=np.ascontiguousarray(case.image.array[(slice(None), *window)]))
        mask = None if case.mask is None else np.ascontiguousarray(case.mask[window])
        return ReadCase(image, mask, as_stored=False)


def bright_place(image: NDArray[Any]) -> tuple[tuple[float, ...], float]:
    """Centre (row, column) and length of the square around the disc of a photograph (channels, row, column)."""
    from scipy.ndimage import gaussian_filter

    light = image[:2].astype(np.float64).mean(axis=0)
    field = light > _DARK * light.max()
    width = int(np.ptp(np.flatnonzero(field.any(axis=0)))) + 1 if field.any() else image.shape[2]
    smooth = np.where(field, gaussian_filter(light, width * _SMOOTH), 0)
    return tuple(float(place) for place in np.unravel_index(smooth.argmax(), smooth.shape)), UNSEEN * width


def _square(centre: Sequence[float], side: float, shape: Sequence[int]) -> tuple[slice, ...]:
    length = max(1, min(round(side), *shape))
    starts = [min(max(0, round(place - length / 2)), room - length) for place, room in zip(centre, shape)]
    return tuple(slice(start, start + length) for start in starts)
