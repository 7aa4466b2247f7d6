"""A site's cases as batches: all once per epoch, in an order that depends on the seed only, whole or in patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilium.batch import Batch
from consilium.data.cache import open_site
from consilium.data.cases import Cases, _patch
from consilium.data.preprocess import Preprocess
from consilium.data.site_folder import read_federation
from consilium.learning.augment import augment


@pytest.fixture(scope="module")
def arrays(federation: Path) -> dict[str, Any]:
    found = read_federation(federation)
    return {name: open_site(found, site, Preprocess()) for name, site in found.sites.items()}


def names(batches: Sequence[Batch]) -> list[str]:
    return [case for batch in batches for case in batch.cases]


@pytest.mark.parametrize("size", [1, 3, 5, 12, 100])
def test_an_epoch_covers_every_case_once(size: int, arrays: dict[str, Any]) -> None:
    cases = Cases((arrays["bea"],))
    batches = list(cases.batches(size, epoch=0, seed=1))
    assert sorted(names(batches)) == sorted(cases.cases("train"))
    assert len(batches) == -(-12 // size)
    lengths = [len(batch.cases) for batch in batches]
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1  # no batch of one left over


def test_the_order_depends_on_the_seed_and_the_epoch_only(arrays: dict[str, Any]) -> None:
    cases = Cases((arrays["bea"],))
    orders = {key: names(list(cases.batches(4, *key))) for key in ((0, 1), (1, 1), (0, 2))}
    assert names(list(cases.batches(4, 0, 1))) == orders[0, 1]
    assert names(list(cases.batches(7, 0, 1))) == orders[0, 1]  # the batch size cuts, it does not shuffle
    assert len({tuple(order) for order in orders.values()}) == 3


def test_pooled_sites_make_as_many_steps_as_apart(arrays: dict[str, Any]) -> None:
    """8, 12 and 10 cases in batches of 4: 2 + 3 + 3 = 8 steps over 30 cases."""
    pooled = Cases(tuple(arrays.values()))
    batches = list(pooled.batches(4, 0, 0))
    assert len(batches) == 8
    assert len(set(names(batches))) == len(pooled) == 30
    assert any(len({case[:3] for case in batch.cases}) > 1 for batch in batches)  # sites are mixed


def test_whole_cases_come_in_table_order_unchanged(arrays: dict[str, Any]) -> None:
    cases = Cases((arrays["ada"],), augmentations=("flip", "noise"), patch=(8, 8))
    batches = list(cases.whole("valid", 2))
    assert names(batches) == ["ada008", "ada009", "ada010"]
    assert [tuple(batch.images.shape) for batch in batches] == [(2, 1, 16, 16), (1, 1, 16, 16)]
    np.testing.assert_array_equal(batches[0].images[0].numpy(), arrays["ada"].image(8))


def test_augmentation_is_seeded_by_case(arrays: dict[str, Any]) -> None:
    """A case looks the same in a batch of any size, and another way in the next epoch."""
    cases = Cases((arrays["bea"],), augmentations=("noise", "flip"))

    def pictures(size: int, epoch: int) -> dict[str, bytes]:
        batches = cases.batches(size, epoch, 5)
        return {case: batch.images[i].numpy().tobytes() for batch in batches for i, case in enumerate(batch.cases)}

    assert pictures(3, 0) == pictures(5, 0)
    assert pictures(3, 0) != pictures(3, 1)


# ------------------------------------------------------------------------------------------------ patches


def test_patches_have_the_size_asked_for(arrays: dict[str, Any]) -> None:
    for batch in Cases((arrays["bea"],), patch=(8, 12)).batches(4, 0, 0):
        assert tuple(batch.images.shape[1:]) == (1, 8, 12)
        assert tuple(batch.truth.shape[1:]) == (8, 12)


def test_image_and_mask_are_cut_at_the_same_place() -> None:
    image = np.arange(400, dtype=np.float32).reshape(1, 20, 20)
    mask = (np.arange(400) % 251).astype(np.uint8).reshape(20, 20)
    for seed in range(10):
        cut, truth, _ = _patch(image, mask, None, (5, 7), np.random.default_rng(seed))
        assert truth is not None
        np.testing.assert_array_equal(cut[0] % 251, truth)


@pytest.mark.parametrize("shape", [(20, 20), (12, 14, 16)])
def test_every_second_patch_is_around_a_label(shape: tuple[int, ...]) -> None:
    """One labelled voxel: it is in the middle of about half of the patches."""
    image = np.zeros((1, *shape), np.float32)
    mask = np.zeros(shape, np.uint8)
    mask[tuple(side // 2 for side in shape)] = 1
    size = (4,) * len(shape)
    hits = 0
    for seed in range(200):
        _, truth, _ = _patch(image, mask, None, size, np.random.default_rng(seed))
        assert truth is not None
        hits += bool(truth[(2,) * len(shape)])
    assert 80 < hits < 125  # 200 · 1/2, and a few by chance


def test_patches_may_lie_where_the_image_is_bright() -> None:
    """One bright voxel and another one labelled: patches go to the bright one, and a hidden organ is not starved."""
    image, mask = np.full((1, 20, 20), -1.0, np.float32), np.zeros((20, 20), np.uint8)
    image[0, 5, 5], mask[14, 14] = 0.5, 1
    bright = labelled = 0
    for seed in range(100):
        cut, truth, _ = _patch(image, mask, None, (4, 4), np.random.default_rng(seed), around=0.0)
        assert truth is not None
        bright, labelled = bright + bool(cut[0, 2, 2] > 0), labelled + bool(truth[2, 2])
    assert 35 < bright < 65 and labelled < 5
    dark = _patch(np.full_like(image, -1.0), mask, None, (4, 4), np.random.default_rng(0), around=0.0)
    assert dark[0].shape == (1, 4, 4)  # nothing is bright: anywhere


def test_small_cases_are_padded_at_both_ends() -> None:
    image = np.full((2, 3, 10), 5.0, np.float32)
    mask = np.ones((3, 10), np.uint8)
    cut, truth, _ = _patch(image, mask, None, (8, 6), np.random.default_rng(0))
    assert truth is not None
    assert cut.shape == (2, 8, 6)
    assert truth.shape == (8, 6)
    assert cut.min() == 5.0  # the image's edge is repeated
    assert truth.sum(0).tolist() == [3] * 6  # the padding has no label
    assert truth[:2].sum() == 0 and truth[5:].sum() == 0


def test_a_patch_of_a_case_without_labels() -> None:
    cut, truth, _ = _patch(
        np.zeros((1, 9, 9), np.float32), np.zeros((9, 9), np.uint8), None, (4, 4), np.random.default_rng(1)
    )
    assert cut.shape == (1, 4, 4)
    assert truth is not None and truth.shape == (4, 4)
    cut, truth, _ = _patch(np.zeros((1, 9, 9), np.float32), None, None, (4, 4), np.random.default_rng(1))
    assert truth is None


def test_maps_are_cut_and_turned_with_their_image() -> None:
    """What stands beside an image is taken from the same window and turned the same way."""
    image = np.arange(81, dtype=np.float32).reshape(1, 9, 9)
    maps = np.concatenate([image, -image]).astype(np.float16)
    for seed in range(5):
        cut, _, beside = _patch(image, None, maps, (4, 6), np.random.default_rng(seed))
        turned, _, moved = augment(cut, None, ("flip",), seed, beside)
        assert moved is not None and moved.dtype == np.float16
        np.testing.assert_array_equal(moved, np.concatenate([turned, -turned]))
