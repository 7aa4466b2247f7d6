"""Outlines that graders drew on a copy of a photograph, as RIGA is published: found by comparing the two pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ImageError
from consilium.data.images import ImageArray, read_stored
from consilium.data.importers.rules import Labelled

FAINT = 25  # of 255: smaller differences are JPEG's
_SHARE = 0.3  # of the largest difference: what is fainter is not a line
_GAPS = 4  # a line with gaps of up to about so many pixels is closed


@dataclass(frozen=True)
class Outlines:
    """One rater's file: a copy of the photograph with two closed lines on it, or a mask of disc and cup."""

    def between(self, photograph: ImageArray, path: Path) -> Labelled:
        """1 inside the outer line, 2 inside the inner one."""
        drawn = read_stored(path, 2, 3).array
        if len(drawn) == 1 or (drawn == drawn[:1]).all():
            return _nested(path, drawn[0])
        if drawn.shape != photograph.array.shape:
            raise ImageError(path, "is not of the size of its photograph, so its lines cannot be found.")
        difference = np.abs(drawn.astype(np.int32) - photograph.array.astype(np.int32)).max(axis=0)
        lines = difference > max(FAINT, _SHARE * float(difference.max()))
        for gap in range(_GAPS + 1):
            regions = _enclosed(lines, gap)
            if len(regions) >= 2 and not (regions[1] & ~regions[0]).any():
                return (regions[0] + regions[1].astype(np.uint8)).astype(np.uint8)
        raise ImageError(path, "does not show two closed lines, one inside the other.")


def _enclosed(lines: NDArray[np.bool_], gap: int) -> list[NDArray[np.bool_]]:
    """What each line encloses with the line itself, the largest first; gaps are closed first."""
    from scipy.ndimage import binary_closing, binary_fill_holes, find_objects, label

    square = np.ones((3, 3), bool)
    padded = np.pad(lines, gap + 1)
    closed = binary_closing(padded, square, gap) if gap else padded
    parts, _ = label(closed, square)
    least = max(3, min(lines.shape) // 100)  # specks of noise are smaller, and a photograph may have thousands
    regions = []
    for number, box in enumerate(find_objects(parts), start=1):
        if min(side.stop - side.start for side in box) >= least:
            line = parts[box] == number
            inside = binary_fill_holes(line)
            if inside.sum() > line.sum():
                region = np.zeros(padded.shape, bool)
                region[box] = inside
                regions.append(region[gap + 1 : -gap - 1, gap + 1 : -gap - 1])
    return sorted(regions, key=lambda region: -int(region.sum()))


def _nested(path: Path, stored: NDArray[Any]) -> Labelled:
    """A mask of three values whichever they are: background is at the picture's edge, the cup is inside the disc."""
    values = np.unique(stored).tolist()
    background = stored[0, 0]
    others = [value for value in values if value != background]
    if not 1 <= len(others) <= 2:
        raise ImageError(path, f"has {len(values)} values; a mask of disc and cup has three.")
    spans = {value: int(np.ptp(np.flatnonzero((stored == value).any(axis=0)))) for value in others}
    outer_first = sorted(others, key=lambda value: -spans[value])
    mask = np.zeros(stored.shape, np.uint8)
    for label, value in enumerate(outer_first, start=1):
        mask[stored == value] = label
    return mask
