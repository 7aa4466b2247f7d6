"""Finds pictures that are nearly the same: a perceptual hash proposes pairs, the correlation of thumbnails decides.

A thumbnail is the picture shrunk to 16×16, or a volume to 8×8×8, all channels averaged. The hash has one bit for each
of its 64 lowest cosine frequencies. Copies that were saved again, rescaled, or brightened keep both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from consilium.data.shrinking import shrunk

SMALLEST = 48  # pixels: smaller pictures of different patients are too alike for a thumbnail to tell them apart
FLIPPED_BITS = 6  # of 64 that may differ between two copies
CORRELATION = 0.998  # of two thumbnails of one picture
MOST = 20_000  # pictures whose pairs are all looked at; beyond it, only those with the same hash
_BITS = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)  # set in 16 bits
_ROWS = 128  # of pictures compared with all others at a time


def thumbnail(array: NDArray[np.generic]) -> NDArray[np.float32]:
    """An image (channels, *spatial) as 256 or 512 numbers of mean 0 and length 1; zeros of a constant image."""
    sides = (16, 16) if array.ndim == 3 else (8, 8, 8)
    small = shrunk(array, sides).ravel()
    small = small - small.mean()
    length = float(np.linalg.norm(small))
    unit: NDArray[np.float32] = small / np.float32(length) if length > 1e-6 else np.zeros_like(small)
    return unit


def perceptual_hash(small: NDArray[np.float32]) -> int:
    """64 bits of a thumbnail: which of its low cosine frequencies lie above their median."""
    from scipy.fft import dctn

    side, kept = (16, 8) if small.size == 256 else (8, 4)
    grid = small.reshape((side,) * (2 if small.size == 256 else 3))
    low = np.asarray(dctn(grid, norm="ortho"))[(slice(kept),) * grid.ndim].ravel()
    bits = low > np.median(low[1:])  # the first is the mean
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def near_pairs(hashes: Sequence[int], thumbnails: NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Pairs of indices, the lower first, of pictures that are nearly the same.

    Args:
        hashes: one per picture.
        thumbnails: (pictures, numbers), rows of length 1; rows of zeros are like nothing.
    """
    codes = np.asarray(hashes, dtype=np.uint64)
    for i, j in _proposed(codes):
        same = float(thumbnails[i] @ thumbnails[j])
        if same >= CORRELATION:
            yield i, j


def _proposed(codes: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    if len(codes) > MOST:
        order = np.argsort(codes, kind="stable")
        for one, two in itertools.pairwise(order.tolist()):
            if codes[one] == codes[two]:
                yield min(one, two), max(one, two)
        return
    for start in range(0, len(codes), _ROWS):
        rows = codes[start : start + _ROWS]
        apart = (rows[:, None] ^ codes[None, :]).view(np.uint16).reshape(len(rows), len(codes), 4)
        close = _BITS[apart].sum(axis=2, dtype=np.uint8) <= FLIPPED_BITS
        for row, column in np.argwhere(close):
            if start + row < column:
                yield start + int(row), int(column)
