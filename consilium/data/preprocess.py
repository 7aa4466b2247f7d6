"""What is done to every image once, and undone for every prediction.

The order: bring a volume to one orientation, resample to a spacing, crop, clip to a window, normalise, your own
steps, resize. Geometry is kept in an `Undo`, so masks go the same way and predictions come back to the picture's grid.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ImageError
from consilium.data.images import ImageArray, orientation
from consilium.data.orientation import CODES, Axes, axes_between, reordered, turned
from consilium.errors import StudyError
from consilium.extensions import code_hashes, is_code, load

VERSION = 1  # raise it whenever the same settings give other numbers: old caches are then rebuilt
MARGIN = 4  # voxels kept around the foreground
CROPS = ("none", "foreground", "positive")
_SINCE_0_1: dict[str, Any] = {
    "orientation": "",
    "percentiles": [],
    "steps": [],
}  # keys that 0.1 did not have, with the values that say what it did
NORMALISATIONS = ("unit", "signed", "zscore", "none")


@dataclass(frozen=True)
class Preprocess:
    """The [preprocess] table of a study. Axes are (row, column), or (z, y, x) in a volume."""

    orientation: str = "RAS"  # volumes are brought to it and predictions back; "": as they are stored

    size: tuple[int, ...] = ()  # resize to this; empty keeps the size
    spacing: tuple[float, ...] = ()  # resample volumes to this, in mm; empty keeps the spacing
    # "foreground": the bounding box of intensity above its minimum, with a margin of 4 voxels; "positive": of intensity
    # above 0 without a margin, in CT what is denser than water
    crop: str = "none"
    window: tuple[float, ...] = ()  # (low, high): clip intensities to this; empty clips nothing
    percentiles: tuple[float, ...] = ()  # (low, high): clip each case and channel to these, such as (0.5, 99.5)
    slices: str = ""  # "axial": volumes are trained and predicted slice by slice; `size` is then (row, column)
    # "unit": 0..1 by window, percentiles, type or the case's range; "signed": the same to -1..1;
    # "zscore": per case and channel; "none"
    normalise: str = "unit"
    steps: tuple[str, ...] = ()  # your own, "file.py:function", after normalising: (array, spacing) → array

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _numbers("size", self.size, whole=True))
        object.__setattr__(self, "spacing", _numbers("spacing", self.spacing))
        object.__setattr__(self, "window", _numbers("window", self.window))
        for key, values in (("size", self.size), ("spacing", self.spacing)):
            if values and (len(values) not in (2, 3) or min(values) <= 0):
                raise StudyError(f"[preprocess] {key} is {list(values)}; give 2 or 3 numbers above zero.")
        if self.window and (len(self.window) != 2 or self.window[0] >= self.window[1]):
            raise StudyError(f"[preprocess] window is {list(self.window)}; give a low and a higher number.")
        object.__setattr__(self, "percentiles", _numbers("percentiles", self.percentiles))
        if self.percentiles and not (
            len(self.percentiles) == 2 and 0 <= self.percentiles[0] < self.percentiles[1] <= 100
        ):
            told = "give a low and a higher number from 0 to 100, such as [0.5, 99.5]"
            raise StudyError(f"[preprocess] percentiles is {list(self.percentiles)}; {told}.")
        if self.percentiles and self.window:
            raise StudyError("[preprocess] has both window and percentiles; clip to one of them.")
        if self.orientation not in ("", *CODES):
            told = 'give the direction of x, y and z in letters of R L, A P and S I, such as "RAS" or "LPS", or ""'
            raise StudyError(f"[preprocess] orientation is {self.orientation!r}; {told} for as stored.")
        if self.slices and self.orientation and self.orientation[2] not in "SI":
            raise StudyError(
                f"[preprocess] orientation = {self.orientation!r} has no axial slices along z; end it with S or I."
            )
        for name in self.steps:
            if not is_code(name):
                raise StudyError(f"[preprocess] steps: '{name}' names no function; write it as file.py:name.")
        for key, word, words in (
            ("crop", self.crop, CROPS),
            ("normalise", self.normalise, NORMALISATIONS),
            ("slices", self.slices, ("", "axial")),
        ):
            if word not in words:
                allowed = ", ".join(known or "''" for known in words)
                raise StudyError(f"[preprocess] {key} is {word!r}; it is one of {allowed}.")


@dataclass(frozen=True)
class Undo:
    """The spatial shapes a picture went through; enough to send masks forward and predictions back."""

    original: tuple[int, ...]  # as stored
    resampled: tuple[int, ...]
    box: tuple[tuple[int, int], ...]  # first and last + 1 of each axis, in the resampled grid
    final: tuple[int, ...]
    axes: Axes = ()  # how the stored axes were turned before all else; (): not at all

    @property
    def oriented(self) -> tuple[int, ...]:
        """The stored shape with its axes in the order of the study."""
        return reordered(self.original, self.axes)

    @property
    def cropped(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    def spacing(self, original: Sequence[float]) -> tuple[float, ...]:
        """The size of a preprocessed voxel, from that of the picture's own."""
        oriented = reordered(tuple(original), self.axes)
        sides = zip(oriented, self.oriented, self.resampled, self.cropped, self.final, strict=True)
        return tuple(old * n / resampled * cropped / final for old, n, resampled, cropped, final in sides)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Undo:
        box = tuple((int(start), int(stop)) for start, stop in facts["box"])
        axes = tuple(facts.get("axes", ()))
        return cls(tuple(facts["original"]), tuple(facts["resampled"]), box, tuple(facts["final"]), axes)


def forward(picture: ImageArray, how: Preprocess) -> tuple[NDArray[np.float32], Undo]:
    """A picture (channels, *spatial) as the float32 array that training sees, and how to go back."""
    stored = picture.array.shape[1:]
    axes = axes_between(orientation(picture), how.orientation)
    spacing = reordered(picture.spacing, axes)
    picture = replace(picture, array=turned(picture.array, axes), spacing=spacing) if axes else picture
    original = picture.array.shape[1:]
    plane = bool(how.slices and how.size)  # the number of slices stays as it is
    for key, values in (("size", ((0,) if plane else ()) + how.size), ("spacing", how.spacing)):
        if values and len(values) != len(original):
            raise StudyError(f"[preprocess] {key} has {len(values)} numbers; the images have {len(original)} axes.")
    resampled = _resampled_shape(picture, how.spacing)
    array = _resize(picture.array.astype(np.float32), resampled)
    box = _box_of(array, how.crop)
    array = array[(slice(None), *(slice(start, stop) for start, stop in box))]
    array = _normalise(array, how, picture.array.dtype)
    for step in how.steps:
        array = _own_step(step, array, picture.spacing)
    final = (array.shape[1], *how.size) if plane else how.size or array.shape[1:]
    undo = Undo(stored, resampled, box, final, axes)
    return np.ascontiguousarray(_resize(array, final), dtype=np.float32), undo


def forward_mask(mask: ImageArray, undo: Undo) -> NDArray[np.uint8]:
    """A mask (*spatial) on the grid of its preprocessed image; nearest neighbour, so labels never blend."""
    if mask.array.shape != undo.original:
        found, wanted = shape_text(mask.array.shape), shape_text(undo.original)
        raise ImageError(mask.origin_file, f"is {found} but its image is {wanted}; give masks the image's size.")
    array = _nearest(turned(mask.array, undo.axes), undo.resampled)
    array = array[tuple(slice(start, stop) for start, stop in undo.box)]
    return np.ascontiguousarray(_nearest(array, undo.final), dtype=np.uint8)


def fingerprint(how: Preprocess) -> str:
    """The same for the same settings and the same code, on every machine."""
    code = {"code": code_hashes(how.steps)} if how.steps else {}
    text = json.dumps({"version": VERSION, "margin": MARGIN, **told(asdict(how)), **code}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without keys that 0.1 did not have and whose values say what it did: its studies keep their hashes."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    return {key: value for key, value in plain.items() if key not in _SINCE_0_1 or value != _SINCE_0_1[key]}


def shape_text(shape: Sequence[float]) -> str:
    """A shape as a person writes it: 384×384."""
    return "×".join(f"{side:g}" for side in shape)


def rounded(values: Sequence[float]) -> tuple[float, ...]:
    """To four digits, as spacings are told and compared."""
    return tuple(float(f"{value:.4g}") for value in values)


def _own_step(name: str, array: NDArray[np.float32], spacing: Sequence[float]) -> NDArray[np.float32]:
    changed = np.asarray(load(name, "preprocess")(array, tuple(spacing)), dtype=np.float32)
    if changed.shape != array.shape:
        found, wanted = shape_text(changed.shape), shape_text(array.shape)
        raise StudyError(f"[preprocess] steps: {name} gives {found}, and its image is {wanted}; keep the shape.")
    return changed


def _numbers(key: str, values: object, whole: bool = False) -> tuple[float, ...]:
    kinds = (int,) if whole else (int, float)
    good = isinstance(values, list | tuple) and all(
        isinstance(v, kinds) and not isinstance(v, bool) and math.isfinite(v) for v in values
    )
    if not good:
        raise StudyError(f"[preprocess] {key} is {values!r}; give a list of {'whole ' if whole else ''}numbers.")
    assert isinstance(values, list | tuple)
    return tuple(int(v) if whole else float(v) for v in values)


def _resampled_shape(picture: ImageArray, spacing: tuple[float, ...]) -> tuple[int, ...]:
    """The grid's outer edges stay where they are, so the last voxel's size is the spacing only up to rounding."""
    shape = picture.array.shape[1:]
    if not spacing:
        return shape
    if picture.geometry is None:
        sentence = "does not say its spacing; leave [preprocess] spacing out, or store it as NIfTI, mha or nrrd."
        raise ImageError(picture.origin_file, sentence)
    if min(picture.spacing) <= 0:
        raise ImageError(picture.origin_file, f"has a spacing of {picture.spacing} mm; correct its header.")
    return tuple(max(1, round(n * old / new)) for n, old, new in zip(shape, picture.spacing, spacing, strict=True))


def _box_of(array: NDArray[np.float32], crop: str) -> tuple[tuple[int, int], ...]:
    """The bounding box of what is above the minimum, or above 0, in any channel; everything, if nothing is."""
    if crop == "none":
        return tuple((0, side) for side in array.shape[1:])
    margin = 0 if crop == "positive" else MARGIN
    lowest: Any = 0.0 if crop == "positive" else array.min(axis=tuple(range(1, array.ndim)), keepdims=True)
    above: NDArray[np.bool_] = (array > lowest).any(axis=0)
    box = []
    for axis, side in enumerate(above.shape):
        hit = np.flatnonzero(above.any(axis=tuple(a for a in range(above.ndim) if a != axis)))
        first, last = (int(hit[0]), int(hit[-1])) if hit.size else (0, side - 1)
        box.append((max(0, first - margin), min(side, last + 1 + margin)))
    return tuple(box)


def _normalise(array: NDArray[np.float32], how: Preprocess, stored: np.dtype[Any]) -> NDArray[np.float32]:
    """Clips and scales (channels, *spatial); a constant image becomes the lowest value, never a division by zero."""
    clipped = how.window or how.percentiles
    scaled_by_range = how.normalise in ("unit", "signed")
    low, high = _range(array, how, stored) if clipped or scaled_by_range else (0.0, 0.0)
    if clipped:
        array = np.clip(array, low, high)
    if how.normalise == "none":
        return array
    if how.normalise == "zscore":
        axes = tuple(range(1, array.ndim))
        middle = array.mean(axis=axes, keepdims=True, dtype=np.float64)
        width = array.std(axis=axes, keepdims=True, dtype=np.float64)
        varies = width > 1e-7 * np.abs(middle)  # below it the spread is rounding
        return _scaled(array, middle, varies, width)
    varies = high > low
    return _scaled(array, low, varies, high - low, signed=how.normalise == "signed")


def _scaled(array: NDArray[np.float32], low: Any, varies: Any, width: Any, signed: bool = False) -> NDArray[np.float32]:
    """(array - low) / width in 64 bits, step by step in one place: every temporary copy would be two volumes."""
    values: NDArray[np.float64] = np.subtract(array, low, dtype=np.float64)
    values *= varies
    values /= np.where(varies, width, 1)
    if signed:
        values *= 2
        values -= 1
    return values.astype(np.float32)


def _range(array: NDArray[np.float32], how: Preprocess, stored: np.dtype[Any]) -> tuple[Any, Any]:
    """What becomes 0 and 1: the window, the percentiles per channel, the type's range, or the case's own."""
    if how.window:
        return how.window[0], how.window[1]
    if how.percentiles:
        lines = array.reshape(len(array), -1)
        shape = (len(array), *(1,) * (array.ndim - 1))
        low, high = np.percentile(lines, how.percentiles, axis=1).astype(np.float32)
        return low.reshape(shape), high.reshape(shape)
    if stored in (np.uint8, np.uint16):
        return 0.0, float(np.iinfo(stored).max)
    return float(array.min()), float(array.max())


def by_type(how: Preprocess) -> bool:
    """Whether intensities are scaled by the number type of a file, or by a case's own range."""
    return how.normalise in ("unit", "signed") and not how.window and not how.percentiles


def _nearest(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The value of the voxel whose cell holds the centre of the new one, on the last axes; whole-number arithmetic."""
    lead = array.ndim - len(shape)
    for axis, new in enumerate(shape, start=lead):
        old = array.shape[axis]
        if new != old:
            array = np.take(array, (2 * np.arange(new) + 1) * old // (2 * new), axis=axis)
    return array


def _resize(array: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Linear interpolation on the last axes; where an axis shrinks, the triangle widens so that nothing aliases."""
    lead = array.ndim - len(shape)
    for axis, new in enumerate(shape, start=lead):
        old = array.shape[axis]
        if new != old:
            moved = np.moveaxis(array, axis, 0)
            lines = _triangles(old, new) @ moved.reshape(old, -1)
            array = np.moveaxis(lines.reshape(new, *moved.shape[1:]), 0, axis)
    return array


@lru_cache(maxsize=64)
def _triangles(old: int, new: int) -> Any:
    """The sparse matrix (new, old) whose rows are triangles of unit sum, centred where the new voxels lie."""
    from scipy.sparse import csr_array

    scale = old / new
    reach = max(1.0, scale)
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum(0, np.floor(centre - reach).astype(int))
    columns = first[:, None] + np.arange(math.ceil(2 * reach) + 2)
    weight = np.maximum(0.0, 1 - np.abs(columns + 0.5 - centre[:, None]) / reach) * (columns < old)
    weight /= weight.sum(axis=1, keepdims=True)
    rows = np.broadcast_to(np.arange(new)[:, None], columns.shape)
    used = weight > 0
    return csr_array((weight[used].astype(np.float32), (rows[used], columns[used])), shape=(new, old))
