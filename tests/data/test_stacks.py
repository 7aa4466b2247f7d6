"""Many images in one .npy, named "stack.npy#17": read, checked, cached, mended, predicted like files of their own."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from consilium import simulation
from consilium.data.cache import open_site
from consilium.data.check import check
from consilium.data.fixing import fix
from consilium.data.formats import ImageError, stack_of, suffix_of
from consilium.data.image_folders import pictures_in
from consilium.data.images import files_of, read_image
from consilium.data.preprocess import Preprocess
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.prediction import predict
from consilium.study_reading import make_study

SPLITS = ("train", "train", "train", "train", "valid", "valid", "test", "test")


def pictures(seed: int) -> NDArray[np.uint8]:
    """Eight pictures of 16 pixels, bright above (even) or below (odd)."""
    images = np.random.default_rng(seed).integers(0, 60, (8, 16, 16))
    images[::2, :8] += 120
    images[1::2, 8:] += 120
    return images.astype(np.uint8)


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    folder = tmp_path / "fed"
    write_federation_toml(folder, "classification", ["above", "below"], 2, 1)
    for seed, site in enumerate(("east", "west")):
        (folder / site / "images").mkdir(parents=True)
        np.save(folder / site / "images/all.npy", pictures(seed))
        write_site(
            folder,
            site,
            [
                Case(f"c{i}", f"p{i}", split, Path(f"images/all.npy#{i}"), ("above", "below")[i % 2])
                for i, split in enumerate(SPLITS)
            ],
        )
    return folder


def test_the_name_of_an_image_in_a_stack() -> None:
    assert stack_of(Path("a/train.npy#17")) == (Path("a/train.npy"), 17)
    assert suffix_of(Path("a/train.npy#17")) == ".npy"
    assert files_of(Path("a/train.npy#17")) == (Path("a/train.npy"),)
    for plain in ("scan#2.png", "a.npy", "a.npy#", "a.npy#-1", "a.npy#x", "a.png#3", "b#1/c.npy"):
        assert stack_of(Path(plain)) == (Path(plain), None)


def test_one_image_is_read(fed: Path) -> None:
    picture = read_image(fed / "west/images/all.npy#5", 2, 1)
    np.testing.assert_array_equal(picture.array[0], pictures(1)[5])


@pytest.mark.parametrize("channels_first", [True, False])
def test_colour_in_a_stack(channels_first: bool, tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 255, (4, 3, 6, 5), dtype=np.uint8)
    np.save(tmp_path / "c.npy", colours if channels_first else np.moveaxis(colours, 1, -1))
    np.testing.assert_array_equal(read_image(tmp_path / "c.npy#2", 2, 3).array, colours[2])
    assert len(pictures_in(tmp_path / "c.npy", 2, 3)) == 4


def test_a_stack_that_is_written_again_is_read_again(fed: Path) -> None:
    path = fed / "west/images/all.npy#5"
    read_image(path, 2, 1)
    np.save(stack_of(path)[0], pictures(7)[:6])
    np.testing.assert_array_equal(read_image(path, 2, 1).array[0], pictures(7)[5])


def test_a_sound_stack_is_sound(fed: Path) -> None:
    finding = check(fed)
    assert (finding.faults, finding.notes) == ((), ())


def test_the_same_image_at_two_places_is_noticed(fed: Path) -> None:
    images = pictures(0)
    images[6] = images[0]
    np.save(fed / "east/images/all.npy", images)
    (found,) = check(fed).errors
    assert (found.case, found.kind) == ("c0", "copy")
    assert "the same picture as test case 'c6' of site 'east', and itself in train" in found.what


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("images/all.npy#8", "is not there: the file has shape (8, 16, 16)"),
        ("images/none.npy#0", "'images/none.npy' does not exist"),
        ("../west/images/all.npy#0", "leaves the site's folder"),
        ("images/all.npy#-1", "is not of an accepted format"),
    ],
)
def test_a_wrong_place_is_named(fed: Path, place: str, words: str) -> None:
    table = fed / "east/cases.csv"
    table.write_text(table.read_text().replace("images/all.npy#7", place))
    (fault,) = check(fed).faults
    assert (fault.site, fault.case) == ("east", "c7")
    assert words in fault.sentence


def test_every_case_of_a_broken_stack_is_named(fed: Path) -> None:
    stack = fed / "east/images/all.npy"
    stack.write_bytes(stack.read_bytes()[:-50])
    assert [fault.case for fault in check(fed).faults] == [f"c{i}" for i in range(8)]


def test_objects_in_a_stack_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{"a": 1}, {"b": 2}], dtype=object))
    with pytest.raises(ImageError, match="cannot be read"):
        read_image(tmp_path / "o.npy#0", 2, 1)


def test_a_mended_copy_keeps_the_stack(fed: Path, tmp_path: Path) -> None:
    table = fed / "east/cases.csv"
    table.write_text(table.read_text().replace("images/all.npy#7", "images/all.npy#8"))
    (line,) = fix(fed, tmp_path / "sound")
    assert "c7" in line
    assert check(tmp_path / "sound").faults == ()
    assert [p.name for p in (tmp_path / "sound/east/images").iterdir()] == ["all.npy"]


def test_the_cache_follows_the_stack(fed: Path, tmp_path: Path) -> None:
    federation = read_federation(fed)
    arrays = open_site(federation, federation.sites["east"], Preprocess(), tmp_path / "cache")
    np.testing.assert_allclose(arrays.image(3)[0], pictures(0)[3] / np.float32(255), atol=1e-6)
    assert arrays.truth(3) == 1
    np.save(fed / "east/images/all.npy", pictures(5))
    again = open_site(federation, federation.sites["east"], Preprocess(), tmp_path / "cache")
    np.testing.assert_allclose(again.image(3)[0], pictures(5)[3] / np.float32(255), atol=1e-6)


def test_trained_on_and_predicted(fed: Path, tmp_path: Path) -> None:
    study = make_study({
        "study": {"rounds": 6},
        "data": {"federation": str(fed)},
        "task": {"network": "cnn", "widths": [4, 8], "hidden": 16},
        "local": {"batch_size": 2, "lr": 0.01},
        "method": {"name": "fedavg"},
    })  # fmt: skip
    run = simulation.run(study, tmp_path / "runs", workers=0).folder
    whole = predict(run, [fed / "west/images/all.npy"], tmp_path / "whole")
    assert [p.result for p in whole] == ["above", "below"] * 4
    (one,) = predict(run, [fed / "west/images/all.npy#5"], tmp_path / "one")
    assert (one.result, one.image) == ("below", str(fed / "west/images/all.npy#5"))
    rows = list(csv.DictReader((tmp_path / "whole/predictions.csv").read_text().splitlines()))
    assert rows[7]["image"].endswith("all.npy#7")
