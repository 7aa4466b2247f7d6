"""The abdomen phantom is frozen here: what it shows is fixed before any method is tuned on it."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation, label
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from consilium.data.check import check
from consilium.data.images import orientation, read_image, read_mask
from consilium.data.phantoms import abdomen, write_phantom
from consilium.data.phantoms.abdomen import cases_per_site, render
from consilium.data.phantoms.abdomen_body import tissues
from consilium.data.phantoms.abdomen_organs import LABELS
from consilium.data.phantoms.tables import FIRST_INDEX
from consilium.data.site_folder import read_federation
from consilium.errors import StudyError

pytestmark = pytest.mark.xdist_group("abdomen")  # what its tests share is made once

SITES = ["word", "abdomenct1k", "amos", "btcv"]
CASES = 4  # per site, at 48 rows, seed 0
KIDNEY, LIVER, SPLEEN, PANCREAS = 1, 2, 3, 4
Scan = tuple[NDArray[np.int16], NDArray[np.uint8], tuple[float, float, float]]
Scans = dict[str, list[Scan]]


@pytest.fixture(scope="module")
def scans() -> Scans:
    return {site: [render(site, FIRST_INDEX["test"] + index, 48, 0) for index in range(CASES)] for site in SITES}


def millilitres(mask: NDArray[np.uint8], spacing: tuple[float, float, float], value: int) -> float:
    return float((mask == value).sum() * np.prod(spacing) / 1000)


def centre(mask: NDArray[np.uint8], value: int) -> NDArray[np.float64]:
    """(z, y, x) as shares of the volume."""
    return np.array([axis.mean() for axis in np.nonzero(mask == value)]) / mask.shape


STATISTICS: list[tuple[str, float, tuple[float, ...], tuple[float, ...]]] = [
    ("word", -667, (32, 63, 43, 28), (246.3, 1251.1, 105.9, 56.9)),
    ("abdomenct1k", -495, (127, 87, 100, 65), (302.6, 1330.5, 142.2, 52.9)),
    ("amos", -595, (155, 113, 138, 118), (261.9, 1277.5, 158.7, 55.2)),
    ("btcv", -594, (92, 57, 76, 45), (319.0, 1419.4, 171.6, 55.1)),
]


@pytest.mark.parametrize(("site", "mean", "medians", "volumes"), STATISTICS)
def test_statistics_are_frozen(
    scans: Scans, site: str, mean: float, medians: tuple[float, ...], volumes: tuple[float, ...]
) -> None:
    """Mean value in HU; medians in HU and volumes in ml of kidney, liver, spleen and pancreas."""
    here = scans[site]
    assert np.mean([image.mean() for image, _, _ in here]) == pytest.approx(mean, abs=2)
    for value, (median, volume) in enumerate(zip(medians, volumes, strict=True), start=1):
        assert np.mean([np.median(image[mask == value]) for image, mask, _ in here]) == pytest.approx(median, abs=2)
        found = np.mean([millilitres(mask, spacing, value) for _, mask, spacing in here])
        assert found == pytest.approx(volume, rel=0.02)


@pytest.mark.parametrize("site", SITES)
def test_organs_lie_where_they_lie(scans: Scans, site: str) -> None:
    for image, mask, _ in scans[site]:
        assert image.shape == mask.shape == (36, 48, 48)
        assert (image.dtype, mask.dtype) == (np.int16, np.uint8)
        assert set(np.unique(mask)) == {0, 1, 2, 3, 4}
        assert label(mask == KIDNEY)[1] == 2
        assert all(label(mask == value)[1] == 1 for value in (LIVER, SPLEEN, PANCREAS))
        kidney, liver, spleen, pancreas = (centre(mask, value) for value in (KIDNEY, LIVER, SPLEEN, PANCREAS))
        assert liver[2] + 0.15 < pancreas[2] < spleen[2]  # the patient's right is on the left of the picture
        assert min(liver[0], spleen[0]) > kidney[0]  # above the kidneys
        assert pancreas[1] < kidney[1]  # in front of them
        sizes = [(mask == value).sum() for value in (LIVER, KIDNEY, SPLEEN, PANCREAS)]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("site", SITES)
def test_values_are_hounsfield_s(scans: Scans, site: str) -> None:
    for image, mask, _ in scans[site]:
        assert -1024 <= image.min() < -900 and image.max() > 300  # air and bone
        for value in range(1, 5):
            assert 0 < np.median(image[mask == value]) < 300
        around = binary_dilation(mask == KIDNEY, iterations=2) & (mask == 0)
        assert np.median(image[around]) < np.median(image[mask == KIDNEY]) - 20  # in fat


def test_contrast_medium_tells_the_phase() -> None:
    plain, early, late = tissues(0, 0), tissues(1, 0.2), tissues(0, 1)
    assert plain["liver"] > plain["spleen"] > plain["renal cortex"]
    assert early["artery"] > 250 > late["artery"] > 100
    assert early["renal cortex"] - early["renal medulla"] > 100 > late["renal cortex"] - late["renal medulla"]
    assert late["liver"] - plain["liver"] > 2 * (early["liver"] - plain["liver"])


def histogram(image: NDArray[np.int16]) -> list[float]:
    inside = image[image > -300]
    steps = np.abs(np.diff(image.astype(float), axis=2))
    return [*np.percentile(inside, range(5, 100, 10)), *np.percentile(steps, (30, 60, 80)), (image > -300).mean()]


def test_sites_are_told_apart(scans: Scans) -> None:
    fresh = [(site, render(site, 300_000 + index, 48, 0)[0]) for site in SITES for index in range(2)]
    known = [(site, image) for site in SITES for image, _, _ in scans[site]]
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit([histogram(image) for _, image in known], [site for site, _ in known])
    right = classifier.predict([histogram(image) for _, image in fresh]) == [site for site, _ in fresh]
    assert right.mean() >= 0.7  # by chance 0.25


def test_a_case_is_the_same_bytes_again_and_others_differ(scans: Scans) -> None:
    for site in SITES:
        image, mask, spacing = render(site, FIRST_INDEX["test"] + 2, 48, 0)
        assert image.tobytes() == scans[site][2][0].tobytes() and mask.tobytes() == scans[site][2][1].tobytes()
        assert spacing == scans[site][2][2]
        assert len({image.tobytes() for image, _, _ in scans[site]}) == CASES
    assert render("word", 200_000, 48, 1)[0].tobytes() != scans["word"][0][0].tobytes()


def test_the_same_patient_at_another_size(scans: Scans) -> None:
    large, large_mask, fine = scans["amos"][0]
    small, small_mask, spacing = render("amos", FIRST_INDEX["test"], 24, 0)
    assert small.shape == (18, 24, 24)
    assert np.multiply(fine, 2) == pytest.approx(spacing)
    pooled = large.reshape(18, 2, 24, 2, 24, 2).mean(axis=(1, 3, 5))
    assert np.corrcoef(pooled.ravel(), small.ravel())[0, 1] > 0.97
    for value in (KIDNEY, LIVER):
        assert millilitres(large_mask, fine, value) == pytest.approx(millilitres(small_mask, spacing, value), rel=0.1)


def test_the_paper_s_sizes() -> None:
    assert cases_per_site() == {
        "word": {"train": 84, "valid": 12, "test": 24},
        "abdomenct1k": {"train": 186, "valid": 26, "test": 54},
        "amos": {"train": 140, "valid": 20, "test": 40},
        "btcv": {"train": 0, "valid": 0, "test": 30},
    }
    scaled = cases_per_site(30)
    assert sum(n for splits in scaled.values() for n in splits.values()) == 30
    assert scaled["btcv"]["test"] >= 1 and scaled["btcv"]["train"] == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parent") / "abdomen"
    write_phantom("abdomen", path, cases=12, size=24, division=2)
    return path


def test_the_folder_is_a_sound_federation(folder: Path) -> None:
    finding = check(folder)
    assert finding.faults == ()
    federation = read_federation(folder)
    assert federation.labels == LABELS == ("kidney", "liver", "spleen", "pancreas")
    assert {name: site.annotated for name, site in federation.sites.items()} == {
        "word": ("spleen",),
        "abdomenct1k": ("liver",),
        "amos": ("kidney", "pancreas"),
        "btcv": LABELS,
    }
    for site in SITES:
        assert finding.counts[site] == {**cases_per_site(12)[site], "empty": 0}
        about = tomllib.loads((folder / site / "site.toml").read_text())
        assert about["source"].endswith("masks hold all labels")
        with (folder / site / "cases.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len({row["patient"] for row in rows}) == len(rows)


def test_masks_on_disk_are_complete_and_files_say_where_they_lie(folder: Path) -> None:
    case = read_federation(folder).sites["word"].cases[0]
    picture, drawing = read_image(case.image, 3, 1), read_mask(Path(str(case.label)), 3)
    image, mask, spacing = render("word", 0, 24, 0)
    assert np.array_equal(picture.array[0], image) and np.array_equal(drawing.array, mask)
    assert set(np.unique(drawing.array)) == {0, 1, 2, 3, 4}
    assert picture.spacing == drawing.spacing == pytest.approx(spacing)
    assert orientation(picture) == orientation(drawing) == "LPS"


def test_cases_without_a_mask_are_other_patients_at_the_sites_that_train(folder: Path, tmp_path: Path) -> None:
    write_phantom("abdomen", tmp_path / "more", cases=12, size=24, division=2, unlabelled=4)
    finding = check(tmp_path / "more")
    assert finding.faults == () and finding.unlabelled == {"abdomenct1k": 2, "amos": 1, "word": 1}
    plain, more = read_federation(folder), read_federation(tmp_path / "more")
    for name, site in more.sites.items():
        labelled = [case for case in site.cases if case.label is not None]
        assert [case.name for case in labelled] == [case.name for case in plain.sites[name].cases]
        assert {case.split for case in site.cases if case.label is None} <= {"train"}
        assert len({case.patient for case in site.cases}) == len(site.cases)
    first, again = plain.sites["word"].cases[0].image, more.sites["word"].cases[0].image
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(("division", "organs"), [(1, 4), (2, 4), (3, 4)])
def test_a_division_gives_every_organ_to_one_site(division: int, organs: int) -> None:
    given = [organ for labels in abdomen.DIVISIONS[division].values() for organ in labels]
    assert sorted(given) == sorted(LABELS) and len(given) == organs
    assert "btcv" not in abdomen.DIVISIONS[division]


@pytest.mark.parametrize(
    ("kind", "cases", "size", "division", "sentence"),
    [
        ("abdomen", 9, 24, None, r"9 cases are too few; .* ask for 10 or more"),
        ("abdomen", 10, 23, None, r"size 23 is not possible; choose 24 to 512"),
        ("abdomen", 10, 24, 4, r"division 4 is not one of the paper's; choose 1, 2, 3"),
        ("retina", 18, 16, 1, r"--division says who annotates which organ of the abdomen; leave it out for retina"),
    ],
)
def test_mistakes_get_a_sentence(
    tmp_path: Path, kind: str, cases: int, size: int, division: int | None, sentence: str
) -> None:
    with pytest.raises(StudyError, match=sentence):
        write_phantom(kind, tmp_path / "new", cases, size, 0, division=division)
    assert list(tmp_path.iterdir()) == []
