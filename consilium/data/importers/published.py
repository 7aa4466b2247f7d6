"""What every importer returns, and how its sources are found and its pictures judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.errors import DataError


@dataclass(frozen=True)
class Part:
    """Pictures (n, row, column) or (n, row, column, 3), and the number of the class of each."""

    images: NDArray[Any]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Published:
    """A dataset as it was published; without `test`, the test cases are drawn from `train`."""

    classes: tuple[str, ...]
    train: Part
    test: Part | None
    source: str
    licence: str = ""


def files_in(sources: Sequence[Path]) -> list[Path]:
    """The sources, with folders replaced by the files in them, at any depth."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(path for path in source.rglob("*") if path.is_file())
        elif source.is_file():
            found.append(source)
        else:
            raise DataError(f"there is no {source}; give the files of the dataset, or the folder they are in.")
    return found


def one_file(sources: Sequence[Path], suffix: str, what: str) -> Path:
    """The only source, which must be a file of a kind."""
    files = [path for path in files_in(sources) if path.name.lower().endswith(suffix)]
    if len(files) != 1:
        said = ", ".join(str(source) for source in sources)
        raise DataError(f"{said}: there must be one {suffix} file of {what}, but there are {len(files)}; name it.")
    return files[0]


def part(path: Path, images: NDArray[Any], labels: NDArray[Any], classes: int | None = None) -> Part:
    """Pictures and their classes, if they belong together."""
    if len(images) != len(labels) or not len(images):
        raise DataError(f"{path} has {len(images)} pictures and {len(labels)} labels; copy it again from its source.")
    whole = labels.astype(np.int64)
    if not np.array_equal(whole, labels) or whole.min() < 0 or (classes is not None and whole.max() >= classes):
        most = "" if classes is None else f" to {classes - 1}"
        raise DataError(f"{path} has labels that are not class numbers from 0{most}; copy it again from its source.")
    return Part(images, whole)


def joined(parts: Iterable[Part]) -> Part:
    """One part after the other."""
    every = list(parts)
    if len({p.images.shape[1:] for p in every}) > 1:
        raise DataError(f"the pictures differ in size: {', '.join(str(p.images.shape[1:]) for p in every)}.")
    return Part(np.concatenate([p.images for p in every]), np.concatenate([p.labels for p in every]))
