"""What is remembered of one case that was read: numbers from which a federation is judged, compared and drawn."""

from __future__ import annotations

import hashlib
from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.alike import perceptual_hash, thumbnail
from consilium.data.dicom import dicom_files
from consilium.data.dicom_names import personal_elements
from consilium.data.formats import ItkGeometry, NiftiGeometry
from consilium.data.images import ImageArray, holds_dicom, orientation
from consilium.data.orientation import affine_of

QUANTILES = 33  # of an image's values, from the least to the greatest, evenly apart
SAMPLE = 100_000  # voxels that quantiles are taken from
SPECK = 1e-3  # of a label's voxels: smaller islands are specks


@dataclass(frozen=True)
class LabelFacts:
    """One label in one mask."""

    voxels: int
    islands: int  # connected parts
    specks: int  # of these, parts below a thousandth of the label
    right: float | None  # -0.5 (far left) to 0.5 (far right) of the volume; None where the file does not say


@dataclass(frozen=True)
class CaseFacts:
    """One sound case. It holds no name of a file or a patient, and can be written as JSON."""

    digest: str  # of the stored values
    hash: int  # perceptual, 64 bits
    small: str  # the thumbnail, one byte per number, as text
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    sized: bool  # the file says its spacing
    orientation: str
    type: str
    quantiles: tuple[float, ...]
    inside: tuple[float, ...]  # quantiles 0.5, 50, 99.5 %, mean and standard deviation where a label is; () if nowhere
    grey: bool  # several channels, all the same
    labels: Mapping[int, LabelFacts]  # by mask value, the background left out
    mask_digest: str  # "" without a mask
    border: float  # share of the mask's outermost voxels that carry a label
    placed: bool  # image and mask say they lie at the same place
    personal: tuple[str, ...]  # elements of a DICOM header that hold something about a person

    @property
    def lowest(self) -> float:
        return self.quantiles[0]

    @property
    def highest(self) -> float:
        return self.quantiles[-1]

    @property
    def size(self) -> int:
        """Voxels."""
        return int(np.prod(self.shape))

    def thumbnail(self) -> NDArray[np.float32]:
        small = np.frombuffer(b85decode(self.small), dtype=np.int8).astype(np.float32)
        length = float(np.linalg.norm(small))
        return small / length if length else small

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> CaseFacts:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
        }
        values["labels"] = {int(value): LabelFacts(**found) for value, found in facts["labels"].items()}
        return cls(**values)


def facts_of(image: ImageArray, mask: ImageArray | None, values: Sequence[int]) -> CaseFacts:
    """The facts of an image and its mask, both as read; `values` are those in the mask."""
    small = thumbnail(image.array)
    array = image.array
    labels = {} if mask is None else {v: _label_facts(mask, v, image) for v in values if v != 0}
    return CaseFacts(
        digest=_digest(array),
        hash=perceptual_hash(small),
        small=b85encode(_as_bytes(small)).decode(),
        shape=tuple(array.shape[1:]),
        spacing=tuple(float(step) for step in image.spacing),
        sized=image.geometry is not None,
        orientation=orientation(image),
        type=str(array.dtype),
        quantiles=_quantiles(array),
        inside=() if mask is None else _inside(array, mask.array),
        grey=len(array) > 1 and all(np.array_equal(array[0], other) for other in array[1:]),
        labels=labels,
        mask_digest="" if mask is None else _digest(mask.array),
        border=0.0 if mask is None else _border(mask.array),
        placed=mask is None or _same_place(image, mask),
        personal=_personal(image),
    )


def _digest(array: NDArray[Any]) -> str:
    """The same for the same numbers, however they are stored."""
    whole = array.astype(np.float64) if array.dtype.kind == "f" else array.astype(np.int64)
    return hashlib.sha256(f"{whole.dtype.kind}{array.shape}".encode() + whole.tobytes()).hexdigest()[:32]


def _as_bytes(small: NDArray[np.float32]) -> bytes:
    top = float(np.abs(small).max())
    numbers: NDArray[np.int8] = np.rint(small * (127 / top if top else 0)).astype(np.int8)
    return numbers.tobytes()


def _quantiles(array: NDArray[Any]) -> tuple[float, ...]:
    values = _sample(array.ravel())
    found = np.quantile(values.astype(np.float64), np.linspace(0, 1, QUANTILES))
    found[0], found[-1] = float(array.min()), float(array.max())
    return tuple(float(f"{value:.6g}") for value in found)


def _inside(array: NDArray[Any], mask: NDArray[Any]) -> tuple[float, ...]:
    if mask.shape != array.shape[1:] or not mask.any():
        return ()
    values = _sample(array[:, mask > 0].ravel()).astype(np.float64)
    found = (*np.percentile(values, (0.5, 50, 99.5)), values.mean(), values.std())
    return tuple(float(f"{value:.6g}") for value in found)


def _sample(values: NDArray[Any]) -> NDArray[Any]:
    """Evenly spread; an odd step does not fall in with the rows of a picture."""
    step = -(-len(values) // SAMPLE)
    return values[:: step | 1]


def _label_facts(mask: ImageArray, value: int, image: ImageArray) -> LabelFacts:
    from scipy.ndimage import find_objects, label

    found: NDArray[np.bool_] = mask.array == value
    (box,) = find_objects(found.astype(np.uint8))
    inside = found[box]
    parts, islands = label(inside)
    sizes = np.bincount(np.ravel(parts))[1:]
    total = int(sizes.sum())
    return LabelFacts(total, int(islands), int((sizes < SPECK * total).sum()), _right(inside, box, found.shape, image))


def _right(inside: NDArray[np.bool_], box: Any, shape: Sequence[int], image: ImageArray) -> float | None:
    """Where a label's middle lies between the volume's left and right edge, as the header says the sides."""
    code = orientation(image)
    axis = next((2 - place for place, letter in enumerate(code) if letter in "LR"), None)
    if axis is None or affine_of(image.geometry) is None:
        return None
    profile = inside.sum(axis=tuple(a for a in range(inside.ndim) if a != axis))
    middle = float((np.arange(len(profile)) * profile).sum() / profile.sum()) + box[axis].start + 0.5
    share = middle / shape[axis] - 0.5
    return round(float(share if code[2 - axis] == "R" else -share), 4)


def _border(mask: NDArray[Any]) -> float:
    """Of the four edges of every slice."""
    edge = np.ones(mask.shape, dtype=bool)
    edge[..., 1:-1, 1:-1] = False
    return round(float((mask[edge] != 0).mean()), 4)


def _same_place(image: ImageArray, mask: ImageArray) -> bool:
    """Whether image and mask agree to a hundredth of a millimetre; True where one of them does not say."""
    one, two = image.geometry, mask.geometry
    if isinstance(one, NiftiGeometry) and isinstance(two, NiftiGeometry):
        return bool(np.allclose(one.affine, two.affine, rtol=0, atol=1e-2))
    if isinstance(one, ItkGeometry) and isinstance(two, ItkGeometry):
        parts = ((one.spacing, two.spacing), (one.origin, two.origin), (one.direction, two.direction))
        return all(len(a) == len(b) and np.allclose(a, b, rtol=0, atol=1e-2) for a, b in parts)
    return True


def _personal(image: ImageArray) -> tuple[str, ...]:
    """Of a series, its first file: all carry the same patient."""
    return personal_elements(dicom_files(image.origin_file)[0]) if holds_dicom(image.origin_file) else ()
