"""Small files in the formats that people and publishers use, written by the libraries themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK
from numpy.typing import NDArray
from PIL import Image

from consilium.data.images import read_image, read_mask
from consilium.data.site_folder import Case, Federation

Array = NDArray[Any]
SPACING = (0.5, 0.75, 3.0)  # mm along x, y, z
ORIGIN = (10.0, -20.0, 30.0)


def some(*shape: int, seed: int = 0, kind: str = "uint8") -> Array:
    """Values that differ from place to place."""
    return np.random.default_rng(seed).integers(0, 200, shape).astype(kind)


def disc_and_cup(size: int = 16, at: tuple[int, int] = (8, 8), radii: tuple[int, int] = (4, 2)) -> tuple[Array, Array]:
    """Two regions of a picture, the second inside the first."""
    y, x = np.mgrid[:size, :size]
    away = np.hypot(y - at[0], x - at[1])
    return away <= radii[0], away <= radii[1]


def block(shape: tuple[int, int, int] = (4, 8, 6), labels: int = 1) -> Array:
    """A mask (z, y, x) with a box of each label, one beside the other along y."""
    mask = np.zeros(shape, np.uint8)
    for label in range(1, labels + 1):
        mask[1:3, label : label + 1, 1:4] = label
    return mask


def save_picture(path: Path, pixels: Array) -> Path:
    """A picture (row, column) or (row, column, 3) in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    return path


def save_nifti(path: Path, array: Array, affine: Array | None = None) -> Path:
    """A volume (z, y, x) or (channel, z, y, x)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if affine is None:
        affine = np.diag([*SPACING, 1.0])
        affine[:3, 3] = ORIGIN
    nibabel.save(nibabel.Nifti1Image(array.T, affine, dtype=array.dtype), path)
    return path


def save_itk(path: Path, array: Array, spacing: Sequence[float] = SPACING) -> Path:
    """A volume (z, y, x) as mhd (with its raw file), mha or nrrd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = SimpleITK.GetImageFromArray(array)
    image.SetSpacing(spacing)
    image.SetOrigin(ORIGIN)
    SimpleITK.WriteImage(image, str(path))
    return path


def case_of(federation: Federation, name: str) -> Case:
    (found,) = [case for site in federation.sites.values() for case in site.cases if case.name == name]
    return found


def image_of(federation: Federation, name: str) -> Array:
    return read_image(case_of(federation, name).image, federation.dimensions, federation.channels).array


def mask_of(federation: Federation, name: str) -> Array:
    label = case_of(federation, name).label
    assert isinstance(label, Path)
    return read_mask(label, federation.dimensions).array


def split_counts(federation: Federation, site: str) -> tuple[int, int, int]:
    found = [case.split for case in federation.sites[site].cases]
    return found.count("train"), found.count("valid"), found.count("test")
