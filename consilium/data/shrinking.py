"""Images made small for looking and comparing: cells of the original are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def shrunk(array: NDArray[np.generic], sides: Sequence[int]) -> NDArray[np.float32]:
    """An image (channels, *spatial) as (*sides): means over cells and channels; short axes are repeated."""
    small = array.astype(np.float32).mean(axis=0) if len(array) > 1 else array[0]
    for axis, side in enumerate(sides):
        small = _along(small, axis, side)
    return np.asarray(small, dtype=np.float32)


def _along(array: NDArray[np.generic], axis: int, side: int) -> NDArray[np.float32]:
    """Means over cells of equal width, also where their edges cut through voxels."""
    length = array.shape[axis]
    if length > 16 * side:  # first to whole cells, so that a large volume needs little memory
        edges = np.arange(8 * side) * length // (8 * side)
        array = np.add.reduceat(array, edges, axis=axis, dtype=np.float32) / np.float32(length / (8 * side))
        length = 8 * side
    lines = np.moveaxis(array, axis, 0).astype(np.float64)
    sums = np.concatenate([np.zeros_like(lines[:1]), np.cumsum(lines, axis=0)])
    places = np.linspace(0, length, side + 1)
    below = np.minimum(places.astype(int), length - 1)
    share = (places - below).reshape(-1, *(1,) * (lines.ndim - 1))
    at = sums[below] * (1 - share) + sums[below + 1] * share
    means: NDArray[np.float32] = np.moveaxis(np.diff(at, axis=0) * (side / length), 0, axis).astype(np.float32)
    return means
