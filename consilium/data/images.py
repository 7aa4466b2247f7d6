"""Reads images and masks of every accepted format, and writes a mask beside the image it belongs to.

One axis convention for all formats: the fastest axis of the file comes last. A picture is (channels, row, column),
a volume (channels, z, y, x) with z the slice axis of an axial scan, and `spacing` follows the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.dicom import (
    DICOM_SUFFIXES,
    dicom_files,
    is_dicom,
    is_segmentation,
    is_slice,
    read_block,
    read_segmentation,
    series_in,
    series_of,
)
from consilium.errors import DataError, UserError

if TYPE_CHECKING:
    from PIL import Image

PILLOW_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
NIFTI_SUFFIXES = (".nii.gz", ".nii")
ITK_SUFFIXES = (".mha", ".mhd", ".nrrd")
IMAGE_SUFFIXES: tuple[str, ...] = (*PILLOW_SUFFIXES, ".npy", *NIFTI_SUFFIXES, *ITK_SUFFIXES, *DICOM_SUFFIXES)
_IN_A_STACK = re.compile(r"(.+\.npy)#([0-9]+)", re.IGNORECASE)


class ImageError(DataError):
    """A file that cannot be used; `sentence` is the message without the file's name."""

    def __init__(self, path: Path, sentence: str) -> None:
        super().__init__(f"{path}: {sentence}")
        self.sentence = sentence


@dataclass(frozen=True)
class NiftiGeometry:
    """Where a NIfTI volume lies; `shape` is the spatial shape in the file's own order (x, y, z)."""

    affine: NDArray[np.float64]
    header: Any
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ItkGeometry:
    """Where an ITK image lies, in ITK's own order (x, y, z)."""

    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    direction: tuple[float, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """An image (channels, *spatial) in its stored type, or a mask (*spatial) of integers."""

    array: NDArray[Any]
    spacing: tuple[float, ...]  # mm per step of each spatial axis; 1 where the format does not say
    origin_file: Path
    geometry: NiftiGeometry | ItkGeometry | None  # None: the format has no place in the patient


@dataclass(frozen=True)
class _Raw:
    array: NDArray[Any]  # (channels, *spatial)
    spacing: tuple[float, ...]
    geometry: NiftiGeometry | ItkGeometry | None


def stack_of(path: Path) -> tuple[Path, int | None]:
    """The file an image lies in, and its place there if the file is a stack of many: "train.npy#17", else None."""
    inside = _IN_A_STACK.fullmatch(path.name) if "#" in path.name else None
    return (path.with_name(inside[1]), int(inside[2])) if inside else (path, None)


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


def holds_dicom(path: Path) -> bool:
    """Whether an image is a DICOM file, or a series in a folder."""
    return series_of(path)[0].is_dir() or suffix_of(path) in DICOM_SUFFIXES or (not suffix_of(path) and is_dicom(path))


def images_in(folder: Path, dimensions: int) -> list[Path]:
    """Every image in a folder and below; of DICOM every series as one volume, or every file as a picture."""
    found: list[Path] = []
    for place in (folder, *sorted(path for path in folder.rglob("*") if path.is_dir())):
        files = sorted(path for path in place.iterdir() if path.is_file())
        found += [path for path in files if suffix_of(path) and not holds_dicom(path)]
        series = series_in(place)
        if dimensions == 2:
            found += sorted(file for files in series.values() for file in files)
        elif len(series) == 1:
            found.append(place)
        else:
            found += [place.with_name(f"{place.name}#{uid}") for uid in series]
    return found


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


def suffix_of(path: Path) -> str:
    """The accepted suffix a file name ends with, in lower case, or "" if there is none."""
    name = stack_of(path)[0].name.lower()
    return next((suffix for suffix in IMAGE_SUFFIXES if name.endswith(suffix)), "")


def read_image(path: Path, dimensions: int, channels: int) -> Picture:
    """An image as (channels, *spatial)."""
    raw = _decode(path, dimensions, channels, mask=False)
    if raw.array.shape[0] != channels:
        raise ImageError(path, _wrong_channels(raw.array.shape[0], channels))
    if raw.array.dtype.kind == "f" and not np.isfinite(raw.array).all():
        count = int((~np.isfinite(raw.array)).sum())
        raise ImageError(path, f"has {count} values that are not finite numbers; replace them by the background value.")
    return Picture(raw.array, raw.spacing, path, raw.geometry)


def read_mask(path: Path, dimensions: int) -> Picture:
    """A mask as (*spatial) of integers."""
    if suffix_of(path) in (".jpg", ".jpeg"):
        raise ImageError(path, "is a JPEG, which changes mask values; save masks as PNG.")
    raw = _decode(path, dimensions, channels=1, mask=True)
    first = raw.array[0]
    if any(not np.array_equal(first, other) for other in raw.array[1:]):
        raise ImageError(path, "is a colour picture; save a mask with one integer per pixel (0 background, 1, 2, …).")
    return Picture(_as_integers(path, first), raw.spacing, path, raw.geometry)


def write_mask(mask: NDArray[np.uint8], like: Picture, path: Path) -> Path:
    """Writes a mask (*spatial) in the format family and the geometry of `like`; returns the path really written.

    The suffix is chosen here: png for pictures (tif for a stack of pages), nii.gz for NIfTI and DICOM, mha for mha and
    mhd, nrrd and npy kept.
    """
    expected = like.array.shape[-len(like.spacing) :]
    if mask.shape != expected:
        raise ValueError(f"the mask has shape {mask.shape}, its image {expected}")
    suffix = ".nii.gz" if holds_dicom(like.origin_file) else suffix_of(like.origin_file)
    base = path.name[: len(path.name) - len(suffix_of(path))]
    target = path.with_name(base + _mask_suffix(suffix, mask.ndim))
    target.parent.mkdir(parents=True, exist_ok=True)
    mask = np.ascontiguousarray(mask, dtype=np.uint8)
    if isinstance(like.geometry, NiftiGeometry):
        _write_nifti(mask, like.geometry, target)
    elif isinstance(like.geometry, ItkGeometry):
        _write_itk(mask, like.geometry, target)
    elif suffix == ".npy":
        np.save(target, mask)
    else:
        _write_pillow(mask, target)
    return target


def files_of(path: Path) -> tuple[Path, ...]:
    """Every file an image is stored in: itself or the stack around it, for mhd the data file beside it, a series'."""
    if series_of(path)[0].is_dir():
        return _series(path)
    if suffix_of(path) != ".mhd":
        return (stack_of(path)[0],)
    return (path, path.parent / _data_file(path))


def _series(path: Path) -> tuple[Path, ...]:
    try:
        return dicom_files(path)
    except ImageError:
        raise
    except DataError as error:
        raise ImageError(path, str(error)) from error


def orientation(picture: Picture) -> str:
    """The direction of each file axis, such as "LPS" (towards left, posterior, superior), or "" if unknown."""
    if isinstance(picture.geometry, NiftiGeometry):
        from nibabel.orientations import aff2axcodes

        return "".join(str(code) for code in aff2axcodes(picture.geometry.affine))
    if isinstance(picture.geometry, ItkGeometry) and len(picture.geometry.direction) == 9:
        import SimpleITK

        filter_ = SimpleITK.DICOMOrientImageFilter
        return str(filter_.GetOrientationFromDirectionCosines(picture.geometry.direction))
    return ""


def _decode(path: Path, dimensions: int, channels: int, mask: bool) -> _Raw:
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
    return _Raw(np.ascontiguousarray(native), raw.spacing, raw.geometry)


def _reader(path: Path) -> Callable[[Path, int, int, bool], _Raw]:
    suffix = suffix_of(path)
    if holds_dicom(path):
        return _read_dicom
    if suffix in PILLOW_SUFFIXES:
        return _read_pillow
    if suffix == ".npy":
        return _read_npy
    if suffix in NIFTI_SUFFIXES:
        return _read_nifti
    if suffix in ITK_SUFFIXES:
        return _read_itk
    raise ImageError(path, f"is not of an accepted format; use one of {', '.join(IMAGE_SUFFIXES)}.")


def _read_pillow(path: Path, dimensions: int, channels: int, mask: bool) -> _Raw:
    from PIL import Image

    with Image.open(path) as image:
        pages = getattr(image, "n_frames", 1) if suffix_of(path) in (".tif", ".tiff") else 1
        if dimensions == 2 and pages > 1:
            raise ImageError(path, _is_volume(pages))
        if dimensions == 3 and pages == 1:
            raise ImageError(path, _IS_PICTURE)
        frames = []
        for page in range(pages):
            if pages > 1:
                image.seek(page)
            frames.append(_pixels(path, image, channels, mask, page))
    if dimensions == 2:
        return _Raw(frames[0], (1.0, 1.0), None)
    return _Raw(np.stack(frames, axis=1), (1.0, 1.0, 1.0), None)


def _pixels(path: Path, image: Image.Image, channels: int, mask: bool, page: int) -> NDArray[Any]:
    """One page as (channels, row, column)."""
    if ";16" in str(getattr(image, "tile", "")) and len(image.getbands()) > 1:  # Pillow would cut colour to 8 bits
        pixels = _deep_colour(path, page)
    elif image.mode == "P" and not mask:  # in a mask the palette index is the label
        pixels = np.asarray(image.convert("RGB"))
        if channels == 1 and (pixels == pixels[..., :1]).all():
            pixels = pixels[..., 0]
    elif image.mode == "1":
        pixels = np.asarray(image).astype(np.uint8) if mask else np.asarray(image.convert("L"))
    elif image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "RGBX", "RGBa", "La", "PA"):
        pixels = np.asarray(image.convert("L" if image.mode == "La" else "RGB"))
    else:
        pixels = np.asarray(image)
    if pixels.ndim == 2:
        return pixels[None]
    alpha = pixels.shape[2] in (2, 4) and (mask or channels != pixels.shape[2])
    return np.moveaxis(pixels[..., :-1] if alpha else pixels, -1, 0)


def _deep_colour(path: Path, page: int) -> NDArray[Any]:
    import SimpleITK

    pixels: NDArray[Any] = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))
    return pixels[page] if pixels.ndim == 4 else pixels


def _read_npy(path: Path, dimensions: int, channels: int, mask: bool) -> _Raw:
    file, place = stack_of(path)
    array = np.load(path, allow_pickle=False) if place is None else _stack(file, *_stamp(file))
    if not isinstance(array, np.ndarray):
        array.close()
        raise ImageError(path, "is an archive of several arrays; save one array per file with numpy.save.")
    if place is not None:
        if array.ndim < dimensions + 1 or place >= len(array):
            raise ImageError(path, f"is not there: the file has shape {array.shape}; correct the number after '#'.")
        array = np.array(array[place])
    spacing = (1.0,) * dimensions
    if array.ndim == dimensions:
        return _Raw(array[None], spacing, None)
    if array.ndim == dimensions + 1 and array.shape[0] == channels:
        return _Raw(array, spacing, None)
    if array.ndim == dimensions + 1 and array.shape[-1] == channels and not mask:
        return _Raw(np.moveaxis(array, -1, 0), spacing, None)
    sides = ", ".join(("depth", "height", "width")[-dimensions:])
    wanted = f"({sides})" if channels == 1 else f"({channels}, {sides})"
    raise ImageError(path, f"has shape {array.shape}; federation.toml asks for {wanted}. Correct either.")


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _stack(file: Path, size: int, changed: int) -> Any:
    """A stack stays mapped from image to image; `size` and `changed` let a rewritten file be opened anew."""
    return np.load(file, allow_pickle=False, mmap_mode="r")


def _read_nifti(path: Path, dimensions: int, channels: int, mask: bool) -> _Raw:
    import nibabel

    image: Any = nibabel.load(path, mmap=False)
    array = np.asanyarray(image.dataobj)  # (x, y, z, time, vector)
    shape = tuple(int(side) for side in array.shape[:3])
    spacing = tuple(float(step) for step in image.header.get_zooms()[: len(shape)])
    geometry = NiftiGeometry(np.asarray(image.affine, dtype=np.float64), image.header, shape)
    return _arrange(path, array.T, dimensions, spacing, geometry)


def _read_itk(path: Path, dimensions: int, channels: int, mask: bool) -> _Raw:
    import SimpleITK

    _refuse_far_data(path)
    try:
        image = SimpleITK.ReadImage(str(path))
    except RuntimeError as error:  # ITK's own words often name another cause
        raise ImageError(path, "cannot be read (damaged or truncated); copy it again from its source.") from error
    array = SimpleITK.GetArrayFromImage(image)  # (z, y, x) or (z, y, x, channels)
    if image.GetNumberOfComponentsPerPixel() > 1:
        array = np.moveaxis(array, -1, 0)
    rank = min(image.GetDimension(), 3)  # a fourth axis is channels
    turn = np.reshape(image.GetDirection(), (image.GetDimension(), -1))[:rank, :rank]
    spacing = tuple(image.GetSpacing()[:rank])
    geometry = ItkGeometry(spacing, image.GetOrigin()[:rank], tuple(turn.ravel().tolist()), image.GetSize()[:rank])
    return _arrange(path, array, dimensions, spacing, geometry)


def _read_dicom(path: Path, dimensions: int, channels: int, mask: bool) -> _Raw:
    block = read_segmentation(path) if mask and is_segmentation(path) else read_block(path)
    shape = tuple(reversed(block.array.shape[1:]))
    if dimensions == 3 and shape[2] == 1 and path.is_file():
        raise ImageError(path, "is one picture or slice; name the folder that holds its series, or set dimensions = 2.")
    geometry = ItkGeometry(block.spacing, block.origin, block.direction, shape)
    return _arrange(path, block.array, dimensions, block.spacing, geometry)


def _arrange(
    path: Path,
    array: NDArray[Any],
    dimensions: int,
    spacing: tuple[float, ...],
    geometry: NiftiGeometry | ItkGeometry,
) -> _Raw:
    """From (..., z, y, x), or (..., y, x), to (channels, *spatial); `spacing` comes in file order (x, y, z)."""
    spatial = array.shape[-len(spacing) :]
    if dimensions == 2 and len(spatial) == 3:
        if spatial[0] != 1:
            raise ImageError(path, _is_volume(spatial[0]))
        spatial = spatial[1:]
    if dimensions == 3 and len(spatial) == 2:
        raise ImageError(path, _IS_PICTURE)
    backwards = tuple(float(step) for step in reversed(spacing[:dimensions]))
    return _Raw(array.reshape(-1, *spatial) if array.size else array, backwards, geometry)


def _refuse_far_data(path: Path) -> None:
    """A header could name a data file anywhere on the disk, and ITK would follow it."""
    if suffix_of(path) == ".mhd":
        _data_file(path)
        return
    header = [line.replace(" ", "").lower() for line in _text_header(path)]
    detached = ("datafile:",) if suffix_of(path) == ".nrrd" else ("elementdatafile=",)
    if any(line.startswith(detached) and line != "elementdatafile=local" for line in header):
        raise ImageError(path, "keeps its data in another file; save header and data as one file.")


def _text_header(path: Path) -> list[str]:
    with path.open("rb") as file:
        block = file.read(65536)
    end = block.find(b"\n\n") if suffix_of(path) == ".nrrd" else block.find(b"\n", block.find(b"ElementDataFile"))
    return block[: end if end >= 0 else None].decode("latin-1").splitlines()


def _data_file(path: Path) -> str:
    """The data file that an mhd header names; it must lie beside the header."""
    named = [line.split("=", 1)[1].strip() for line in _text_header(path) if line.startswith("ElementDataFile")]
    name = named[0] if named else ""
    if not name or name.upper() in ("LIST", "LOCAL") or "%" in name or "/" in name or "\\" in name:
        raise ImageError(path, f"names the data file {name!r}; use one data file in the same folder, or save as .mha.")
    if not (path.parent / name).is_file():
        raise ImageError(path, f"names the data file {name!r}, which does not exist; put it in the same folder.")
    return name


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


_IS_PICTURE = "is a single picture, but federation.toml says dimensions = 3; set dimensions = 2, or give volumes."


def _is_volume(slices: int) -> str:
    told = "but federation.toml says dimensions = 2; set dimensions = 3, or give pictures."
    return f"is a volume of {slices} slices, {told}"


def _wrong_channels(found: int, wanted: int) -> str:
    kind = {1: "is grey (1 channel)", 3: "is a colour image (3 channels)"}.get(found, f"has {found} channels")
    remedy = {1: "save it as grey", 3: "save it as RGB"}.get(wanted, f"save it with {wanted} channels")
    return f"{kind}, but federation.toml says channels = {wanted}; set channels = {found}, or {remedy}."


def _mask_suffix(suffix: str, dimensions: int) -> str:
    if suffix in PILLOW_SUFFIXES:
        return ".png" if dimensions == 2 else ".tif"
    if suffix in NIFTI_SUFFIXES:
        return ".nii.gz"
    return ".mha" if suffix == ".mhd" else suffix


def _write_pillow(mask: NDArray[np.uint8], path: Path) -> None:
    from PIL import Image

    if mask.ndim == 2:
        Image.fromarray(mask).save(path)
        return
    first, *rest = [Image.fromarray(page) for page in mask]
    first.save(path, save_all=True, append_images=rest, compression="tiff_deflate")


def _write_nifti(mask: NDArray[np.uint8], geometry: NiftiGeometry, path: Path) -> None:
    import nibabel

    kind = nibabel.Nifti2Image if type(geometry.header).__name__.startswith("Nifti2") else nibabel.Nifti1Image
    header = geometry.header.copy()
    header["cal_min"] = header["cal_max"] = 0  # a viewer's window for the image would hide the labels
    image = kind(mask.T.reshape(geometry.shape), geometry.affine, header)
    image.set_data_dtype(np.uint8)
    nibabel.save(image, path)


def _write_itk(mask: NDArray[np.uint8], geometry: ItkGeometry, path: Path) -> None:
    import SimpleITK

    image = SimpleITK.GetImageFromArray(mask.reshape(tuple(reversed(geometry.shape))))
    image.SetSpacing(geometry.spacing)
    image.SetOrigin(geometry.origin)
    image.SetDirection(geometry.direction)
    SimpleITK.WriteImage(image, str(path), useCompression=True)
