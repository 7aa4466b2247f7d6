"""Augmentation: seeded by case, the same for image and mask, in two and three dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from consilium.errors import StudyError
from consilium.learning.augment import AUGMENTATIONS, augment, check

SHAPES = {2: (12, 16), 3: (6, 8, 10)}


def case(dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """An image whose first channel is its mask times ten, so that they can be compared after any movement."""
    rng = np.random.default_rng(dimensions)
    mask = np.zeros(SHAPES[dimensions], np.uint8)
    mask[tuple(slice(1, side // 2) for side in mask.shape)] = 1
    mask[tuple(slice(2, 4) for _ in mask.shape)] = 3
    image = np.stack([mask * 10.0, rng.normal(size=mask.shape)]).astype(np.float32)
    return image, mask


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_works_and_is_reproducible(name: str, dimensions: int) -> None:
    image, mask = case(dimensions)
    before = image.copy()
    changed = 0
    for seed in range(8):
        new_image, new_mask, _ = augment(image, mask, (name,), seed)
        again_image, again_mask, _ = augment(image, mask, (name,), seed)
        assert new_mask is not None and again_mask is not None
        assert new_image.shape == image.shape and new_image.dtype == np.float32
        assert new_mask.shape == mask.shape and new_mask.dtype == np.uint8
        assert set(np.unique(new_mask)) <= {0, 1, 3}  # no label is invented between two others
        np.testing.assert_array_equal(new_image, again_image)
        np.testing.assert_array_equal(new_mask, again_mask)
        changed += not np.array_equal(new_image, image)
    assert changed > 0
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_image_and_mask_flip_the_same_way(dimensions: int) -> None:
    image, mask = case(dimensions)
    flips = set()
    for seed in range(20):
        new_image, new_mask, _ = augment(image, mask, ("flip",), seed)
        assert new_mask is not None
        np.testing.assert_array_equal(new_image[0], new_mask * 10.0)
        flips.add(new_mask.tobytes())
    assert len(flips) == 2**dimensions  # every axis alone, and all of them together


def test_in_the_plane_slices_keep_their_place() -> None:
    """Flips and quarter turns in rows and columns alone; a plane that is not square is turned by half."""
    mask = np.zeros((3, 6, 6), np.uint8)
    mask[0, 0, 1] = 1
    image = (mask * 10.0)[None].astype(np.float32)
    seen: dict[str, set[tuple[int, ...]]] = {"flip-plane": set(), "turn": set()}
    for name, places in seen.items():
        for seed in range(24):
            new_image, new_mask, _ = augment(image, mask, (name,), seed)
            assert new_mask is not None
            np.testing.assert_array_equal(new_image[0], new_mask * 10.0)
            (place,) = np.argwhere(new_mask)
            places.add(tuple(map(int, place)))
    assert seen["flip-plane"] == {(0, 0, 1), (0, 5, 1), (0, 0, 4), (0, 5, 4)}
    assert seen["turn"] == {(0, 0, 1), (0, 4, 0), (0, 5, 4), (0, 1, 5)}
    narrow = {augment(image[..., :4], mask[..., :4], ("turn",), seed)[1].tobytes() for seed in range(12)}  # type: ignore[union-attr]
    assert narrow == {mask[..., :4].tobytes(), mask[:, ::-1, 3::-1].tobytes()}


def test_cutout_hides_boxes_of_the_image_and_keeps_the_labels() -> None:
    mask = np.ones((16, 16), np.uint8)
    image = np.random.default_rng(0).uniform(1, 2, (1, 16, 16)).astype(np.float32)
    shares = []
    for seed in range(20):
        new_image, new_mask, _ = augment(image, mask, ("cutout",), seed)
        np.testing.assert_array_equal(new_mask, mask)
        hidden = new_image != image
        assert (new_image[hidden] == image.min()).all()
        shares.append(hidden.mean())
    assert 0 in shares and 0 < max(shares) < 0.25


@pytest.mark.parametrize("name", ["rotate", "scale", "affine", "distort"])
def test_image_and_mask_move_together(name: str) -> None:
    """Inside a structure, away from its border, the moved image is the moved mask."""
    mask = np.zeros((32, 32), np.uint8)
    mask[6:20, 8:26] = 1
    image = (mask * 10.0)[None].astype(np.float32)
    for seed in range(6):
        new_image, new_mask, _ = augment(image, mask, (name,), seed)
        assert new_mask is not None
        agree = (new_image[0] > 5) == (new_mask == 1)
        assert agree.mean() > 0.97


@pytest.mark.parametrize("name", ["brightness", "noise"])
def test_intensities_leave_the_mask_alone(name: str) -> None:
    image, mask = case(2)
    for seed in range(6):
        np.testing.assert_array_equal(augment(image, mask, (name,), seed)[1], mask)


def test_the_case_before_does_not_matter() -> None:
    image, mask = case(2)
    names = ("flip", "rotate", "brightness", "noise")
    first, _, _ = augment(image, mask, names, 7)
    augment(image, mask, names, 8)
    again, _, _ = augment(image, mask, names, 7)
    np.testing.assert_array_equal(first, again)


def test_a_classification_case_has_no_mask() -> None:
    image, _ = case(2)
    changed, mask, _ = augment(image, None, tuple(AUGMENTATIONS), 3)
    assert mask is None
    assert changed.shape == image.shape


def test_large_seeds_are_taken() -> None:
    image, mask = case(2)
    assert augment(image, mask, ("flip",), 2**63 - 1)[0].shape == image.shape


def test_nothing_named_changes_nothing() -> None:
    image, mask = case(2)
    assert augment(image, mask, (), 1) == (image, mask, None)


def test_an_unknown_name_is_said() -> None:
    with pytest.raises(StudyError, match="no 'blur'; choose from flip, flip-plane, rotate, turn"):
        check(["flip", "blur"])


def test_a_strength_multiplies_what_is_done() -> None:
    image = np.random.default_rng(0).random((1, 8, 8)).astype(np.float32)
    for seed in range(8):
        weak, strong = (augment(image, None, (name,), seed)[0] - image for name in ("noise", "noise*2"))
        np.testing.assert_allclose(strong, 2 * weak, atol=1e-6)
    flipped = [augment(image, None, ("flip*2",), seed)[0] for seed in range(4)]  # each axis with probability 1
    assert all(np.array_equal(one, image[:, ::-1, ::-1]) for one in flipped)


@pytest.mark.parametrize("name", ["noise*", "noise*0", "noise*x", "noise*11"])
def test_a_strength_is_a_number(name: str) -> None:
    with pytest.raises(StudyError, match=r"noise\*0.5"):
        check([name])
