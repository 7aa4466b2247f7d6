"""What is done to images once, and that it can be undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from consilium.data.formats import ItkGeometry
from consilium.data.images import ImageArray
from consilium.data.mask_files import invert
from consilium.data.preprocess import MARGIN, Preprocess, Undo, fingerprint, forward, forward_mask
from consilium.errors import DataError, StudyError


def picture(array: NDArray[Any], spacing: tuple[float, ...] = (), file: str = "a.mha") -> ImageArray:
    """An image (channels, *spatial) that knows its spacing."""
    spacing = spacing or (1.0,) * (array.ndim - 1)
    return ImageArray(array, spacing, Path(file), ItkGeometry(spacing[::-1], (), (), ()))


def mask(array: NDArray[Any]) -> ImageArray:
    return ImageArray(array, (1.0,) * array.ndim, Path("m.mha"), None)


UNITS = [
    # stored image, settings, what training sees
    (np.array([0, 51, 255], np.uint8), Preprocess(), [0, 0.2, 1]),
    (np.array([0, 13107, 65535], np.uint16), Preprocess(), [0, 0.2, 1]),
    (np.array([-100, 0, 300], np.int16), Preprocess(), [0, 0.25, 1]),
    (np.array([2.0, 2.5, 4.0], np.float64), Preprocess(), [0, 0.25, 1]),
    (np.array([-900, 0, 300], np.int16), Preprocess(window=(-100, 300)), [0, 0.25, 1]),
    (np.array([0, 100, 255], np.uint8), Preprocess(window=(50, 150)), [0, 0.5, 1]),
    (np.array([-900, 0, 900], np.int16), Preprocess(window=(-1, 1), normalise="none"), [-1, 0, 1]),
    (np.array([3, 7, 7], np.int16), Preprocess(normalise="none"), [3, 7, 7]),
    (np.array([1, 2, 3], np.int16), Preprocess(normalise="zscore"), [-1.224745, 0, 1.224745]),
    (np.array([0.1, 0.1, 0.1], np.float32), Preprocess(normalise="zscore"), [0, 0, 0]),
    (np.array([7, 7, 7], np.int16), Preprocess(), [0, 0, 0]),
    (np.array([0, 51, 255], np.uint8), Preprocess(normalise="signed"), [-1, -0.6, 1]),
    (np.array([-900, 0, 300], np.int16), Preprocess(normalise="signed", window=(-100, 300)), [-1, -0.5, 1]),
    (np.array([7, 7, 7], np.int16), Preprocess(normalise="signed"), [-1, -1, -1]),
    (np.array([100, 200, 4095], np.uint16), Preprocess(window=(0, 4095)), [0.024420, 0.048840, 1]),
    (np.array([0, 10, 20], np.uint16), Preprocess(percentiles=(25, 75)), [0, 0.5, 1]),
    (np.array([0, 10, 20], np.int16), Preprocess(percentiles=(25, 75), normalise="none"), [5, 10, 15]),
    (np.array([0, 10, 20], np.int16), Preprocess(percentiles=(0, 50), normalise="signed"), [-1, 1, 1]),
    (np.array([7, 7, 7], np.uint8), Preprocess(percentiles=(1, 99)), [0, 0, 0]),
]


@pytest.mark.parametrize(("stored", "how", "expected"), UNITS)
def test_intensities_by_hand(stored: NDArray[Any], how: Preprocess, expected: list[float]) -> None:
    array, _ = forward(picture(stored.reshape(1, 1, 3)), how)
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert array.ravel().tolist() == pytest.approx(expected, abs=1e-6)


def test_zscore_is_per_channel() -> None:
    array, _ = forward(picture(np.array([[[0, 2]], [[10, 30]]], np.uint8)), Preprocess(normalise="zscore"))
    assert array.tolist() == [[[-1, 1]], [[-1, 1]]]


def test_percentiles_are_per_case_and_channel_and_do_not_know_the_type() -> None:
    one = np.array([[[0, 5, 10]], [[100, 300, 500]]])
    for kind in (np.uint8, np.uint16, np.int16, np.float32):
        stored = (one if kind != np.uint8 else one // 2).astype(kind)
        array, _ = forward(picture(stored), Preprocess(percentiles=(0, 100)))
        assert array.tolist() == pytest.approx(np.array([[[0, 0.5, 1]], [[0, 0.5, 1]]]), abs=0.11)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"percentiles": (99, 1)}, "from 0 to 100"),
        ({"percentiles": (1, 101)}, "from 0 to 100"),
        ({"percentiles": (1,)}, "from 0 to 100"),
        ({"percentiles": (1, 99), "window": (0, 1)}, "both window and percentiles"),
    ],
)
def test_percentiles_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError, match=words):
        Preprocess(**fields)


SIZES = [((50, 70), (20, 30)), ((20, 30), (50, 71)), ((64, 64), (64, 17)), ((9, 9), (9, 9))]


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_resizing_is_pillows_antialiased_bilinear(old: tuple[int, int], new: tuple[int, int]) -> None:
    image = np.random.default_rng(0).random((1, *old), dtype=np.float32)
    array, _ = forward(picture(image), Preprocess(size=new, normalise="none"))
    theirs = np.asarray(Image.fromarray(image[0]).resize(new[::-1], Image.Resampling.BILINEAR))
    assert np.abs(array[0] - theirs).max() < 1e-6


def test_shrinking_averages_a_checkerboard_away() -> None:
    board = (np.indices((64, 64)).sum(axis=0) % 2).astype(np.float32)[None]
    array, _ = forward(picture(board), Preprocess(size=(8, 8), normalise="none"))
    assert np.abs(array - 0.5).max() < 0.02


def test_volumes_are_resampled_to_a_spacing() -> None:
    array, undo = forward(picture(np.zeros((1, 10, 20, 20)), (3.0, 0.5, 0.5)), Preprocess(spacing=(1.5, 1, 1)))
    assert array.shape == (1, 20, 10, 10)
    assert undo == Undo((10, 20, 20), (20, 10, 10), ((0, 20), (0, 10), (0, 10)), (20, 10, 10))


def test_the_foreground_is_cropped_with_a_margin() -> None:
    image = np.full((1, 40, 50), -5, np.int16)
    image[0, 10:20, 2:30] = 7
    array, undo = forward(picture(image), Preprocess(crop="foreground"))
    assert undo.box == ((10 - MARGIN, 20 + MARGIN), (0, 30 + MARGIN))
    assert array.shape == (1, 10 + 2 * MARGIN, 30 + MARGIN)
    drawn = np.zeros((40, 50), np.uint8)
    drawn[12:15, 5:9] = 2
    back = invert(forward_mask(mask(drawn), undo), undo, nearest=True)
    assert np.array_equal(back, drawn)


def test_what_is_denser_than_water_is_cropped_without_a_margin() -> None:
    image = np.full((1, 40, 50), -1000, np.int16)
    image[0, 8:30, 1:40] = -100  # fat
    image[0, 10:20, 2:30] = 60
    array, undo = forward(picture(image), Preprocess(crop="positive", window=(-500, 500), normalise="signed"))
    assert undo.box == ((10, 20), (2, 30))
    np.testing.assert_allclose(array, 0.12)
    _, whole = forward(picture(np.full((1, 8, 8), -5, np.int16)), Preprocess(crop="positive"))
    assert whole.box == ((0, 8), (0, 8))


def test_a_constant_image_is_not_cropped_to_nothing() -> None:
    array, _ = forward(picture(np.ones((1, 8, 8), np.uint8)), Preprocess(crop="foreground"))
    assert array.shape == (1, 8, 8)


def test_all_steps_by_hand() -> None:
    """A row 0 0 40 40 resampled is 0 0 0 10 30 40 40 40, clipped and scaled 0 0 0 1 1 1 1 1.

    Shrunk to two, each is a triangle over six: weights 5 7 7 5 3 1 of 28 on the left, mirrored on the right.
    """
    image = np.zeros((1, 4, 4), np.int16)
    image[0, :, 2:] = 40
    how = Preprocess(size=(2, 2), spacing=(1, 1), crop="foreground", window=(0, 10))
    array, undo = forward(picture(image, (2.0, 2.0)), how)
    assert undo == Undo((4, 4), (8, 8), ((0, 8), (0, 8)), (2, 2))
    assert array[0, 0].tolist() == pytest.approx([9 / 28, 27 / 28])
    assert array[0, 1].tolist() == pytest.approx([9 / 28, 27 / 28])


def test_probabilities_come_back_interpolated_and_background_outside_the_crop() -> None:
    undo = Undo((6, 6), (6, 6), ((2, 6), (0, 6)), (2, 3))
    probability = np.stack([np.full((2, 3), 0.25), np.full((2, 3), 0.75)])
    back = invert(probability, undo, nearest=False)
    assert back.shape == (2, 6, 6)
    assert back.dtype == np.float32
    assert back[:, 3, 3].tolist() == pytest.approx([0.25, 0.75])
    assert back.argmax(axis=0).tolist() == [[0] * 6] * 2 + [[1] * 6] * 4


sides = st.integers(1, 12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 3))
def test_a_mask_always_comes_back_in_its_own_shape(data: st.DataObject, dimensions: int) -> None:
    shape = tuple(data.draw(sides) for _ in range(dimensions))
    how = Preprocess(
        size=tuple(data.draw(st.one_of(st.just(()), st.tuples(*[sides] * dimensions)))),
        spacing=tuple(data.draw(st.one_of(st.just(()), st.tuples(*[st.floats(0.3, 3)] * dimensions)))),
        crop=data.draw(st.sampled_from(["none", "foreground"])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    drawn = rng.integers(0, 4, shape)
    array, undo = forward(picture(rng.integers(0, 3, (1, *shape))), how)
    sent = forward_mask(mask(drawn), undo)
    assert sent.shape == array.shape[1:]
    back = invert(sent, undo, nearest=True)
    assert back.shape == shape
    assert set(np.unique(back)) <= {0, *np.unique(drawn)}
    assert invert(array, undo, nearest=False).shape == (1, *shape)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_enlarging_and_cropping_lose_nothing(data: st.DataObject) -> None:
    shape = (data.draw(sides), data.draw(sides))
    how = Preprocess(
        spacing=(data.draw(st.floats(0.2, 1)), data.draw(st.floats(0.2, 1))),
        crop=data.draw(st.sampled_from(["none", "foreground"])),
    )
    drawn = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 3, shape)
    _, undo = forward(picture((drawn > 0)[None].astype(np.uint8)), how)  # the mask lies in the foreground
    assert np.array_equal(invert(forward_mask(mask(drawn), undo), undo, nearest=True), drawn)


def test_undo_survives_json() -> None:
    undo = Undo((4, 5), (8, 9), ((0, 8), (2, 9)), (3, 3))
    assert Undo.from_json(json.loads(json.dumps(undo.to_json()))) == undo


def test_the_fingerprint_follows_the_settings() -> None:
    assert fingerprint(Preprocess(spacing=(1, 1))) == fingerprint(Preprocess(spacing=(1.0, 1.0)))
    kinds = [Preprocess(), Preprocess(size=(4, 4)), Preprocess(crop="foreground"), Preprocess(normalise="none")]
    assert len({fingerprint(how) for how in kinds}) == 4


BAD_SETTINGS = [
    ({"size": (0, 4)}, ["size", "above zero"]),
    ({"size": (4,)}, ["size", "2 or 3 numbers"]),
    ({"size": (4.5, 4)}, ["size", "whole numbers"]),
    ({"size": 256}, ["size", "list"]),
    ({"spacing": (1, -1)}, ["spacing", "above zero"]),
    ({"spacing": (1, float("nan"))}, ["spacing", "numbers"]),
    ({"window": (3, 3)}, ["window", "a higher number"]),
    ({"window": (3,)}, ["window", "a low and a higher"]),
    ({"crop": "body"}, ["crop", "'body'", "none, foreground"]),
    ({"normalise": "max"}, ["normalise", "'max'", "unit, signed, zscore, none"]),
]


@pytest.mark.parametrize(("fields", "words"), BAD_SETTINGS)
def test_settings_are_refused_in_a_sentence(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(StudyError) as caught:
        Preprocess(**fields)
    for word in ["[preprocess]", *words]:
        assert word in str(caught.value)


def test_lists_of_a_study_become_tuples() -> None:
    assert Preprocess(size=[4, 4], window=[0, 1]) == Preprocess(size=(4, 4), window=(0.0, 1.0))  # type: ignore[arg-type]


def test_settings_that_do_not_fit_the_image() -> None:
    image = picture(np.zeros((1, 4, 4, 4)))
    with pytest.raises(StudyError, match="size has 2 numbers; the images have 3 axes"):
        forward(image, Preprocess(size=(4, 4)))
    with pytest.raises(DataError, match=r"a\.png: does not say its spacing"):
        forward(ImageArray(np.zeros((1, 4, 4)), (1.0, 1.0), Path("a.png"), None), Preprocess(spacing=(1, 1)))
    with pytest.raises(DataError, match=r"m\.mha: is 3×3 but its image is 4×4"):
        forward_mask(mask(np.zeros((3, 3), int)), forward(picture(np.zeros((1, 4, 4))), Preprocess())[1])
    with pytest.raises(ValueError, match="shape"):
        invert(np.zeros((3, 3)), Undo((4, 4), (4, 4), ((0, 4), (0, 4)), (4, 4)), nearest=True)
