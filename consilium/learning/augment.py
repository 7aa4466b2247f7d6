"""Augmentation by MONAI transforms, seeded by site, round and case so that a resumed run sees the same images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.errors import StudyError

Array = NDArray[Any]


def _flip(dimensions: int) -> list[Any]:
    from monai.transforms import RandFlipd

    return [RandFlipd(("image", "truth"), prob=0.5, spatial_axis=axis) for axis in range(dimensions)]


def _rotate(dimensions: int) -> list[Any]:
    from monai.transforms import RandAffined

    angle = 0.26 if dimensions == 2 else (0.26,) * 3  # 15 degrees
    return [
        RandAffined(
            ("image", "truth"), prob=0.5, rotate_range=angle, mode=("bilinear", "nearest"), padding_mode="border"
        )
    ]


def _scale(dimensions: int) -> list[Any]:
    from monai.transforms import RandAffined

    return [
        RandAffined(
            ("image", "truth"),
            prob=0.5,
            scale_range=(0.15,) * dimensions,
            mode=("bilinear", "nearest"),
            padding_mode="border",
        )
    ]


def _brightness(dimensions: int) -> list[Any]:
    from monai.transforms import RandScaleIntensityd, RandShiftIntensityd

    return [RandScaleIntensityd("image", factors=0.15, prob=0.5), RandShiftIntensityd("image", offsets=0.1, prob=0.5)]


def _noise(dimensions: int) -> list[Any]:
    from monai.transforms import RandGaussianNoised

    return [RandGaussianNoised("image", prob=0.5, std=0.03)]


AUGMENTATIONS: dict[str, Callable[[int], list[Any]]] = {
    "flip": _flip,
    "rotate": _rotate,
    "scale": _scale,
    "brightness": _brightness,
    "noise": _noise,
}


def check(names: Sequence[str]) -> None:
    for name in names:
        if name not in AUGMENTATIONS:
            raise StudyError(f"[task] augment: there is no '{name}'; choose from {', '.join(AUGMENTATIONS)}.")


@lru_cache(maxsize=4)
def _compose(names: tuple[str, ...], dimensions: int) -> Any:
    from monai.transforms import Compose

    return Compose([transform for name in names for transform in AUGMENTATIONS[name](dimensions)])


def augment(
    image: Array, truth: Array | None, names: Sequence[str], seed: int, maps: Array | None = None
) -> tuple[Array, Array | None, Array | None]:
    """One case changed at random: image (channels, *spatial), truth (*spatial) or None for classification.

    `maps` (maps, *spatial) are turned as the truth is, each voxel taking the value of its nearest.
    """
    if not names:
        return image, truth, maps
    compose = _compose(tuple(names), image.ndim - 1)
    compose.set_random_state(seed=seed % 2**32)
    # a classification case has no mask; the transforms want one, so the image stands in for it
    mask = image[:1] if truth is None else truth[None]
    if maps is not None:
        mask = np.concatenate([mask.astype(np.float32), maps.astype(np.float32)])
    changed = compose({"image": np.array(image), "truth": np.array(mask)})
    return (
        np.asarray(changed["image"], dtype=np.float32),
        None if truth is None else np.asarray(changed["truth"][0]).astype(truth.dtype),
        None if maps is None else np.asarray(changed["truth"][1:]).astype(maps.dtype),
    )
