"""Augmentation by MONAI transforms, seeded by site, round and case so that a resumed run sees the same images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.errors import StudyError
from consilium.extensions import is_code, load

Array = NDArray[Any]


def _flip(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandFlipd

    chance = min(1.0, 0.5 * strength)
    return [RandFlipd(("image", "truth"), prob=chance, spatial_axis=axis) for axis in range(dimensions)]


def _flip_plane(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandFlipd

    chance = min(1.0, 0.5 * strength)
    return [RandFlipd(("image", "truth"), prob=chance, spatial_axis=axis) for axis in (-2, -1)]


def _turn(dimensions: int, strength: float) -> list[Any]:
    """Rotate by 90, 180 or 270 degrees in the plane of rows and columns; by 180 if these differ in length."""
    from monai.transforms import Randomizable, Rotate90d

    class Turn(Randomizable):  # type: ignore[misc]
        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            quarters, used = int(self.R.randint(1, 4)), bool(self.R.rand() < 0.5 * strength)
            rows, columns = data["image"].shape[-2:]
            if not used:
                return data
            quarters = quarters if rows == columns else 2
            turned: dict[str, Any] = Rotate90d(("image", "truth"), k=quarters, spatial_axes=(-2, -1))(data)
            return turned

    return [Turn()]


def _affine(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandAffined

    turn = 0.26 * strength
    return [
        RandAffined(
            ("image", "truth"),
            prob=0.5,
            rotate_range=turn if dimensions == 2 else (turn,) * 3,
            scale_range=(0.15 * strength,) * dimensions,
            translate_range=(4 * strength,) * dimensions,
            mode=("bilinear", "nearest"),
            padding_mode="border",
        )
    ]


def _distort(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandGridDistortiond

    return [
        RandGridDistortiond(
            ("image", "truth"),
            num_cells=5,
            prob=0.5,
            distort_limit=min(0.9, 0.03 * strength),
            mode=("bilinear", "nearest"),
            padding_mode="border",
        )
    ]


def _cutout(dimensions: int, strength: float) -> list[Any]:
    """Fill boxes of an eighth to a quarter of the sides with the darkest value; labels stay."""
    from monai.transforms import RandCoarseDropout, Randomizable

    class Cutout(Randomizable):  # type: ignore[misc]
        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            image = data["image"]
            seed, used = int(self.R.randint(2**31)), bool(self.R.rand() < 0.5 * strength)
            if not used:
                return data
            small = [max(1, side // 8) for side in image.shape[1:]]
            large = [max(1, side // 4) for side in image.shape[1:]]
            drop = RandCoarseDropout(
                holes=1,
                max_holes=4,
                spatial_size=small,
                max_spatial_size=large,
                fill_value=float(image.min()),
                prob=1.0,
            )
            drop.set_random_state(seed=seed)
            return {**data, "image": drop(image)}

    return [Cutout()]


def _rotate(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandAffined

    turn = 0.26 * strength  # 15 degrees
    angle = turn if dimensions == 2 else (turn,) * 3
    return [
        RandAffined(
            ("image", "truth"), prob=0.5, rotate_range=angle, mode=("bilinear", "nearest"), padding_mode="border"
        )
    ]


def _scale(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandAffined

    return [
        RandAffined(
            ("image", "truth"),
            prob=0.5,
            scale_range=(min(0.15 * strength, 0.9),) * dimensions,
            mode=("bilinear", "nearest"),
            padding_mode="border",
        )
    ]


def _brightness(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandScaleIntensityd, RandShiftIntensityd

    return [
        RandScaleIntensityd("image", factors=0.15 * strength, prob=0.5),
        RandShiftIntensityd("image", offsets=0.1 * strength, prob=0.5),
    ]


def _noise(dimensions: int, strength: float) -> list[Any]:
    from monai.transforms import RandGaussianNoised

    return [RandGaussianNoised("image", prob=0.5, std=0.03 * strength)]


AUGMENTATIONS: dict[str, Callable[[int, float], list[Any]]] = {
    "flip": _flip,
    "flip-plane": _flip_plane,
    "rotate": _rotate,
    "turn": _turn,
    "scale": _scale,
    "affine": _affine,
    "distort": _distort,
    "cutout": _cutout,
    "brightness": _brightness,
    "noise": _noise,
}


def check(names: Sequence[str]) -> None:
    """Reject unknown names (StudyError). A strength follows a star: "rotate*2" rotates twice as far as "rotate"."""
    for text in names:
        if is_code(text):
            continue
        name, strength = _parted(text)
        if name not in AUGMENTATIONS:
            choices = ", ".join(AUGMENTATIONS)
            raise StudyError(f"[task] augment: there is no '{name}'; choose from {choices}, or write file.py:name.")
        if not 0 < strength <= 10:
            raise StudyError(
                f"[task] augment: '{text}' has no strength above 0 and up to 10; write it as '{name}*0.5'."
            )


def _parted(text: str) -> tuple[str, float]:
    """Name and strength; 1 if none is given, -1 if it is not a number."""
    name, star, strength = text.partition("*")
    try:
        return name.strip(), float(strength) if star else 1.0
    except ValueError:
        return name.strip(), -1.0


@lru_cache(maxsize=4)
def _compose(names: tuple[str, ...], dimensions: int) -> Any:
    from monai.transforms import Compose

    return Compose([part for name in names for part in (_own(name) if is_code(name) else _known(name, dimensions))])


def _known(text: str, dimensions: int) -> list[Any]:
    name, strength = _parted(text)
    return AUGMENTATIONS[name](dimensions, strength)


def _own(name: str) -> list[Any]:
    """A user's own function as a transform with MONAI's random state."""
    from monai.transforms import Randomizable

    change = load(name, "task")

    class OwnTransform(Randomizable):  # type: ignore[misc]
        def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
            image, truth = change(data["image"], data["truth"], self.R)
            if np.shape(image) != np.shape(data["image"]) or np.shape(truth) != np.shape(data["truth"]):
                raise StudyError(f"[task] augment: {name} changes the shape of an image or its mask; keep it.")
            return {**data, "image": image, "truth": truth}

    return [OwnTransform()]


def augment(
    image: Array, truth: Array | None, names: Sequence[str], seed: int, maps: Array | None = None
) -> tuple[Array, Array | None, Array | None]:
    """One case changed at random: image (channels, *spatial), truth (*spatial) or None for classification.

    `maps` (maps, *spatial) are transformed like the truth, with nearest-neighbour interpolation.
    """
    if not names:
        return image, truth, maps
    compose = _compose(tuple(names), image.ndim - 1)
    compose.set_random_state(seed=seed % 2**32)
    # a classification case has no mask; the transforms need one, so they get the image
    mask = image[:1] if truth is None else truth[None]
    if maps is not None:
        mask = np.concatenate([mask.astype(np.float32), maps.astype(np.float32)])
    changed = compose({"image": np.array(image), "truth": np.array(mask)})
    return (
        np.asarray(changed["image"], dtype=np.float32),
        None if truth is None else np.asarray(changed["truth"][0]).astype(truth.dtype),
        None if maps is None else np.asarray(changed["truth"][1:]).astype(maps.dtype),
    )
