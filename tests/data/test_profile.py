"""What training images were like, and images that are not like them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium import simulation
from consilium.data.images import read_image
from consilium.data.preprocess import Preprocess, forward
from consilium.data.profile import DataProfile, ImageFacts, image_facts, joined, profile_of, read_profile, unlike
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import StudyError
from consilium.export.exporting import export_run
from consilium.prediction import predict
from consilium.run_folder import RunFolder
from tests.toy import toy_study

ONE = ImageFacts((20, 64, 64), (3.0, 0.5, 0.5), "LPS", "int16", 0.0, 1000.0, (0.0, 0.2, 0.9))
TWO = ImageFacts((24, 80, 80), (3.5, 0.6, 0.6), "RAS", "int16", 0.0, 1400.0, (0.0, 0.3, 0.95))
MR = profile_of([ONE, TWO])
HOW = Preprocess()


def test_ranges_over_cases_and_sites_by_hand() -> None:
    assert DataProfile(
        2, ((20, 24), (64, 80), (64, 80)), ((3.0, 3.5), (0.5, 0.6), (0.5, 0.6)), ("LPS", "RAS"), ("int16",),
        (0, 0), (1000, 1400), ((0, 0), (0.2, 0.3), (0.9, 0.95)),
    ) == MR  # fmt: skip
    parts = [profile_of([ONE]), profile_of([TWO])]
    assert joined([part for part in parts if part]) == MR
    assert profile_of([]) is joined([]) is None
    assert MR is not None and read_profile(json.loads(json.dumps(MR.to_json()))) == MR


@pytest.mark.parametrize(
    "spoil",
    [{"size": [[1, 2]]}, {"lowest": [2, 1]}, {"seen": [[0, float("nan")]] * 3}, {"cases": "x"}, {"types": 3}],
)
def test_a_profile_that_is_not_one_is_not_used(spoil: dict[str, Any]) -> None:
    assert MR is not None
    assert read_profile({**MR.to_json(), **spoil}) is None
    assert read_profile(["what"]) is None


ODD = [
    ({}, ""),
    ({"size": (30, 50, 100)}, ""),
    ({"orientation": "PIR"}, ""),  # it is brought to the study's
    ({"lowest": 0.0, "highest": 0.0}, "all its values are 0"),
    ({"size": (200, 64, 64)}, "size 200×64×64 (trained on 20×64×64 to 24×80×80)"),
    ({"spacing": (1.0, 1.0, 1.0)}, "spacing 1×1×1 mm"),
    ({"spacing": ()}, "does not say its spacing"),
    ({"orientation": ""}, "stored orientation not said"),
    ({"lowest": -1000.0}, "values from -1000 to 1000 (trained on 0 to 1400): another modality"),
    ({"highest": 20000.0}, "another modality"),
    ({"seen": (0.0, 0.9, 1.0)}, "dark, middle and bright values are 0.00, 0.90, 1.00"),
    ({"type": "uint16"}, "values of type uint16"),
]


@pytest.mark.parametrize(("changes", "words"), ODD)
def test_images_outside_are_named(changes: dict[str, Any], words: str) -> None:
    assert MR is not None
    found = "; ".join(unlike(ImageFacts(**{**vars(ONE), **changes}), MR, HOW))
    assert words in found
    assert bool(found) == bool(words)


def test_another_orientation_is_told_where_volumes_are_used_as_stored() -> None:
    assert MR is not None
    odd = ImageFacts(**{**vars(ONE), "orientation": "LPI"})
    assert unlike(odd, MR, Preprocess(orientation="")) == ["stored orientation LPI (trained on LPS, RAS)"]


def test_facts_of_a_volume_are_in_the_study_s_orientation(tmp_path: Path) -> None:
    volume = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(np.int16)
    nibabel.save(
        nibabel.Nifti1Image(volume, np.array([[0, 0, 2.0, 0], [0, 3.0, 0, 0], [4.0, 0, 0, 0], [0, 0, 0, 1]])),
        tmp_path / "a.nii",
    )
    picture = read_image(tmp_path / "a.nii", 3, 1)
    facts = image_facts(picture, *forward(picture, HOW))
    assert (facts.size, facts.spacing, facts.orientation) == ((2, 3, 4), (4.0, 3.0, 2.0), "SAR")
    assert (facts.type, facts.lowest, facts.highest) == ("int16", 0.0, 23.0)


# ---------------------------------------------------------------------------------------------- runs


def test_a_run_and_its_package_know_their_training_images_and_predict_warns(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__rounds=1)
    run = simulation.run(study, tmp_path / "runs", workers=0).folder
    trained = RunFolder.open(run).origin.trained_on()
    assert trained is not None
    assert (trained.cases, trained.size, trained.types) == (30, ((16, 16), (16, 16)), ("uint8",))
    (tmp_path / "in").mkdir()
    shutil.copy(federation / "ada/images/ada011.png", tmp_path / "in/own.png")
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "in/black.png")
    Image.fromarray(np.full((16, 16), 250, np.uint8) - np.eye(16, dtype=np.uint8)).save(tmp_path / "in/white.png")
    export_run(run, tmp_path / "out", check=False)
    card = json.loads((tmp_path / "out/model_card.json").read_text())
    assert card["training"]["distribution"]["cases"] == 30
    for place in (run, tmp_path / "out"):
        found = {
            Path(p.image).stem: p.warning for p in predict(place, [tmp_path / "in"], tmp_path / f"to-{place.name}")
        }
        assert found["own"] == ""
        assert found["black"] == "unlike the training images: all its values are 0"
        assert "dark, middle and bright values" in found["white"]
        text = (tmp_path / f"to-{place.name}/predictions.csv").read_text()
        rows = list(csv.DictReader(text.splitlines()))
        assert {Path(row["image"]).stem: row["warning"] for row in rows} == found


@pytest.mark.slow
def test_no_test_image_of_the_toy_sites_is_called_odd(federation: Path, tmp_path: Path) -> None:
    run = simulation.run(toy_study(federation, study__rounds=1), tmp_path / "runs", workers=0).folder
    images = [path for site in ("ada", "bea", "cid") for path in sorted((federation / site / "images").iterdir())]
    links = [Path(shutil.copy(path, tmp_path / path.name)) for path in images]
    assert [p.image for p in predict(run, links, tmp_path / "to") if p.warning] == []


def test_with_privacy_nothing_about_images_leaves(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__rounds=1, privacy__clip=1.0, privacy__noise=1.0)
    run = simulation.run(study, tmp_path / "runs", workers=0).folder
    assert RunFolder.open(run).origin.trained_on() is None
    assert "distribution" not in (run / "origin.json").read_text()


# ---------------------------------------------------------------------------------------------- number types


def write_sites(folder: Path, **sites: Any) -> Path:
    """Per site: a number type and the highest value."""
    write_federation_toml(folder, "segmentation", ["blob"], 2, 1)
    for site, (kind, high) in sites.items():
        (folder / site).mkdir(parents=True)
        cases = []
        for i, split in enumerate(("train", "train", "valid", "test")):
            image = (np.random.default_rng(i).random((16, 16)) * high).astype(kind)
            image[0, 0] = high
            np.save(folder / site / f"{i}.npy", image)
            np.save(folder / site / f"m{i}.npy", (image > high / 2).astype(np.uint8))
            cases.append(Case(f"c{i}", f"p{i}", split, Path(f"{i}.npy"), Path(f"m{i}.npy")))
        write_site(folder, site, cases)
    return folder


def warnings_of(folder: Path, runs: Path, **more: Any) -> list[str]:
    run = simulation.run(toy_study(folder, study__rounds=1, **more), runs, workers=0).folder
    return [event["text"] for event in RunFolder.open(run).events() if event["event"] == "warning"]


def test_twelve_bits_in_sixteen_are_told(tmp_path: Path) -> None:
    folder = write_sites(tmp_path / "fed", ada=(np.uint16, 4095), bea=(np.uint16, 4000))
    (told,) = warnings_of(folder, tmp_path / "runs")
    assert "site 'ada' stores 16-bit images whose values reach only 4095 of 65535" in told
    assert "window" in told and "percentiles" in told
    assert warnings_of(folder, tmp_path / "runs", preprocess__window=[0.0, 4095.0]) == []
    assert warnings_of(folder, tmp_path / "runs", preprocess__percentiles=[0.5, 99.5]) == []


def test_sites_on_different_scales_are_refused(tmp_path: Path) -> None:
    folder = write_sites(tmp_path / "fed", ada=(np.uint16, 4095), bea=(np.uint8, 255))
    with pytest.raises(StudyError, match=r"'ada' stores 16-bit .* other images \(uint8\) are scaled otherwise"):
        warnings_of(folder, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []
    assert warnings_of(folder, tmp_path / "runs", preprocess__percentiles=[0.5, 99.5]) == []


def test_full_ranges_of_both_types_are_fine_and_own_ranges_are_told(tmp_path: Path) -> None:
    full = write_sites(tmp_path / "full", ada=(np.uint16, 65535), bea=(np.uint8, 255))
    assert warnings_of(full, tmp_path / "runs") == []
    own = write_sites(tmp_path / "own", ada=(np.int16, 900), bea=(np.uint8, 255))
    (told,) = warnings_of(own, tmp_path / "runs")
    assert "different types ('ada' int16; 'bea' uint8)" in told
