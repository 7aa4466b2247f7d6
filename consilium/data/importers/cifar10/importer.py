"""CIFAR-10: the python version (pickles, read without unpickling) or the binary version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from consilium.data.importers.pickled import NotPlain, bytes_array, read_plain
from consilium.data.importers.published import Published, PublishedSplit, files_in, joined, part
from consilium.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = "test_batch"
SIDE = 32
PIXELS = 3 * SIDE * SIDE


def read(sources: Sequence[Path]) -> Published:
    """Whole folders must be complete; of files named one by one, what is named is taken."""
    files = {path.name.removesuffix(".bin"): path for path in files_in(sources)}
    wanted = TRAIN if any(path.is_dir() for path in sources) else [name for name in TRAIN if name in files] or TRAIN[:1]
    if missing := [name for name in (*wanted, TEST) if name not in files]:
        raise DataError(f"{', '.join(missing)} of CIFAR-10 not among the sources; give the unpacked folder.")
    train = joined(_batch(files[name]) for name in wanted)
    return Published(CLASSES, train, _batch(files[TEST]), "CIFAR-10 (Krizhevsky, 2009)")


def _batch(path: Path) -> PublishedSplit:
    pixels, labels = _binary(path) if path.suffix == ".bin" else _pickled(path)
    pictures = np.moveaxis(pixels.reshape(-1, 3, SIDE, SIDE), 1, -1)
    return part(path, pictures, labels, len(CLASSES))


def _binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    raw = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(raw) or len(raw) % (1 + PIXELS):
        raise DataError(f"{path} has {len(raw)} bytes, not a number of records of {1 + PIXELS}; copy it again.")
    records = raw.reshape(-1, 1 + PIXELS)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _pickled(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        found = read_plain(path.read_bytes())
        if not isinstance(found, dict):
            raise NotPlain("it is not a dictionary")
        batch = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
        pixels, labels = bytes_array(batch["data"]), batch["labels"]
        if pixels.ndim != 2 or pixels.shape[1] != PIXELS:
            raise NotPlain(f"its array is {pixels.shape}")
        if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
            raise NotPlain("its labels are not a list of whole numbers")
        return pixels, np.array(labels, dtype=np.int64)
    except (NotPlain, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a batch of CIFAR-10 ({error}); nothing in it was run.") from None
