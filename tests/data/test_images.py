"""Every format is read in one axis convention, and a mask goes back to the grid of its image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from numpy.typing import NDArray
from PIL import Image

from consilium.data.images import files_of, orientation, read_image, read_mask
from consilium.data.mask_files import write_mask
from consilium.errors import DataError

VOLUME = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)  # (z, y, x)
AFFINE = np.array([[-0.5, 0, 0, 10], [0, 0.6, 0, 20], [0, 0, 3, 30], [0, 0, 0, 1]])
COLOUR = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
GREY = COLOUR[..., 0]


def write_volume(path: Path, array: NDArray[Any]) -> Path:
    if ".nii" in path.name:
        nibabel.save(nibabel.Nifti1Image(array.T, AFFINE), path)
    elif path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".tif":
        first, *rest = [Image.fromarray(page.astype(np.uint16)) for page in array]
        first.save(path, save_all=True, append_images=rest)
    else:
        image = SimpleITK.GetImageFromArray(array)
        image.SetSpacing((0.5, 0.6, 3.0))
        image.SetOrigin((10, 20, 30))
        image.SetDirection((1, 0, 0, 0, -1, 0, 0, 0, 1))
        SimpleITK.WriteImage(image, str(path))
    return path


VOLUMES = [
    # format, spacing (z, y, x), the format its mask is written in
    ("nii.gz", (3.0, 0.6, 0.5), "nii.gz"),
    ("nii", (3.0, 0.6, 0.5), "nii.gz"),
    ("mha", (3.0, 0.6, 0.5), "mha"),
    ("mhd", (3.0, 0.6, 0.5), "mha"),
    ("nrrd", (3.0, 0.6, 0.5), "nrrd"),
    ("npy", (1.0, 1.0, 1.0), "npy"),
    ("tif", (1.0, 1.0, 1.0), "tif"),
]


@pytest.mark.parametrize(("suffix", "spacing", "written"), VOLUMES, ids=[row[0] for row in VOLUMES])
def test_a_volume_is_read_as_zyx_and_its_mask_written_on_its_grid(
    tmp_path: Path, suffix: str, spacing: tuple[float, ...], written: str
) -> None:
    picture = read_image(write_volume(tmp_path / f"scan.v2.{suffix}", VOLUME), 3, 1)
    assert picture.array.shape == (1, 2, 3, 4)
    assert np.array_equal(picture.array[0], VOLUME)
    assert picture.array.dtype == (np.uint16 if suffix == "tif" else np.int16)
    assert picture.spacing == pytest.approx(spacing)
    mask = (VOLUME % 3).astype(np.uint8)
    path = write_mask(mask, picture, tmp_path / "out" / "scan.v2.png")
    assert path == tmp_path / "out" / f"scan.v2.{written}"
    back = read_mask(path, 3)
    assert np.array_equal(back.array, mask)
    assert back.array.dtype == np.uint8
    assert back.spacing == pytest.approx(spacing)


def test_a_nifti_mask_keeps_the_affine_and_forms(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(VOLUME.T.astype(np.float32), AFFINE)
    image.set_sform(AFFINE, code=2)
    image.set_qform(AFFINE, code=1)
    nibabel.save(image, tmp_path / "a.nii.gz")
    path = write_mask(np.ones((2, 3, 4), np.uint8), read_image(tmp_path / "a.nii.gz", 3, 1), tmp_path / "m.nii.gz")
    mask = nibabel.load(path)
    assert np.array_equal(mask.affine, nibabel.load(tmp_path / "a.nii.gz").affine)
    assert (int(mask.header["sform_code"]), int(mask.header["qform_code"])) == (2, 1)
    assert mask.get_data_dtype() == np.uint8


def test_an_itk_mask_keeps_origin_and_direction(tmp_path: Path) -> None:
    picture = read_image(write_volume(tmp_path / "a.mha", VOLUME), 3, 1)
    mask = SimpleITK.ReadImage(str(write_mask(np.ones((2, 3, 4), np.uint8), picture, tmp_path / "m")))
    assert mask.GetOrigin() == (10, 20, 30)
    assert mask.GetDirection() == (1, 0, 0, 0, -1, 0, 0, 0, 1)


def test_channels_of_a_volume_come_first(tmp_path: Path) -> None:
    both = np.stack([VOLUME, -VOLUME])  # (channels, z, y, x)
    nibabel.save(nibabel.Nifti1Image(both.T, AFFINE), tmp_path / "a.nii.gz")
    vectors = SimpleITK.GetImageFromArray(np.moveaxis(both, 0, -1), isVector=True)
    SimpleITK.WriteImage(vectors, str(tmp_path / "a.nrrd"))
    np.save(tmp_path / "a.npy", both)
    for name in ("a.nii.gz", "a.nrrd", "a.npy"):
        picture = read_image(tmp_path / name, 3, 2)
        assert np.array_equal(picture.array, both)
        written = write_mask(np.ones((2, 3, 4), np.uint8), picture, tmp_path / "out" / name)
        assert read_mask(written, 3).array.shape == (2, 3, 4)


def test_a_flat_nifti_is_a_picture_and_stays_flat(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(GREY.T[..., None], AFFINE), tmp_path / "a.nii.gz")
    picture = read_image(tmp_path / "a.nii.gz", 2, 1)
    assert np.array_equal(picture.array[0], GREY)
    assert picture.spacing == pytest.approx((0.6, 0.5))
    mask = nibabel.load(write_mask(np.ones((5, 7), np.uint8), picture, tmp_path / "m"))
    assert mask.shape == (7, 5, 1)


def test_one_scan_in_two_formats_says_the_same_directions(tmp_path: Path) -> None:
    nifti = read_image(write_volume(tmp_path / "a.nii.gz", VOLUME), 3, 1)
    SimpleITK.WriteImage(SimpleITK.ReadImage(str(tmp_path / "a.nii.gz")), str(tmp_path / "a.mha"))
    assert orientation(nifti) == orientation(read_image(tmp_path / "a.mha", 3, 1)) == "LAS"


def save(path: Path, array: NDArray[Any], mode: str = "") -> Path:
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return path


PICTURES = [
    # file, mode, stored array, channels asked, expected (row, column[, channel])
    ("a.png", "", GREY, 1, GREY),
    ("a.tif", "", GREY, 1, GREY),
    ("a.PNG", "", COLOUR, 3, COLOUR),
    ("a.png", "LA", GREY, 1, GREY),
    ("a.png", "RGBA", COLOUR, 3, COLOUR),
    ("a.png", "", np.dstack([COLOUR, GREY]), 4, np.dstack([COLOUR, GREY])),
    ("a.png", "P", GREY, 1, GREY),
    ("a.png", "1", np.array([[0, 255]], np.uint8), 1, np.array([[0, 255]], np.uint8)),
    ("a.png", "", GREY.astype(np.uint16) * 257, 1, GREY.astype(np.uint16) * 257),
    ("a.tif", "", GREY.astype(np.uint16) * 257, 1, GREY.astype(np.uint16) * 257),
    ("a.tif", "", GREY.astype(np.float32) / 7, 1, GREY.astype(np.float32) / 7),
]


@pytest.mark.parametrize(("name", "mode", "stored", "channels", "expected"), PICTURES)
def test_pictures(
    tmp_path: Path, name: str, mode: str, stored: NDArray[Any], channels: int, expected: NDArray[Any]
) -> None:
    array = read_image(save(tmp_path / name, stored, mode), 2, channels).array
    assert array.dtype == expected.dtype
    assert np.array_equal(array, np.atleast_3d(expected).transpose(2, 0, 1))


def test_a_colour_palette_becomes_colour(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", 2, 3).array[:, 0].T.tolist() == [[255, 0, 0], [0, 0, 255]]
    assert read_mask(tmp_path / "a.png", 2).array.tolist() == [[0, 1]]  # in a mask the index counts


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_colour_keeps_its_range(tmp_path: Path, suffix: str) -> None:
    deep = COLOUR.astype(np.uint16) * np.uint16(256) + np.uint16(7)
    path = tmp_path / f"a.{suffix}"
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(deep, isVector=True), str(path))
    assert np.array_equal(read_image(path, 2, 3).array, deep.transpose(2, 0, 1))


def test_jpeg_images_are_read_and_their_masks_are_png(tmp_path: Path) -> None:
    picture = read_image(save(tmp_path / "a.jpg", COLOUR), 2, 3)
    assert picture.array.shape == (3, 5, 7)
    path = write_mask(GREY % 3, picture, tmp_path / "a.jpg")
    assert path.name == "a.png"
    assert np.array_equal(read_mask(path, 2).array, GREY % 3)


def test_npy_pictures_may_have_channels_first_or_last(tmp_path: Path) -> None:
    np.save(tmp_path / "last.npy", COLOUR)
    np.save(tmp_path / "first.npy", COLOUR.transpose(2, 0, 1))
    last, first = (read_image(tmp_path / f"{name}.npy", 2, 3).array for name in ("last", "first"))
    assert np.array_equal(last, first)


def test_big_endian_files_come_in_the_machines_order(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", GREY.astype(">i4"))
    assert read_image(tmp_path / "a.npy", 2, 1).array.dtype == np.dtype("=i4")


MASKS = [
    (np.array([[0.0, 2.0]]), [[0, 2]]),
    (np.array([[False, True]]), [[0, 1]]),
    (np.array([[0, 300]], np.int32), [[0, 300]]),
]


@pytest.mark.parametrize(("stored", "expected"), MASKS)
def test_masks_are_integers(tmp_path: Path, stored: NDArray[Any], expected: list[list[int]]) -> None:
    np.save(tmp_path / "m.npy", stored)
    mask = read_mask(tmp_path / "m.npy", 2).array
    assert mask.dtype.kind in "iu"
    assert mask.tolist() == expected


def test_a_grey_mask_saved_as_colour_is_understood(tmp_path: Path) -> None:
    path = save(tmp_path / "m.png", np.dstack([GREY % 3] * 3))
    assert np.array_equal(read_mask(path, 2).array, GREY % 3)


def test_an_mhd_is_two_files(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "a.mhd", VOLUME)
    assert files_of(path) == (path, tmp_path / "a.raw")


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


def noise(suffix: str) -> NDArray[Any]:
    side = (40, 40) if suffix in ("png", "jpg", "npy") else (6, 20, 20)
    return np.random.default_rng(0).integers(0, 255, side, dtype=np.uint8)


@pytest.mark.parametrize("suffix", ["png", "jpg", "npy", "nii", "nii.gz", "mha", "nrrd", "tif"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "nonsense", "absent"])
def test_unreadable_files_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path, dimensions = tmp_path / f"a.{suffix}", 2 if suffix in ("png", "jpg", "npy") else 3
    if suffix in ("png", "jpg"):
        save(path, noise(suffix))
    else:
        write_volume(path, noise(suffix))
    if damage == "truncated":
        truncate(path)
    elif damage == "absent":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else b"This is not an image." * 30)
    words = {"empty": "is empty", "absent": "does not exist"}.get(damage, "cannot be read")
    with pytest.raises(DataError, match=words) as caught:
        read_image(path, dimensions, 1)
    assert str(path) in str(caught.value)


def test_an_mhd_whose_data_are_truncated_or_far_away(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "a.mhd", VOLUME)
    data = tmp_path / "a.raw"
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(DataError, match="cannot be read"):
        read_image(path, 3, 1)
    path.write_text(path.read_text().replace("a.raw", "/etc/hostname"))
    with pytest.raises(DataError, match="in the same folder"):
        read_image(path, 3, 1)


def test_a_header_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "a.mha", VOLUME)
    path.write_bytes(path.read_bytes().replace(b"ElementDataFile = LOCAL", b"ElementDataFile = ../x.raw"))
    with pytest.raises(DataError, match="in another file"):
        read_image(path, 3, 1)
    path = write_volume(tmp_path / "a.nrrd", VOLUME)
    path.write_bytes(path.read_bytes().replace(b"endian:", b"data file: ../x.raw\nendian:"))
    with pytest.raises(DataError, match="in another file"):
        read_image(path, 3, 1)


WRONG = [
    # stored, file, (dimensions, channels), words
    (GREY, "a.png", (2, 3), ["is grey", "channels = 3", "set channels = 1", "save it as RGB"]),
    (COLOUR, "a.png", (2, 1), ["is a colour image", "channels = 1", "set channels = 3", "save it as grey"]),
    (GREY, "a.png", (3, 1), ["single picture", "dimensions = 3"]),
    (VOLUME, "a.nii.gz", (2, 1), ["volume of 2 slices", "dimensions = 2"]),
    (VOLUME, "a.tif", (2, 1), ["volume of 2 slices", "dimensions = 2"]),
    (VOLUME, "a.mha", (3, 2), ["is grey", "save it with 2 channels"]),
    (VOLUME, "a.npy", (2, 1), ["shape (2, 3, 4)", "(height, width)"]),
    (np.array([[0, np.inf], [np.nan, 1]]), "a.npy", (2, 1), ["2 values", "not finite"]),
    (np.array([[0, -1e39], [1.7e308, 1]]), "a.npy", (2, 1), ["2 values beyond 3.4e38", "replace them"]),
    (np.zeros((0, 3)), "a.npy", (2, 1), ["without pixels"]),
    (GREY.astype(complex), "a.npy", (2, 1), ["complex128"]),
    (np.array([["a"]]), "a.npy", (2, 1), ["<U1"]),
    (GREY, "a.gif", (2, 1), ["not of an accepted format", ".png"]),
]


@pytest.mark.parametrize(("stored", "name", "asked", "words"), WRONG, ids=[str(row[3][0]) for row in WRONG])
def test_what_does_not_fit_is_said_with_a_remedy(
    tmp_path: Path, stored: NDArray[Any], name: str, asked: tuple[int, int], words: list[str]
) -> None:
    path = tmp_path / name
    (save if path.suffix in (".png", ".gif") else write_volume)(path, stored)
    with pytest.raises(DataError) as caught:
        read_image(path, *asked)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[object()]]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        read_image(tmp_path / "a.npy", 2, 1)


BAD_MASKS = [
    (COLOUR, "m.png", ["colour picture", "one integer per pixel"]),
    (GREY, "m.jpg", ["JPEG", "PNG"]),
    (np.array([[0, 0.5]]), "m.npy", ["not whole numbers", "0.5"]),
    (np.array([[0, np.nan]]), "m.npy", ["not whole numbers", "nan"]),
]


@pytest.mark.parametrize(("stored", "name", "words"), BAD_MASKS)
def test_masks_that_cannot_be_masks(tmp_path: Path, stored: NDArray[Any], name: str, words: list[str]) -> None:
    path = tmp_path / name
    (np.save if path.suffix == ".npy" else save)(path, stored)
    with pytest.raises(DataError) as caught:
        read_mask(path, 2)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_mask_of_another_shape_is_not_written(tmp_path: Path) -> None:
    picture = read_image(save(tmp_path / "a.png", GREY), 2, 1)
    with pytest.raises(ValueError, match="shape"):
        write_mask(np.zeros((4, 4), np.uint8), picture, tmp_path / "m.png")
