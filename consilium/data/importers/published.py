"""What every importer returns, and how its sources are found and its pictures judged."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.importers.sources import files_under
from consilium.data.limits import refuse_dense
from consilium.errors import DataError


@dataclass(frozen=True)
class PublishedSplit:
    """Pictures (n, row, column) or (n, row, column, 3), and the number of the class of each."""

    images: NDArray[Any]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Published:
    """A dataset as it was published; without `test`, the test cases are drawn from `train`."""

    classes: tuple[str, ...]
    train: PublishedSplit
    test: PublishedSplit | None
    source: str
    licence: str = ""


def files_in(sources: Sequence[Path]) -> list[Path]:
    """The sources, with folders replaced by the files in them, at any depth."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += [source / path for path in files_under(source).files]
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


def part(path: Path, images: NDArray[Any], labels: NDArray[Any], classes: int | None = None) -> PublishedSplit:
    """Pictures and their classes, if they belong together."""
    if len(images) != len(labels) or not len(images):
        raise DataError(f"{path} has {len(images)} pictures and {len(labels)} labels; copy it again from its source.")
    whole = labels.astype(np.int64)
    if not np.array_equal(whole, labels) or whole.min() < 0 or (classes is not None and whole.max() >= classes):
        most = "" if classes is None else f" to {classes - 1}"
        raise DataError(f"{path} has labels that are not class numbers from 0{most}; copy it again from its source.")
    return PublishedSplit(images, whole)


def joined(parts: Iterable[PublishedSplit]) -> PublishedSplit:
    """One part after the other."""
    every = list(parts)
    if len({p.images.shape[1:] for p in every}) > 1:
        raise DataError(f"the pictures differ in size: {', '.join(str(p.images.shape[1:]) for p in every)}.")
    return PublishedSplit(np.concatenate([p.images for p in every]), np.concatenate([p.labels for p in every]))


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz, never unpickled."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DataError(f"{path} is not an .npz archive; copy it again from its source.")
        with archive:
            _refuse_bombs(path, keys)
            if missing := [key for key in keys if key not in archive]:
                raise DataError(f"{path} has no {', '.join(missing)}; it has {', '.join(archive)}.")
            return {key: archive[key] for key in keys}
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a readable .npz archive ({error}); copy it again from its source.") from None


def _refuse_bombs(path: Path, keys: Sequence[str]) -> None:
    """Looks at what the archive says of itself; zipfile unpacks no more of a part than that."""
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            if part.filename.removesuffix(".npy") in keys:
                refuse_dense(part.file_size, part.compress_size, f"{path}: {part.filename}")
