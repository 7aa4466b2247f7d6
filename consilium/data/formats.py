"""What files of each format hold, and how a mask is written in it; failures are left as the libraries raise them."""

from __future__ import annotations

import gzip
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.dicom import DICOM_SUFFIXES, is_segmentation, read_block, read_segmentation
from consilium.data.limits import MOST_HEADER, refuse_large
from consilium.errors import DataError
from consilium.wording import counted

if TYPE_CHECKING:
    from PIL import Image


PILLOW_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
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
class Raw:
    array: NDArray[Any]  # (channels, *spatial)
    spacing: tuple[float, ...]
    geometry: NiftiGeometry | ItkGeometry | None


def stack_of(path: Path) -> tuple[Path, int | None]:
    """The file an image lies in, and its place there if the file is a stack of many: "train.npy#17", else None."""
    inside = _IN_A_STACK.fullmatch(path.name) if "#" in path.name else None
    return (path.with_name(inside[1]), int(inside[2])) if inside else (path, None)


def suffix_of(path: Path) -> str:
    """The accepted suffix a file name ends with, in lower case, or "" if there is none."""
    name = stack_of(path)[0].name.lower()
    return next((suffix for suffix in IMAGE_SUFFIXES if name.endswith(suffix)), "")


# ---------------------------------------------------------------------------------------------- reading


def read_pillow(path: Path, dimensions: int, channels: int, mask: bool) -> Raw:
    from PIL import Image

    try:
        opened = Image.open(path)
    except Image.DecompressionBombError:
        raise ImageError(path, "says it is larger than any camera's picture; it was not unpacked.") from None
    with opened as image:
        pages = getattr(image, "n_frames", 1) if suffix_of(path) in (".tif", ".tiff") else 1
        refuse_large((pages, *image.size))
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
        return Raw(frames[0], (1.0, 1.0), None)
    return Raw(np.stack(frames, axis=1), (1.0, 1.0, 1.0), None)


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


def read_npy(path: Path, dimensions: int, channels: int, mask: bool) -> Raw:
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
        return Raw(array[None], spacing, None)
    if array.ndim == dimensions + 1 and array.shape[0] == channels:
        return Raw(array, spacing, None)
    if array.ndim == dimensions + 1 and array.shape[-1] == channels and not mask:
        return Raw(np.moveaxis(array, -1, 0), spacing, None)
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


def read_nifti(path: Path, dimensions: int, channels: int, mask: bool) -> Raw:
    import nibabel

    _refuse_far_values(path)
    image: Any = nibabel.load(path, mmap=False)
    refuse_large(image.shape)
    array = np.asanyarray(image.dataobj)  # (x, y, z, time, vector)
    shape = tuple(int(side) for side in array.shape[:3])
    spacing = tuple(float(step) for step in image.header.get_zooms()[: len(shape)])
    geometry = NiftiGeometry(np.asarray(image.affine, dtype=np.float64), image.header, shape)
    return _arrange(path, array.T, dimensions, spacing, geometry)


def _refuse_far_values(path: Path) -> None:
    """nibabel reads all that lies before the values at once; a header can say that this is gigabytes."""
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        head = file.read(352)
    for order in "<>":
        if len(head) >= 352 and struct.unpack(f"{order}i", head[:4])[0] in (348, 540):
            second = head[4:8] == b"n+2\0"
            offset = (
                struct.unpack(f"{order}q", head[168:176])[0] if second else struct.unpack(f"{order}f", head[108:112])[0]
            )
            if not offset <= MOST_HEADER:
                raise ImageError(path, f"says that {offset:.0f} bytes lie before its values; it was not unpacked.")


def read_itk(path: Path, dimensions: int, channels: int, mask: bool) -> Raw:
    import SimpleITK

    _refuse_far_data(path)
    try:
        reader = SimpleITK.ImageFileReader()
        reader.SetFileName(str(path))
        reader.ReadImageInformation()
        refuse_large((*reader.GetSize(), reader.GetNumberOfComponents()))
        image = reader.Execute()
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


def read_dicom(path: Path, dimensions: int, channels: int, mask: bool) -> Raw:
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
) -> Raw:
    """From (..., z, y, x), or (..., y, x), to (channels, *spatial); `spacing` comes in file order (x, y, z)."""
    spatial = array.shape[-len(spacing) :]
    if dimensions == 2 and len(spatial) == 3:
        if spatial[0] != 1:
            raise ImageError(path, _is_volume(spatial[0]))
        spatial = spatial[1:]
    if dimensions == 3 and len(spatial) == 2:
        raise ImageError(path, _IS_PICTURE)
    backwards = tuple(float(step) for step in reversed(spacing[:dimensions]))
    return Raw(array.reshape(-1, *spatial) if array.size else array, backwards, geometry)


def _refuse_far_data(path: Path) -> None:
    """A header could name a data file anywhere on the disk, and ITK would follow it."""
    if suffix_of(path) == ".mhd":
        data_file(path)
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


def data_file(path: Path) -> str:
    """The data file that an mhd header names; it must lie beside the header."""
    named = [line.split("=", 1)[1].strip() for line in _text_header(path) if line.startswith("ElementDataFile")]
    name = named[0] if named else ""
    if not name or name.upper() in ("LIST", "LOCAL") or "%" in name or "/" in name or "\\" in name:
        raise ImageError(path, f"names the data file {name!r}; use one data file in the same folder, or save as .mha.")
    if not (path.parent / name).is_file():
        raise ImageError(path, f"names the data file {name!r}, which does not exist; put it in the same folder.")
    return name


OTHER_KIND = ", but federation.toml says "  # in what is said of an image of another kind: what it is comes before
_IS_PICTURE = f"is a single picture{OTHER_KIND}dimensions = 3; set dimensions = 2, or give volumes."


def _is_volume(slices: int) -> str:
    return f"is a volume of {counted(slices, 'slice')}{OTHER_KIND}dimensions = 2; set dimensions = 3, or give pictures."
