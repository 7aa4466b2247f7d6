"""Which files of a folder are images, and maps of numbers beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from consilium.data.dicom import series_in
from consilium.data.formats import (
    ImageError,
    suffix_of,
)
from consilium.data.images import ImageArray, _decode, holds_dicom

_RUBBISH = {"__MACOSX", "Thumbs.db", "desktop.ini"}


def is_rubbish(name: str) -> bool:
    """Whether a file or folder is one that a file browser left or hides, such as a Mac's `._scan.nii.gz`."""
    return name.startswith(".") or name in _RUBBISH


def pictures_in(path: Path, dimensions: int, channels: int) -> list[Path]:
    """Every image of a stack that is given as a whole, else the path itself; opens no more than a header."""
    if not path.name.lower().endswith(".npy"):
        return [path]
    try:
        shape = np.load(path, allow_pickle=False, mmap_mode="r").shape
    except (OSError, ValueError, EOFError, AttributeError):
        return [path]  # reading says why, in words
    grey = channels == 1 and len(shape) == dimensions + 1 and 1 not in (shape[0], shape[-1])
    if grey or len(shape) == dimensions + 2:
        return [path.with_name(f"{path.name}#{i}") for i in range(shape[0])]
    return [path]


def images_in(folder: Path, dimensions: int) -> list[Path]:
    """Every image in a folder and below; of DICOM every series as one volume, or every file as a picture.

    What a file browser left or hides is no image.
    """
    found: list[Path] = []
    below = (path for path in folder.rglob("*") if path.is_dir())
    for place in (folder, *sorted(p for p in below if not any(map(is_rubbish, p.relative_to(folder).parts)))):
        files = sorted(path for path in place.iterdir() if path.is_file() and not is_rubbish(path.name))
        found += [path for path in files if suffix_of(path) and not holds_dicom(path)]
        series = series_in(place)
        if dimensions == 2:
            found += sorted(file for files in series.values() for file in files)
        elif len(series) == 1:
            found.append(place)
        else:
            found += [place.with_name(f"{place.name}#{uid}") for uid in series]
    return found


def read_map(path: Path, dimensions: int) -> ImageArray:
    """What a publisher calls a mask, as (*spatial), before any rule: soft maps and JPEGs too."""
    raw = _decode(path, dimensions, channels=1, mask=True)
    if suffix_of(path) in (".jpg", ".jpeg"):
        return ImageArray(raw.array.mean(axis=0), raw.spacing, path, raw.geometry)
    if any(not np.array_equal(raw.array[0], other) for other in raw.array[1:]):
        raise ImageError(path, "is a colour picture; a mask has one number per pixel.")
    return ImageArray(raw.array[0], raw.spacing, path, raw.geometry)
