"""Masks as files, in the format and the place of the image they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium import __version__
from consilium.data.dicom import dicom_files, require_dicom, slice_header, stacked
from consilium.data.formats import NIFTI_SUFFIXES, PILLOW_SUFFIXES, ItkGeometry, NiftiGeometry, suffix_of
from consilium.data.images import ImageArray, holds_dicom
from consilium.data.orientation import Axes, turned
from consilium.data.preprocess import Undo, _nearest, _resize


def write_mask(mask: NDArray[np.uint8], like: ImageArray, path: Path) -> Path:
    """Writes a mask (*spatial) in the format family and the geometry of `like`; returns the path really written."""
    expected = like.array.shape[-len(like.spacing) :]
    if mask.shape != expected:
        raise ValueError(f"the mask has shape {mask.shape}, its image {expected}")
    target = path.with_name(mask_name(path, like.origin_file, mask.ndim))
    target.parent.mkdir(parents=True, exist_ok=True)
    mask = np.ascontiguousarray(mask, dtype=np.uint8)
    if isinstance(like.geometry, NiftiGeometry):
        write_nifti(mask, like.geometry, target)
    elif isinstance(like.geometry, ItkGeometry):
        write_itk(mask, like.geometry, target)
    elif target.suffix == ".npy":
        np.save(target, mask)
    else:
        write_pillow(mask, target)
    return target


def mask_name(path: Path, image: Path, dimensions: int) -> str:
    """The name of an image's mask: that of `path`, with another suffix.

    The suffix is png for pictures (tif for a stack of pages), nii.gz for NIfTI and DICOM, mha for mha and mhd; nrrd and
    npy are kept.
    """
    suffix = ".nii.gz" if holds_dicom(image) else suffix_of(image)
    return path.name[: len(path.name) - len(suffix_of(path))] + _mask_suffix(suffix, dimensions)


def _mask_suffix(suffix: str, dimensions: int) -> str:
    if suffix in PILLOW_SUFFIXES:
        return ".png" if dimensions == 2 else ".tif"
    if suffix in NIFTI_SUFFIXES:
        return ".nii.gz"
    return ".mha" if suffix == ".mhd" else suffix


def write_pillow(mask: NDArray[np.uint8], path: Path) -> None:
    from PIL import Image

    if mask.ndim == 2:
        Image.fromarray(mask).save(path)
        return
    first, *rest = [Image.fromarray(page) for page in mask]
    first.save(path, save_all=True, append_images=rest, compression="tiff_deflate")


def write_nifti(mask: NDArray[np.uint8], geometry: NiftiGeometry, path: Path) -> None:
    import nibabel

    kind = nibabel.Nifti2Image if type(geometry.header).__name__.startswith("Nifti2") else nibabel.Nifti1Image
    header = geometry.header.copy()
    header["cal_min"] = header["cal_max"] = 0  # a viewer's window for the image would hide the labels
    image = kind(mask.T.reshape(geometry.shape), geometry.affine, header)
    image.set_data_dtype(np.uint8)
    nibabel.save(image, path)


def write_itk(mask: NDArray[np.uint8], geometry: ItkGeometry, path: Path) -> None:
    import SimpleITK

    image = SimpleITK.GetImageFromArray(mask.reshape(tuple(reversed(geometry.shape))))
    image.SetSpacing(geometry.spacing)
    image.SetOrigin(geometry.origin)
    image.SetDirection(geometry.direction)
    SimpleITK.WriteImage(image, str(path), useCompression=True)


def write_segmentation(
    mask: NDArray[np.uint8], source: Path, labels: Sequence[str], inside: Mapping[str, set[str]], path: Path
) -> Path:
    """A mask (z, y, x), or (y, x), on the slices it was predicted from; a label's segment includes those inside it."""
    require_dicom()
    import highdicom
    from pydicom import dcmread
    from pydicom.sr.codedict import codes

    slices = [slice_header(file) for file in dicom_files(source)]
    ordered = stacked(slices)[0] if len(slices) > 1 else slices
    frames = mask if mask.ndim == 3 else mask[None]
    values = {label: value for value, label in enumerate(labels, start=1)}
    regions = [
        np.isin(frames, [values[label], *(values[inner] for inner in inside.get(label, ()))]) for label in labels
    ]
    algorithm = highdicom.AlgorithmIdentificationSequence("consilium", codes.DCM.ArtificialIntelligence, __version__)
    parts = [
        highdicom.seg.SegmentDescription(
            value, label[:64], codes.SCT.AnatomicalStructure,
            highdicom.sr.CodedConcept(str(value), "99CONSILIUM", label[:64]),
            highdicom.seg.SegmentAlgorithmTypeValues.AUTOMATIC, algorithm,
        )
        for label, value in values.items()
    ]  # fmt: skip
    made = highdicom.seg.Segmentation(
        source_images=[dcmread(slice_.path, stop_before_pixels=True) for slice_ in ordered],
        pixel_array=np.stack(regions, axis=-1).astype(np.uint8),
        segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
        segment_descriptions=parts,
        series_instance_uid=highdicom.UID(),
        series_number=99,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="consilium",
        manufacturer_model_name="consilium",
        software_versions=__version__,
        device_serial_number="0",
        omit_empty_frames=False,  # the SEG then says of every slice what is there
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path)
    return path


def invert(mask_or_probability: NDArray[Any], undo: Undo, nearest: bool) -> NDArray[Any]:
    """From the preprocessed grid back to the picture's own; (*spatial) or (channels, *spatial).

    Outside a crop everything is 0, so that an arg max over channels gives background there. `nearest` keeps the type
    (labels); otherwise values are interpolated (probabilities) and come back as float32.
    """
    if mask_or_probability.shape[-len(undo.final) :] != undo.final:
        raise ValueError(f"the array has shape {mask_or_probability.shape}, the preprocessed image {undo.final}")
    scale = _nearest if nearest else _resize
    array = mask_or_probability if nearest else mask_or_probability.astype(np.float32)
    inside = scale(array, undo.cropped)
    outside = np.zeros((*inside.shape[: -len(undo.box)], *undo.resampled), dtype=inside.dtype)
    box: tuple[Any, ...] = tuple(slice(start, stop) for start, stop in undo.box)
    outside[(..., *box)] = inside
    return np.ascontiguousarray(turned_back(scale(outside, undo.oriented), undo.axes))


def turned_back(array: NDArray[Any], axes: Axes) -> NDArray[Any]:
    """The inverse of `turned`."""
    back = [0] * len(axes)
    for place, axis in enumerate(axes, start=1):
        back[abs(axis) - 1] = place if axis > 0 else -place
    return turned(array, tuple(back))
