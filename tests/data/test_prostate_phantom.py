"""The prostate phantom is frozen here: what it shows is fixed before any method is tuned on it."""

from __future__ import annotations

import csv
import subprocess
import sys
import tomllib
from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import label as components
from scipy.stats import skew
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from consilium.data.check import check
from consilium.data.images import orientation, read_image, read_mask
from consilium.data.phantoms import prostate, write_phantom
from consilium.data.phantoms.prostate import cases_per_site, render
from consilium.data.phantoms.prostate_tissue import signals
from consilium.data.phantoms.tables import FIRST_INDEX
from consilium.errors import DataError, StudyError

pytestmark = pytest.mark.xdist_group("prostate")  # what its tests share is made once

SITES = ["i2cvb", "msd", "nci3t", "ncidx", "promise12", "prostatex"]
CASES = 6  # per site, at 64 pixels, seed 0
Scan = tuple[NDArray[np.int16], NDArray[np.uint8], tuple[float, float, float]]
Scans = dict[str, list[Scan]]


@pytest.fixture(scope="module")
def scans() -> Scans:
    """The first training cases of every site: image and mask (slice, 64, 64), and spacing."""
    return {site: [render(site, index, 64, 0) for index in range(CASES)] for site in SITES}


def litres(mask: NDArray[np.uint8], spacing: tuple[float, float, float]) -> float:
    return float(mask.sum() * np.prod(spacing) / 1e6)


def glandular(mask: NDArray[np.uint8]) -> NDArray[np.intp]:
    return np.flatnonzero(mask.any(axis=(1, 2)))


# site, mean stored value, median of the gland, the same as a share of the brightest, deviation over mean, skewness,
# gland in ml, slices, slices with gland; tolerances in the test
STATISTICS = [
    ("i2cvb", 227, 125, 0.188, 0.939, 0.77, 68.4, 18.5, 12.2),
    ("msd", 465, 492, 0.521, 0.415, -0.23, 66.2, 20.5, 15.5),
    ("nci3t", 545, 586, 0.477, 0.804, 0.25, 64.3, 21.5, 16.2),
    ("ncidx", 361, 464, 0.321, 0.720, 0.60, 65.0, 18.3, 13.3),
    ("promise12", 564, 665, 0.345, 0.833, 0.95, 65.7, 20.5, 14.7),
    ("prostatex", 802, 833, 0.405, 0.583, -0.01, 59.8, 19.8, 14.2),
]


@pytest.mark.parametrize(
    ("site", "bright", "gland", "share", "contrast", "lean", "millilitres", "slices", "with_gland"), STATISTICS
)
def test_statistics_are_frozen(
    scans: Scans,
    site: str,
    bright: float,
    gland: float,
    share: float,
    contrast: float,
    lean: float,
    millilitres: float,
    slices: float,
    with_gland: float,
) -> None:
    images = [image for image, _, _ in scans[site]]
    medians = np.array([np.median(image[mask > 0]) for image, mask, _ in scans[site]])
    assert np.mean([image.mean() for image in images]) == pytest.approx(bright, rel=0.01)
    assert medians.mean() == pytest.approx(gland, rel=0.01)
    assert (medians / [image.max() for image in images]).mean() == pytest.approx(share, abs=0.01)
    assert np.mean([image.std() / image.mean() for image in images]) == pytest.approx(contrast, abs=0.01)
    assert np.mean([skew(image, axis=None) for image in images]) == pytest.approx(lean, abs=0.02)
    assert np.mean([1000 * litres(mask, spacing) for _, mask, spacing in scans[site]]) == pytest.approx(
        millilitres, rel=0.02
    )
    assert np.mean([len(image) for image in images]) == pytest.approx(slices, abs=0.1)
    assert np.mean([len(glandular(mask)) for _, mask, _ in scans[site]]) == pytest.approx(with_gland, abs=0.1)


def test_the_first_site_is_the_darkest() -> None:
    darkness = {site: gland for site, _, gland, *_ in STATISTICS}
    assert 2.5 * darkness["i2cvb"] < min(gland for site, gland in darkness.items() if site != "i2cvb")


@pytest.mark.parametrize("site", SITES)
def test_cases_of_a_site_differ(scans: Scans, site: str) -> None:
    sizes = [litres(mask, spacing) for _, mask, spacing in scans[site]]
    assert np.std(sizes) / np.mean(sizes) > 0.08
    means = [image.mean() for image, _, _ in scans[site]]
    assert np.std(means) / np.mean(means) > 0.05
    assert len({image.tobytes() for image, _, _ in scans[site]}) == CASES


def test_glands_are_alike_everywhere(scans: Scans) -> None:
    """High similarity: what differs is the picture, hardly the patient."""
    sizes = [np.mean([litres(mask, spacing) for _, mask, spacing in scans[site]]) for site in SITES]
    assert max(sizes) / min(sizes) < 1.2
    for site in SITES:
        for _, mask, _ in scans[site]:
            height, width = (np.flatnonzero(mask.any(axis=axes)).mean() / 63 - 0.5 for axes in ((0, 2), (0, 1)))
            assert abs(height) < 0.12 and abs(width) < 0.10  # in the middle of the picture, in shares of its side


@pytest.mark.parametrize("site", SITES)
def test_a_gland_is_one_piece_that_grows_and_shrinks(scans: Scans, site: str) -> None:
    for image, mask, _ in scans[site]:
        assert 12 <= len(image) <= 24
        assert image.dtype == np.int16 and mask.dtype == np.uint8
        assert image.min() >= 0 and image.max() < 4000
        assert set(np.unique(mask)) == {0, 1}
        assert components(mask)[1] == 1
        at = glandular(mask)
        assert at[0] >= 1 and at[-1] <= len(mask) - 2  # slices without gland at both ends
        areas = mask[at].sum(axis=(1, 2))
        middle = areas[len(at) // 3 : -len(at) // 3].mean()
        assert areas[0] < 0.6 * middle and areas[-1] < 0.8 * middle  # a pointed apex, a blunt base


def test_longer_echoes_darken_all_but_water() -> None:
    short, long = signals(80, 4000, 3.0), signals(150, 4000, 3.0)
    assert short["fat"] == long["fat"] == 1
    assert long["muscle"] < 0.6 * short["muscle"]
    assert long["transition zone"] < 0.9 * short["transition zone"]
    assert long["urine"] > 1.5 * short["urine"]
    assert short["peripheral zone"] > 1.4 * short["transition zone"] > 2 * short["muscle"]


def histograms(images: list[NDArray[np.int16]]) -> NDArray[np.float64]:
    """Percentiles of values and of steps between neighbours, at mean 0 and deviation 1: no shift or gain is left."""
    rows = []
    for image in images:
        normal = (image - image.mean()) / image.std()
        steps = np.abs(np.diff(normal, axis=1))
        rows.append([*np.percentile(normal, range(5, 100, 10)), *np.percentile(steps, range(10, 100, 20))])
    return np.array(rows)


@pytest.mark.slow
def test_sites_are_told_apart_after_normalisation(scans: Scans) -> None:
    """Not all: promise12 is many hospitals in one."""
    fresh = [render(site, FIRST_INDEX["valid"] + index, 64, 0)[0] for site in SITES for index in range(4)]
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(histograms([image for site in SITES for image, _, _ in scans[site]]), np.repeat(SITES, CASES))
    assert classifier.score(histograms(fresh), np.repeat(SITES, 4)) >= 0.75  # by chance 0.17


def test_a_case_is_the_same_bytes_again(scans: Scans) -> None:
    for site in SITES:
        image, mask, spacing = render(site, 5, 64, 0)
        assert image.tobytes() == scans[site][5][0].tobytes()
        assert mask.tobytes() == scans[site][5][1].tobytes()
        assert spacing == scans[site][5][2]
        assert render(site, 5, 64, 1)[0].tobytes() != image.tobytes()


@pytest.mark.parametrize("site", ["i2cvb", "ncidx", "prostatex"])
def test_the_same_patient_at_another_size(scans: Scans, site: str) -> None:
    image, mask, spacing = render(site, 3, 128, 0)
    small, small_mask, small_spacing = scans[site][3]
    assert 128 * spacing[1] == 64 * small_spacing[1]  # the same field of view
    assert spacing[0] == small_spacing[0]
    pooled = image.reshape(-1, 64, 2, 64, 2).mean(axis=(2, 4))
    assert np.corrcoef(pooled.ravel(), small.ravel())[0, 1] > 0.97  # pixel noise and edges, not another patient
    covered = mask.reshape(-1, 64, 2, 64, 2).mean(axis=(2, 4))
    assert np.abs(covered - small_mask).sum() / covered.sum() < 0.12  # half pixels along the edge
    assert litres(mask, spacing) == pytest.approx(litres(small_mask, small_spacing), rel=0.02)


@pytest.mark.parametrize("size", [32, 47])
def test_small_and_odd_sizes(size: int) -> None:
    for site in SITES:
        image, mask, _ = render(site, 0, size, 0)
        assert image.shape == mask.shape == (len(image), size, size)
        assert mask.any()


def test_the_paper_s_sizes() -> None:
    counts = cases_per_site()
    assert list(counts) == SITES
    assert [counts[site]["train"] for site in SITES] == [10, 16, 18, 18, 25, 50]
    assert [counts[site]["valid"] for site in SITES] == [5, 8, 9, 9, 12, 25]
    assert [counts[site]["test"] for site in SITES] == [4, 8, 8, 8, 13, 24]


@pytest.mark.parametrize("cases", [18, 19, 60, 270, 1000])
def test_scaled_sizes(cases: int) -> None:
    counts = [n for splits in cases_per_site(cases).values() for n in splits.values()]
    assert sum(counts) == cases
    assert min(counts) >= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of 24 volumes at 32 pixels, alone in its parent folder."""
    path = tmp_path_factory.mktemp("parent") / "prostate"
    write_phantom("prostate", path, cases=24, size=32)
    return path


def test_the_folder_is_a_sound_federation(folder: Path) -> None:
    card = tomllib.loads((folder / "federation.toml").read_text())
    assert card == {"task": "segmentation", "labels": ["prostate"], "dimensions": 3, "channels": 1, "contains": {}}
    assert [path.name for path in folder.parent.iterdir()] == ["prostate"]  # no temporary folder is left
    finding = check(folder)
    assert finding.faults == ()
    for site in SITES:
        assert finding.counts[site] == {**cases_per_site(24)[site], "empty": 0}
        about = tomllib.loads((folder / site / "site.toml").read_text())
        assert (about["name"], about["licence"]) == (site, "Apache-2.0")
        assert about["source"].startswith("synthetic phantom")
        with (folder / site / "cases.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len({row["patient"] for row in rows}) == len(rows)  # one volume of each patient


def test_files_say_where_they_lie(folder: Path) -> None:
    image_file = folder / "nci3t" / "images" / "nci3t-000000.nii.gz"
    image, mask, spacing = render("nci3t", 0, 32, 0)
    picture = read_image(image_file, 3, 1)
    drawing = read_mask(folder / "nci3t" / "labels" / "nci3t-000000.nii.gz", 3)
    assert np.array_equal(picture.array[0], image) and picture.array.dtype == np.int16
    assert np.array_equal(drawing.array, mask) and drawing.array.dtype == np.uint8
    assert picture.spacing == drawing.spacing == pytest.approx(spacing)
    assert orientation(picture) == orientation(drawing) == "LPS"
    header = nibabel.load(image_file)
    centre = header.affine @ [*((np.array(header.shape) - 1) / 2), 1]
    assert centre == pytest.approx([0, 0, 0, 1])
    assert header.header.get_xyzt_units()[0] == "mm"


def test_a_case_does_not_depend_on_how_many_are_written(folder: Path, tmp_path: Path) -> None:
    write_phantom("prostate", tmp_path, cases=18, size=32)  # into an existing empty folder
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*SITES, "federation.toml"])
    volumes = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.nii.gz"))
    assert len(volumes) == 2 * 18
    for volume in volumes:
        assert (tmp_path / volume).read_bytes() == (folder / volume).read_bytes()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"is not empty; name a new or empty folder"):
        write_phantom("prostate", tmp_path, cases=18, size=32)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_command_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prostate, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_phantom("prostate", tmp_path / "prostate", cases=18, size=32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "cases", "size", "seed", "sentence"),
    [
        ("prostat", 18, 32, 0, r"no phantom 'prostat'; did you mean 'prostate'\?"),
        ("prostate", 17, 32, 0, r"17 cases are too few; .* ask for 18 or more"),
        ("prostate", 18, 31, 0, r"size 31 is not possible; choose 32 to 1024"),
        ("prostate", 18, 1025, 0, r"size 1025 is not possible; choose 32 to 1024"),
        ("prostate", 18, 32, -1, r"seed -1 is negative"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path: Path, kind: str, cases: int, size: int, seed: int, sentence: str) -> None:
    with pytest.raises(StudyError, match=sentence):
        write_phantom(kind, tmp_path / "new", cases, size, seed)
    assert list(tmp_path.iterdir()) == []


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, consilium.data.phantoms.prostate as p; p.render('msd', 0, 32, 0); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
