"""Reads one case, and says in words what is wrong with its image and its mask."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ImageError
from consilium.data.images import ImageArray, files_of, read_image, read_mask
from consilium.data.orientation import axes_to_same_grid, turned
from consilium.data.preprocess import shape_text
from consilium.data.site_folder import Fault, Federation


@dataclass(frozen=True)
class Examined:
    """A case as read; what could not be read is None and has a fault."""

    image: ImageArray | None
    mask: ImageArray | None
    values: tuple[int, ...]  # the values in the mask
    faults: tuple[Fault, ...]


def blame(federation: Federation, site: str, case: str, file: Path, sentence: str) -> Fault:
    """A fault of one file of a case."""
    inside = file.relative_to(federation.folder) if file.is_relative_to(federation.folder) else file
    return Fault(site, case, inside.as_posix(), sentence)


def examine(
    federation: Federation,
    site: str,
    case: str,
    image_file: Path | None,
    label: Path | str | None,
    orient: bool = True,
) -> Examined:
    """Reads a case's image and mask, where given, and compares them with each other and with the labels.

    `orient`: a mask stored in another orientation comes back in that of its image, if both headers then agree.
    """
    faults: list[Fault] = []
    image = mask = None
    values: tuple[int, ...] = ()
    if image_file is not None:
        try:
            image = read_image(image_file, federation.dimensions, federation.channels)
        except ImageError as error:
            faults.append(blame(federation, site, case, image_file, error.sentence))
    if isinstance(label, Path):
        try:
            mask = read_mask(label, federation.dimensions)
            mask = _oriented(mask, image) if orient and image is not None else mask
            values = _values(mask.array)
            sentences = _mask_faults(image, mask, values, federation.labels)
        except ImageError as error:
            sentences = [error.sentence]
        faults += [blame(federation, site, case, label, sentence) for sentence in sentences]
    return Examined(image, mask, values, tuple(faults))


def file_hash(path: Path) -> str:
    """The content of a file, whatever its name; of an mhd, header and data."""
    total = hashlib.sha256()
    for part in files_of(path):
        with part.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _oriented(mask: ImageArray, image: ImageArray) -> ImageArray:
    axes = axes_to_same_grid(mask.geometry, image.geometry)
    if not axes:
        return mask
    return replace(mask, array=turned(mask.array, axes), spacing=image.spacing, geometry=image.geometry)


def _values(mask: NDArray[Any]) -> tuple[int, ...]:
    low, high = int(mask.min()), int(mask.max())
    if low >= 0 and high < 65536:  # counting is ten times faster than sorting; it needs eight bytes per voxel
        seen = np.zeros(high + 1, dtype=bool)
        for part in np.array_split(mask.ravel(), max(1, mask.size >> 20)):
            seen |= np.bincount(part.astype(np.int64), minlength=high + 1) > 0
        return tuple(np.flatnonzero(seen).tolist())
    return tuple(np.unique(mask).tolist())


def _mask_faults(
    image: ImageArray | None, mask: ImageArray, values: tuple[int, ...], labels: tuple[str, ...]
) -> list[str]:
    sentences = []
    if strange := [value for value in values if not 0 <= value <= len(labels)]:
        sentences.append(_strange_values(strange, labels))
    if image is not None and image.array.shape[1:] != mask.array.shape:
        sizes = f"{shape_text(mask.array.shape)} but its image is {shape_text(image.array.shape[1:])}"
        sentences.append(f"is {sizes}; give the mask the image's size.")
    return sentences


def _strange_values(strange: list[int], labels: tuple[str, ...]) -> str:
    few = ", ".join(str(value) for value in strange[:8]) + (", …" if len(strange) > 8 else "")
    known = ", ".join(f"{value} {label}" for value, label in enumerate(("background", *labels)))
    hint = f" (write {len(labels)} instead of 255?)" if strange == [255] and len(labels) == 1 else ""
    return f"has the mask values {few}, which are not in labels ({known}); correct the mask{hint} or federation.toml."
