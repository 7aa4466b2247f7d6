"""How much a file may unpack to: asked of its header, before anything is unpacked."""

from __future__ import annotations

import math
from collections.abc import Iterable

from consilium.errors import DataError

MOST_VALUES = 2**30  # of one image, all channels: a volume of 512×512×4096
MOST_HEADER = 2**24  # bytes before the values of a NIfTI file
_SAFE_BYTES, _MOST_RATIO = 2**30, 100  # an archive may unpack to more than the first if it is no denser than the second


def refuse_large(shape: Iterable[int]) -> None:
    """A sentence for an image that says it is larger than any scanner makes."""
    sides = [int(side) for side in shape]
    if math.prod(sides) > MOST_VALUES:
        said = "×".join(map(str, sides))
        raise DataError(f"says it holds {said} values, more than {MOST_VALUES:,} of one image; it was not unpacked.")


def refuse_dense(unpacked: int, packed: int, what: str) -> None:
    """A sentence for an archive that would unpack to a hundred times its size, and to more than a gigabyte."""
    if unpacked > _SAFE_BYTES and unpacked > _MOST_RATIO * packed:
        raise DataError(
            f"{what} would unpack from {packed:,} to {unpacked:,} bytes, which no pictures do; it was not unpacked."
        )
