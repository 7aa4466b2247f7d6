"""Reads a case as its publisher stores it: the image as it will be written, and the mask as label numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ImageError
from consilium.data.image_folders import read_map
from consilium.data.images import ImageArray, read_stored
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.outlines import Outlines
from consilium.data.importers.rules import Labelled, majority, painted
from consilium.data.orientation import affine_of, axes_to_same_grid, turned
from consilium.data.preprocess import shape_text
from consilium.data.site_folder import inside_of
from consilium.errors import DataError
from consilium.wording import counted

GREY = np.array([0.299, 0.587, 0.114])  # of red, green and blue, as television does
MAJORITY = "majority"


@dataclass(frozen=True)
class ReadCase:
    """A case in memory; `as_stored`: its image is what its file or series holds, nothing more and nothing less."""

    image: ImageArray
    mask: Labelled | None
    as_stored: bool
    notes: tuple[str, ...] = ()  # raters whose drawing could not be used


def read_case(case: RawCase, found: Found, rater: str) -> ReadCase:
    """The image (channels, *spatial) and its mask (*spatial), on one grid."""
    image = read_stored(case.images[0], found.dimensions, found.channels)
    if len(case.images) > 1:
        image = _stacked([image, *(read_stored(path, found.dimensions, 1) for path in case.images[1:])])
    chosen = image.array if case.channel is None else image.array[case.channel : case.channel + 1]
    if not len(chosen):
        raise ImageError(
            case.images[0], f"has {counted(len(image.array), 'channel')}; number {case.channel} is asked for."
        )
    chosen = _coloured(chosen, found.channels, case.images[0])
    kept = len(case.images) == 1 and chosen.shape == image.array.shape and not case.left_half
    image = replace(image, array=chosen)
    mask = None
    notes: list[str] = []
    if case.raters:
        masks = _all_drawn(_chosen(case, rater), image, case, notes)
        mask = masks[0] if len(masks) == 1 else majority(masks, _numbers(found), len(found.labels))
    if case.left_half:
        image = replace(image, array=_left(image.array))
    if mask is not None and mask.shape != image.array.shape[1:]:
        first = next(iter(case.raters.values()))[0].path
        sizes = f"{shape_text(mask.shape)} but its image is {shape_text(image.array.shape[1:])}"
        raise ImageError(first, f"is {sizes}; they do not belong together.")
    return ReadCase(image, mask, kept, tuple(notes))


def _chosen(case: RawCase, rater: str) -> Sequence[tuple[Layer, ...]]:
    if rater == MAJORITY or len(case.raters) == 1:
        return list(case.raters.values())
    if rater not in case.raters:
        raise DataError(f"case {case.name!r} has no rater {rater!r}; it has {', '.join(case.raters)}.")
    return [case.raters[rater]]


def _numbers(found: Found) -> Mapping[int, set[int]]:
    """By label number, the numbers of the labels inside it."""
    number = {label: value for value, label in enumerate(found.labels, start=1)}
    return {number[label]: {number[name] for name in inside_of(label, found.contains)} for label in found.labels}


def _all_drawn(
    raters: Sequence[tuple[Layer, ...]], image: ImageArray, case: RawCase, notes: list[str]
) -> list[Labelled]:
    """Every rater's mask; outlines that are not closed are noted and left out of the vote, if others remain."""
    masks = []
    for layers in raters:
        try:
            masks.append(_drawn(layers, image, case))
        except ImageError as error:
            if not isinstance(layers[0].rule, Outlines):
                raise
            notes.append(str(error))
    if not masks:
        raise ImageError(case.images[0], f"has no rater whose outlines can be used; the first: {notes[0]}")
    return masks


def _drawn(layers: Sequence[Layer], image: ImageArray, case: RawCase) -> Labelled:
    """One rater's mask."""
    parts = []
    for layer in layers:
        if isinstance(layer.rule, Outlines):
            parts.append(layer.rule.between(image, layer.path))
            continue
        stored = read_map(layer.path, len(image.spacing))
        stored = _on_the_grid(stored, image, case.regrid)
        if case.left_half and stored.array.shape == image.array.shape[1:]:
            stored = replace(stored, array=_left(stored.array))
        try:
            parts.append(layer.rule(stored.array))
        except DataError as error:
            raise ImageError(layer.path, str(error)) from None
        if parts[-1].shape != parts[0].shape:
            raise ImageError(layer.path, f"is {shape_text(parts[-1].shape)}, but the case's first mask is not.")
    return painted(parts)


def _on_the_grid(mask: ImageArray, image: ImageArray, regrid: bool) -> ImageArray:
    """A mask in the orientation of its image, or on its very voxels where that was asked for."""
    if axes := axes_to_same_grid(mask.geometry, image.geometry):
        return replace(mask, array=turned(mask.array, axes), spacing=image.spacing, geometry=image.geometry)
    here, there = affine_of(image.geometry), affine_of(mask.geometry)
    if not regrid or here is None or there is None or mask.array.shape == image.array.shape[1:]:
        return mask
    from scipy.ndimage import affine_transform

    step = np.linalg.inv(there) @ here  # from the image's voxels to the mask's, in (x, y, z)
    shape = tuple(reversed(image.array.shape[1:]))
    moved = affine_transform(mask.array.T, step[:3, :3], step[:3, 3], shape, order=0, mode="constant", cval=0)
    return replace(mask, array=moved.T, spacing=image.spacing, geometry=image.geometry)


def _stacked(channels: Sequence[ImageArray]) -> ImageArray:
    first = channels[0]
    for other in channels[1:]:
        if other.array.shape[1:] != first.array.shape[1:]:
            sizes = f"{shape_text(other.array.shape[1:])}, its first channel {shape_text(first.array.shape[1:])}"
            raise ImageError(other.origin_file, f"is {sizes}; all channels must be on one grid.")
    return replace(first, array=np.concatenate([channel.array for channel in channels]))


def _coloured(array: NDArray[Any], channels: int, path: Path) -> NDArray[Any]:
    """Grey from colour or colour from grey, of the same number type."""
    have = len(array)
    if have == channels:
        return array
    if (have, channels) == (1, 3):
        return np.repeat(array, 3, axis=0)
    if (have, channels) == (3, 1):
        grey = np.tensordot(GREY, array.astype(np.float64), 1)[None]
        return (grey if array.dtype.kind == "f" else np.rint(grey)).astype(array.dtype)
    raise ImageError(path, f"has {counted(have, 'channel')}, not {channels}; say with --channels how many there are.")


def _left(array: NDArray[Any]) -> NDArray[Any]:
    return array[..., : array.shape[-1] // 2]
