"""Finds, reads and checks images and masks, and writes a mask beside the image it belongs to.

One axis convention for all formats: the fastest axis of the file comes last. A picture is (channels, row, column),
a volume (channels, z, y, x) with z the slice axis of an axial scan, and `spacing` follows the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.dicom import DICOM_SUFFIXES, dicom_files, is_dicom, is_slice, series_in, series_of
from consilium.data.formats import (
    IMAGE_SUFFIXES,
    ITK_SUFFIXES,
    NIFTI_SUFFIXES,
    OTHER_KIND,
    PILLOW_SUFFIXES,
    ImageError,
    ItkGeometry,
    NiftiGeometry,
    Raw,
    data_file,
    read_dicom,
    read_itk,
    read_nifti,
    read_npy,
    read_pillow,
    stack_of,
    suffix_of,
)
from consilium.data.orientation import orientation_of
from consilium.errors import DataError, UserError


@dataclass(frozen=True)
class ImageArray:
    """An image (channels, *spatial) in its stored type, or a mask (*spatial) of integers."""

    array: NDArray[Any]
    spacing: tuple[float, ...]  # mm per step of each spatial axis; 1 where the format does not say
    origin_file: Path
    geometry: NiftiGeometry | ItkGeometry | None  # None: the format has no place in the patient


def holds_dicom(path: Path) -> bool:
    """Whether an image is a DICOM file, or a series in a folder."""
    return series_of(path)[0].is_dir() or suffix_of(path) in DICOM_SUFFIXES or (not suffix_of(path) and is_dicom(path))


def together(paths: Sequence[Path], dimensions: int) -> list[Path]:
    """Files of one DICOM series become that series, as a shell's `scan/*` means it; all others stay as they are."""
    found: dict[Path, None] = {}
    for path in paths:
        if dimensions == 3 and path.is_file() and is_slice(path):
            series = series_in(path.parent)
            uid = next(uid for uid, files in series.items() if path in files)
            path = path.parent if len(series) == 1 else path.parent.with_name(f"{path.parent.name}#{uid}")
        found[path] = None
    return list(found)


def read_image(path: Path, dimensions: int, channels: int) -> ImageArray:
    """An image as (channels, *spatial)."""
    image = read_stored(path, dimensions, channels)
    if image.array.shape[0] != channels:
        raise ImageError(path, _wrong_channels(image.array.shape[0], channels))
    return image


def read_stored(path: Path, dimensions: int, channels: int) -> ImageArray:
    """An image as (channels, *spatial) with as many channels as its file has; `channels` are those hoped for."""
    raw = _decode(path, dimensions, channels, mask=False)
    if fault := not_finite(raw.array):
        raise ImageError(path, fault)
    return ImageArray(raw.array, raw.spacing, path, raw.geometry)


def not_finite(array: NDArray[Any]) -> str:
    """What to say of an image with values that are not finite, or would not be in 32 bits; "" of any other."""
    if array.dtype.kind != "f":
        return ""
    wrong, one, many = ~np.isfinite(array), "a value that is not a finite number", "values that are not finite numbers"
    if array.itemsize > 4 and not wrong.any():
        wrong = abs(array) > np.finfo(np.float32).max
        one, many = (f"{what} beyond 3.4e38, the largest 32-bit number" for what in ("a value", "values"))
    count = int(wrong.sum())
    if count == 0:
        return ""
    values = one if count == 1 else f"{count} {many}"
    return f"has {values}; replace {'it' if count == 1 else 'them'} by the background value."


def read_mask(path: Path, dimensions: int) -> ImageArray:
    """A mask as (*spatial) of integers."""
    if suffix_of(path) in (".jpg", ".jpeg"):
        raise ImageError(path, "is a JPEG, which changes mask values; save masks as PNG.")
    raw = _decode(path, dimensions, channels=1, mask=True)
    first = raw.array[0]
    if any(not np.array_equal(first, other) for other in raw.array[1:]):
        raise ImageError(path, "is a colour picture; save a mask with one integer per pixel (0 background, 1, 2, …).")
    return ImageArray(_as_integers(path, first), raw.spacing, path, raw.geometry)


def files_of(path: Path) -> tuple[Path, ...]:
    """Every file an image is stored in: itself or the stack around it, for mhd the data file beside it, a series'."""
    if series_of(path)[0].is_dir():
        return _series(path)
    if suffix_of(path) != ".mhd":
        return (stack_of(path)[0],)
    return (path, path.parent / data_file(path))


def _series(path: Path) -> tuple[Path, ...]:
    try:
        return dicom_files(path)
    except ImageError:
        raise
    except DataError as error:
        raise ImageError(path, str(error)) from error


def orientation(picture: ImageArray) -> str:
    """The direction of each file axis, such as "LPS" (towards left, posterior, superior), or "" if unknown."""
    return orientation_of(picture.geometry)


def _decode(path: Path, dimensions: int, channels: int, mask: bool) -> Raw:
    """Decoders raise whatever they like; here every failure becomes one sentence that names the file."""
    read = _reader(path)
    try:
        if not series_of(path)[0].is_dir() and stack_of(path)[0].stat().st_size == 0:
            raise ImageError(path, "is empty; copy it again from its source.")
        raw = read(path, dimensions, channels, mask)
    except ImageError:
        raise
    except DataError as error:
        raise ImageError(path, str(error)) from error
    except UserError:
        raise
    except FileNotFoundError:
        raise ImageError(path, "does not exist; correct the path in cases.csv.") from None
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1].strip().rstrip(".")
        raise ImageError(path, f"cannot be read ({reason}); copy it again from its source.") from error
    if raw.array.size == 0:
        raise ImageError(path, "holds an image without pixels; copy it again from its source.")
    if raw.array.dtype.kind not in "biuf":
        raise ImageError(path, f"holds values of type {raw.array.dtype}; save it as integers or real numbers.")
    native = raw.array.astype(raw.array.dtype.newbyteorder("="), copy=False)
    return Raw(np.ascontiguousarray(native), raw.spacing, raw.geometry)


def _reader(path: Path) -> Callable[[Path, int, int, bool], Raw]:
    suffix = suffix_of(path)
    if holds_dicom(path):
        return read_dicom
    if suffix in PILLOW_SUFFIXES:
        return read_pillow
    if suffix == ".npy":
        return read_npy
    if suffix in NIFTI_SUFFIXES:
        return read_nifti
    if suffix in ITK_SUFFIXES:
        return read_itk
    raise ImageError(path, f"is not of an accepted format; use one of {', '.join(IMAGE_SUFFIXES)}.")


def _as_integers(path: Path, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype.kind in "iu":
        return array
    whole: NDArray[np.float64] = np.rint(array)
    if not np.array_equal(whole, array):
        example = float(array[whole != array].flat[0])
        raise ImageError(path, f"holds values that are not whole numbers, such as {example:g}; save it as integers.")
    return whole.astype(np.int64)


def _wrong_channels(found: int, wanted: int) -> str:
    kind = {1: "is grey (1 channel)", 3: "is a colour image (3 channels)"}.get(found, f"has {found} channels")
    remedy = {1: "save it as grey", 3: "save it as RGB"}.get(wanted, f"save it with {wanted} channels")
    return f"{kind}{OTHER_KIND}channels = {wanted}; set channels = {found}, or {remedy}."
