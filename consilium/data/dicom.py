"""DICOM: a series of files is one volume, and a mask goes back as a DICOM SEG that refers to it.

A volume is named by its folder, or by `folder#SeriesInstanceUID` where a folder holds several series. Pixels are
decoded by GDCM (in SimpleITK), which knows the compressed forms that hospitals store. Of a header only the geometry,
the rescaling and the series' UID are used; nobody's name is looked at but to write it into the SEG, which a picture
archive files under the same patient.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.limits import refuse_large
from consilium.errors import DataError, StudyError

DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"  # the class of a DICOM SEG
_NO_IMAGES = (  # beginnings of the classes of files that lie beside images: indices, reports, displays, regions, plans
    *("1.2.840.10008.1.3.10", "1.2.840.10008.5.1.4.1.1.88.", "1.2.840.10008.5.1.4.1.1.11."),
    *("1.2.840.10008.5.1.4.1.1.66", "1.2.840.10008.5.1.4.1.1.104.", "1.2.840.10008.5.1.4.1.1.481.3"),
)
_MARK = b"DICM"  # at byte 128 of every DICOM file
_SERIES = "0020|000e"  # SeriesInstanceUID
_SLACK = 0.05  # mm by which a slice may lie off its place


@dataclass(frozen=True)
class Block:
    """Pixels (channels, z, y, x) as real-world values, and where they lie, in ITK's order (x, y, z)."""

    array: NDArray[Any]
    spacing: tuple[float, float, float]
    origin: tuple[float, float, float]
    direction: tuple[float, ...]


@dataclass(frozen=True)
class _Slice:
    """What one file's header says."""

    path: Path
    series: str
    size: tuple[int, ...]
    spacing: tuple[float, ...]
    origin: NDArray[np.float64]
    direction: NDArray[np.float64]  # columns: along x, y, z


def series_of(path: Path) -> tuple[Path, str]:
    """A folder and, of `folder#UID`, the series in it, else ""."""
    folder, sign, uid = path.name.partition("#")
    named = sign and uid and not uid.strip("0123456789.") and not (path.exists())
    return (path.with_name(folder), uid) if named else (path, "")


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM, by its content: many have no suffix."""
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == _MARK
    except OSError:
        return False


def series_in(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The DICOM images directly in a folder by series; links and hidden files (a Mac's `._IM1.dcm`) are left out."""
    inside = (e for e in os.scandir(folder) if e.is_file(follow_symlinks=False) and not e.name.startswith("."))
    return _series_in(folder, tuple(sorted((e.name, e.stat().st_mtime_ns) for e in inside)))


@lru_cache(maxsize=4096)
def _series_in(folder: Path, stamp: tuple[tuple[str, int], ...]) -> dict[str, tuple[Path, ...]]:
    found: dict[str, list[Path]] = {}
    for name, _ in stamp:
        path = folder / name
        if (is_dicom(path) or name.lower().endswith(DICOM_SUFFIXES)) and not _kind(path).startswith(_NO_IMAGES):
            found.setdefault(slice_header(path).series, []).append(path)  # old files lack the mark
    return {uid: tuple(paths) for uid, paths in sorted(found.items())}


def dicom_files(path: Path) -> tuple[Path, ...]:
    """The files of a volume: of `folder` its only series, of `folder#UID` that one, of a file itself."""
    folder, uid = series_of(path)
    if not folder.is_dir():
        return (path,)
    series = series_in(folder)
    if not series:
        raise DataError("is a folder without DICOM files (links are not followed); name a file, or a series' folder.")
    if uid and uid not in series:
        raise DataError(f"there is no series {uid} in it; it has {', '.join(series)}.")
    if not uid and len(series) > 1:
        raise DataError(
            f"holds {len(series)} series; give each a folder, or write '{folder.name}#{next(iter(series))}'."
        )
    return series[uid or next(iter(series))]


def read_block(path: Path) -> Block:
    """One volume or picture, its slices in the order of their places, rescaled as their headers say."""
    slices = [slice_header(file) for file in dicom_files(path)]
    refuse_large((len(slices), *slices[0].size))
    if len(slices) == 1:
        (one,) = slices
        return _block(_pixels(one), one.spacing, one.origin, one.direction)
    slices, step = stacked(slices)
    first = slices[0]
    array = np.concatenate([_pixels(slice_) for slice_ in slices], axis=1)
    turn = np.column_stack([first.direction[:, :2], step / np.linalg.norm(step)])
    return _block(array, (*first.spacing[:2], float(np.linalg.norm(step))), first.origin, turn)


def _block(
    array: NDArray[Any], spacing: Sequence[float], origin: NDArray[np.float64], turn: NDArray[np.float64]
) -> Block:
    x, y, z = (float(step) for step in spacing)
    a, b, c = (float(place) for place in origin)
    return Block(array, (x, y, z), (a, b, c), tuple(float(value) for value in turn.ravel()))


def stacked(slices: Sequence[_Slice]) -> tuple[list[_Slice], NDArray[np.float64]]:
    """The slices from the first to the last along their normal, and the step from each to the next."""
    first = slices[0]
    if any(s.size != first.size or s.size[2] != 1 for s in slices):
        raise DataError("holds slices of different sizes in one series; keep those of one size.")
    if any(not np.allclose(s.direction, first.direction, atol=1e-3) for s in slices):
        raise DataError("holds slices of different directions in one series, such as a localiser; keep one direction.")
    if any(not np.allclose(s.spacing[:2], first.spacing[:2], rtol=1e-4) for s in slices):
        raise DataError("holds slices of different pixel spacings in one series; keep those of one.")
    normal = np.cross(first.direction[:, 0], first.direction[:, 1])
    ordered = sorted(slices, key=lambda s: float(s.origin @ normal))
    places = np.stack([s.origin for s in ordered])
    gaps = np.diff(places @ normal)
    if gaps.min() < _SLACK:
        raise DataError("holds two slices of one place (several phases or echoes?); keep one of each.")
    if gaps.max() - gaps.min() > _SLACK + 0.01 * gaps.min():
        sizes = f"from {gaps.min():.2f} to {gaps.max():.2f} mm"
        raise DataError(f"has gaps {sizes} between its slices: some are missing; copy the whole series.")
    step = (places[-1] - places[0]) / (len(places) - 1)
    if np.linalg.norm(step - (step @ normal) * normal) > _SLACK:
        raise DataError("is tilted (its slices do not lie above each other); resample it to a straight grid first.")
    return ordered, step


def slice_header(path: Path) -> _Slice:
    reader = _itk_reader(path)
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise DataError(f"{path.name} cannot be read (damaged, or a DICOM file without pixels).") from error
    series = reader.GetMetaData(_SERIES).strip(" \0") if reader.HasMetaDataKey(_SERIES) else ""
    turn = np.reshape(reader.GetDirection()[:9], (3, 3)) if reader.GetDimension() == 3 else np.eye(3)
    place = np.asarray(reader.GetOrigin(), dtype=np.float64)
    return _Slice(path, series, tuple(reader.GetSize()), tuple(reader.GetSpacing()), place, turn)


def _itk_reader(path: Path) -> Any:
    import SimpleITK

    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(str(path))
    return reader


def _pixels(slice_: _Slice) -> NDArray[Any]:
    """(channels, z, y, x), rescaled; GDCM turns what the file says is shown bright where it is low (MONOCHROME1)."""
    import SimpleITK

    image = _itk_reader(slice_.path).Execute()
    array: NDArray[Any] = SimpleITK.GetArrayFromImage(image)
    if image.GetNumberOfComponentsPerPixel() > 1:
        return np.moveaxis(array, -1, 0)
    return array[None]


# ---------------------------------------------------------------------------------------------- DICOM SEG


def require_dicom() -> None:
    """Say what to install where a SEG cannot be read or written."""
    if find_spec("highdicom") is None:
        raise StudyError("a DICOM SEG needs the package highdicom: pip install 'consilium[dicom]'.")


def is_slice(path: Path) -> bool:
    """Whether a file is one of a series: a DICOM image of one frame."""
    if not (is_dicom(path) or path.name.lower().endswith(DICOM_SUFFIXES)):
        return False
    return not _kind(path).startswith(_NO_IMAGES) and slice_header(path).size[2] == 1


def is_segmentation(path: Path) -> bool:
    return path.is_file() and _kind(path) == SEGMENTATION


def _kind(path: Path) -> str:
    """The class of a DICOM file, from the few elements at its beginning; "" in an old file that has none."""
    with path.open("rb") as file:
        block = file.read(2048)
    at = 132 if block[128:132] == _MARK else len(block)
    while at + 8 <= len(block) and block[at : at + 2] == b"\x02\0":  # group 2: always explicit, little-endian
        long = block[at + 4 : at + 6] in (b"OB", b"UN")
        size = int.from_bytes(block[at + 8 : at + 12] if long else block[at + 6 : at + 8], "little")
        start = at + (12 if long else 8)
        if block[at + 2 : at + 4] == b"\x02\0":
            return block[start : start + size].decode("ascii", "replace").rstrip("\0 ")
        at = start + size
    return ""


def read_segmentation(path: Path) -> Block:
    """A SEG as one mask whose values are the segments' numbers; of two nested segments the inner one is seen."""
    require_dicom()
    import highdicom

    seg = highdicom.seg.segread(path)
    volume = seg.get_volume(combine_segments=False)
    array, affine = np.asarray(volume.array) > 0, np.asarray(volume.affine)  # (z, y, x, segment)
    if np.cross(affine[:3, 2], affine[:3, 1]) @ affine[:3, 0] < 0:  # our slices go the way of their normal
        affine = affine @ reversed_slices(len(array))
        array = array[::-1]
    segments = sorted(zip(seg.segment_numbers, np.moveaxis(array, -1, 0)), key=lambda one: -int(one[1].sum()))
    for (_, outer), (_, inner) in itertools.combinations(segments, 2):
        if (outer & inner).any() and (inner & ~outer).any():
            raise DataError("has segments that overlap without one lying in the other; draw them apart.")
    mask = np.zeros(array.shape[:3], dtype=np.uint8)
    for number, region in segments:
        mask[region] = number
    steps = np.linalg.norm(affine[:3, :3], axis=0)
    return _block(mask[None], steps[::-1], affine[:3, 3], (affine[:3, :3] / steps)[:, ::-1])


def reversed_slices(slices: int) -> NDArray[np.float64]:
    """The matrix from slices counted from the other end."""
    turn = np.eye(4)
    turn[0, 0], turn[0, 3] = -1, slices - 1
    return turn
