"""The digits phantom is frozen here: what it shows is fixed before any method is tuned on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import RidgeClassifier

from consilium.data.check import check
from consilium.data.phantoms import write_phantom
from consilium.data.phantoms.digits import cases_per_site, render
from consilium.data.phantoms.digits_strokes import DIGITS
from consilium.data.site_folder import read_federation
from consilium.errors import StudyError

CASES = 40  # per class, at 28 pixels, seed 0
Pictures = dict[str, NDArray[np.uint8]]


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    """The first training cases of every class at the one site: (n, 28, 28)."""
    return {label: np.stack([render(label, 0, index, 28, 0) for index in range(CASES)]) for label in DIGITS}


# class, mean value, share of bright pixels (above 100), width and height of the bright part in pixels
STATISTICS: list[tuple[str, float, float, float, float]] = [
    ("0", 46.3, 0.1517, 16.52, 20.70),
    ("1", 33.3, 0.0872, 10.35, 19.93),
    ("2", 48.4, 0.1619, 17.18, 21.32),
    ("3", 44.5, 0.1430, 15.85, 21.10),
    ("4", 48.6, 0.1574, 16.75, 20.02),
    ("5", 49.7, 0.1619, 16.00, 21.35),
    ("6", 44.1, 0.1394, 14.07, 19.57),
    ("7", 40.9, 0.1248, 16.10, 20.02),
    ("8", 48.1, 0.1625, 15.22, 20.85),
    ("9", 49.0, 0.1643, 14.78, 20.43),
]


def sides(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Mean width and height between the outermost columns and rows that have two bright pixels."""
    bright = images > 100
    lengths = []
    for axis in (1, 2):
        lines = bright.sum(axis=axis) >= 2
        lengths.append(np.mean([np.ptp(np.flatnonzero(line)) + 1 if line.any() else 0 for line in lines]))
    return float(lengths[0]), float(lengths[1])


@pytest.mark.parametrize(("label", "mean", "bright", "wide", "high"), STATISTICS)
def test_statistics_are_frozen(
    pictures: Pictures, label: str, mean: float, bright: float, wide: float, high: float
) -> None:
    images = pictures[label]
    assert images.mean() == pytest.approx(mean, abs=0.5)
    assert (images > 100).mean() == pytest.approx(bright, abs=0.003)
    assert sides(images) == pytest.approx((wide, high), abs=0.3)


def test_cases_of_a_class_differ(pictures: Pictures) -> None:
    for images in pictures.values():
        assert len({image.tobytes() for image in images}) == CASES
        assert images.mean(axis=(1, 2)).std() > 4


def test_a_linear_model_learns_something_but_not_all(pictures: Pictures) -> None:
    """Neither noise nor trivial: well above the 0.1 of chance from 40 pictures of each class, and far from perfect."""
    labels = np.repeat(list(DIGITS), CASES)
    seen = np.concatenate([pictures[label] for label in DIGITS])
    fresh = np.stack([render(label, 0, 2_000_000 + i, 28, 0) for label in DIGITS for i in range(CASES)])
    seen, fresh = (x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(len(x), -1) for x in (seen, fresh))
    assert 0.5 < RidgeClassifier(alpha=1e5).fit(seen, labels).score(fresh, labels) < 0.9


def test_a_case_is_the_same_bytes_again(pictures: Pictures) -> None:
    for label in DIGITS:
        again = render(label, 0, 7, 28, 0)
        assert again.tobytes() == pictures[label][7].tobytes()
        for other in (render(label, 0, 7, 28, 1), render(label, 1, 7, 28, 0)):
            assert other.tobytes() != again.tobytes()


def test_the_same_digit_at_another_size(pictures: Pictures) -> None:
    """Stains and grain differ; the digit is the same one, and not just one of its class."""
    own, other = [], []
    for label in DIGITS:
        small = render(label, 0, 3, 112, 0).reshape(28, 4, 28, 4).mean(axis=(1, 3)).ravel()
        own.append(np.corrcoef(small, pictures[label][3].ravel())[0, 1])
        other.append(np.corrcoef(small, pictures[label][4].ravel())[0, 1])
    assert np.mean(own) > 0.8
    assert np.mean(other) < 0.5


def test_twelve_sites_of_two_classes() -> None:
    plan = cases_per_site()
    assert list(plan) == [f"site{i:02d}" for i in range(1, 13)]
    assert all(len(labels) == 2 for splits in plan.values() for labels in splits.values())
    assert {label for splits in plan.values() for label in splits["train"]} == set(DIGITS)
    totals = {split: sum(sum(s[split].values()) for s in plan.values()) for split in ("train", "valid", "test")}
    assert sum(totals.values()) == 7000
    assert totals == pytest.approx({"train": 5100, "valid": 900, "test": 1000}, abs=5)


@pytest.mark.parametrize(("cases", "sites"), [(36, None), (37, 12), (500, None), (3, 1), (1000, 1), (30, 5), (900, 40)])
def test_scaled_sizes(cases: int, sites: int | None) -> None:
    plan = cases_per_site(cases, sites)
    counts = [sum(labels.values()) for splits in plan.values() for labels in splits.values()]
    assert sum(counts) == cases
    assert min(counts) >= 1


@pytest.mark.parametrize("sites", [None, 1])
def test_the_folder_is_a_sound_federation(sites: int | None, tmp_path: Path) -> None:
    write_phantom("digits", tmp_path / "d", cases=60, size=9, sites=sites)
    finding = check(tmp_path / "d")
    assert finding.faults == ()
    assert not [note for note in finding.notes if "also in" in note]
    federation = read_federation(tmp_path / "d")
    assert (federation.task, federation.labels, federation.channels) == ("classification", tuple("0123456789"), 1)
    assert list(federation.sites) == (["digits"] if sites else [f"site{i:02d}" for i in range(1, 13)])
    assert sum(map(sum, (splits.values() for splits in finding.counts.values()))) == 60
    (site, *_) = federation.sites.values()
    stack = np.load(site.folder / "images/digits.npy")
    assert (stack.shape, stack.dtype) == ((len(site.cases), 9, 9), np.uint8)


@pytest.mark.parametrize(
    ("kind", "cases", "size", "seed", "sites", "sentence"),
    [
        ("digits", 35, 28, 0, None, "35 cases are too few; .* ask for 36 or more"),
        ("digits", 60, 7, 0, None, "size 7 is not possible; choose 8 to 512"),
        ("digits", 60, 28, -1, None, "seed -1 is negative"),
        ("digits", 60, 28, 0, 0, "0 sites are not possible"),
        ("retina", 60, 28, 0, 3, "the retina phantom has sites of its own; --sites is for digits"),
    ],
)
def test_mistakes_get_a_sentence(
    kind: str, cases: int, size: int, seed: int, sites: int | None, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(StudyError, match=sentence):
        write_phantom(kind, tmp_path / "new", cases, size, seed, sites)
    assert list(tmp_path.iterdir()) == []
