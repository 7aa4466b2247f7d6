"""MNIST and its likes: four idx files, packed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.importers.published import Published, PublishedSplit, files_in, part
from consilium.data.limits import refuse_dense
from consilium.errors import DataError

PARTS = {"train": ("train",), "test": ("t10k", "test")}  # how the names of their files begin
KINDS = {"images": 3, "labels": 1}  # axes
BYTES = 8  # idx's number for the type of one byte without sign


def read(sources: Sequence[Path]) -> Published:
    files = files_in(sources)
    train, test = (_part(files, name) for name in PARTS)
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    return Published(
        tuple(map(str, range(classes))), train, test, "MNIST's layout (LeCun, Cortes and Burges), idx files"
    )


def _part(files: Sequence[Path], name: str) -> PublishedSplit:
    images, labels = (_find(files, name, kind) for kind in KINDS)
    return part(images, _read_idx(images, KINDS["images"]), _read_idx(labels, KINDS["labels"]))


def _find(files: Sequence[Path], name: str, kind: str) -> Path:
    here = [p for p in files if p.name.lower().startswith(PARTS[name]) and f"{kind}" in p.name and "idx" in p.name]
    if len(here) != 1:
        wanted = f"{PARTS[name][0]}-{kind}-idx{KINDS[kind]}-ubyte[.gz]"
        raise DataError(
            f"there must be one {wanted} among the sources, but there are {len(here)}; give all four files."
        )
    return here[0]


def _read_idx(path: Path, axes: int) -> NDArray[Any]:
    """An idx file: two zero bytes, the type, the number of axes, their lengths, then the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * axes)
            if len(head) < 4 + 4 * axes or head[:4] != bytes([0, 0, BYTES, axes]):
                raise DataError(f"{path} is not an idx file of {axes} axes; copy it again from its source.")
            shape = np.frombuffer(head, ">u4", axes, offset=4).tolist()
            refuse_dense(math.prod(shape), path.stat().st_size, str(path))
            values = np.frombuffer(file.read(math.prod(shape) + 1), np.uint8)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); copy it again from its source.") from None
    if len(values) != math.prod(shape):
        raise DataError(
            f"{path} holds {len(values)} bytes after its head, which promises {math.prod(shape)}; "
            "copy it again from its source."
        )
    return values.reshape(shape)
