"""Importers on trees that somebody else wrote: what was paired, left out, and where every voxel went."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests import published_trees as trees
from tests.cli.terminal import call

pytestmark = pytest.mark.filterwarnings("ignore:The string .* is unlikely to represent:UserWarning")

Tree = Callable[[Path], Path]


def imported(name: str, write: Tree, tmp_path: Path, *options: str, below: str = "") -> tuple[Path, str]:
    source = write(tmp_path / "raw") / below
    done = call("import", name, source, "--to", tmp_path / "new", *options)
    assert done.status == 0, done.err
    return tmp_path / "new", done.err


def cases(site: Path) -> dict[str, dict[str, str]]:
    with (site / "cases.csv").open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def picture(path: Path) -> NDArray[Any]:
    return np.asarray(Image.open(path))


def world(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values and the scanner's coordinates (RAS) of the labelled voxels' middle."""
    volume = nibabel.load(path)  # type: ignore[attr-defined]
    values = np.asarray(volume.dataobj)  # type: ignore[attr-defined]
    middle = np.argwhere(values > 0).mean(axis=0)[:3] if (values > 0).any() else np.zeros(3)
    return values, volume.affine[:3, :3] @ middle + volume.affine[:3, 3]  # type: ignore[attr-defined]


FUNDUS: list[tuple[str, Tree, dict[str, int], str]] = [
    ("drishti", trees.drishti, {"drishti": 7}, ""),
    ("riga", trees.riga, {"binrushed": 4, "magrabia": 4, "messidor": 3}, "14 files of BinRushed1"),
    ("rimone", trees.rimone_r3, {"rimone": 5}, ""),
    ("rimone", trees.rimone_dl, {"rimone": 4}, "4 pictures of the partition by hospital"),
    ("refuge", trees.refuge, {"refuge": 8}, "3 photographs of the test"),
]


@pytest.mark.parametrize(("name", "write", "sites", "left_out"), FUNDUS, ids=[f[1].__name__ for f in FUNDUS])
def test_fundus_sets(name: str, write: Tree, sites: dict[str, int], left_out: str, tmp_path: Path) -> None:
    made, said = imported(name, write, tmp_path)
    assert {path.parent.name: len(cases(path.parent)) for path in made.glob("*/cases.csv")} == sites
    assert left_out in said
    disc, cup = trees.ellipse(trees.DISC) > 0, trees.ellipse(trees.CUP) > 0
    for site in sites:
        for row in cases(made / site).values():
            mask = picture(made / site / row["label"])
            assert picture(made / site / row["image"]).shape == (trees.HEIGHT, trees.WIDTH, 3)
            # soft maps and votes move the edge by the two pixels the graders differ in, no more
            assert set(np.unique(mask)) == {0, 1, 2}
            assert _overlap(mask > 0, disc) > 0.88 and _overlap(mask == 2, cup) > 0.8, (row["case"], name)


def _overlap(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def test_soft_maps_of_drishti_begin_where_two_of_four_experts_agree(tmp_path: Path) -> None:
    made, _ = imported("drishti", trees.drishti, tmp_path)
    mask = picture(made / "drishti/labels/drishtiGS_001.png")
    np.testing.assert_array_equal(mask > 0, trees.soft(trees.DISC) >= 128)
    np.testing.assert_array_equal(mask == 2, trees.soft(trees.CUP) >= 128)


def test_a_grader_s_missing_picture_is_named(tmp_path: Path) -> None:
    _, said = imported("riga", trees.riga, tmp_path)
    assert (
        "left out: 1 of 6 graders of MESSIDOR/image3prime.tif: there is no picture of theirs; the others vote." in said
    )


def test_rimone_r2_draws_the_disc_alone(tmp_path: Path) -> None:
    made, said = imported("rimone", trees.rimone_r2, tmp_path)
    assert "rimone: 3 train, 1 valid, 1 test; annotates disc" in said
    assert 'annotated = ["disc"]' in (made / "rimone/site.toml").read_text()
    assert set(np.unique(picture(made / "rimone/labels/Im001.png"))) == {0, 1}


GLANDS: list[tuple[str, Tree, str, dict[str, int], str, str]] = [
    ("i2cvb", trees.i2cvb, "", {"i2cvb": 4}, "patient 428260", "dicom"),
    ("nci-isbi", trees.nci_isbi, "", {"nci3t": 3, "ncidx": 3}, "ProstateDx-01-0055", "dicom"),
    ("promise12", trees.promise12, "", {"promise12": 4}, "1 case of the test", "dicom"),
    ("msd-prostate", trees.msd_prostate, "", {"msd": 4}, "1 volume without labels", "nifti"),
    ("prostatex", trees.prostatex_masks, "", {"prostatex": 4}, "", "nifti"),
    ("prostatex", trees.prostatex_seg, "", {"prostatex": 3}, "", "dicom"),
]


@pytest.mark.parametrize(
    ("name", "write", "below", "sites", "left_out", "frame"), GLANDS, ids=[g[1].__name__ for g in GLANDS]
)
def test_prostate_sets(
    name: str, write: Tree, below: str, sites: dict[str, int], left_out: str, frame: str, tmp_path: Path
) -> None:
    made, said = imported(name, write, tmp_path, below=below)
    assert {path.parent.name: len(cases(path.parent)) for path in made.glob("*/cases.csv")} == sites
    assert left_out in said
    z, y, x = (np.mean([place.start, place.stop - 1]) for place in trees.GLAND)
    if frame == "dicom":  # 0.5 mm pixels, 3 mm slices, first corner at (-5, -6, 10) towards left and back
        there = np.array([5 - 0.5 * x, 6 - 0.5 * y, 10 + 3 * z])
    else:
        there = np.array([-0.7 * x, -0.7 * y, 5 * z])
    for site in sites:
        for row in cases(made / site).values():
            mask, middle = world(made / site / row["label"])
            image, _ = world(made / site / row["image"])
            assert image.shape == mask.shape and set(np.unique(mask)) == {0, 1}
            assert (mask > 0).sum() == 3 * 8 * 8
            np.testing.assert_allclose(middle, there, atol=1e-3)
            # the gland is 300 brighter than what lies around it: a mask that slid would mix the two
            assert image[mask > 0].min() >= 400 > image[mask == 0].max()


ORGANS: list[tuple[str, Tree, tuple[str, ...], int, str, tuple[tuple[int, ...], ...]]] = [
    # the stored values of kidney, liver, spleen and pancreas
    ("word", trees.word, (), 6, "1 volume of the test", ((3, 4), (1,), (2,), (8,))),
    ("abdomenct1k", trees.abdomenct1k, ("--yes",), 4, "900", ((2,), (1,), (3,), (4,))),
    ("amos", trees.amos, (), 3, "MR", ((2, 3), (6,), (1,), (10,))),
    ("btcv", trees.btcv, (), 3, "1 volume of the challenge's test", ((2, 3), (6,), (1,), (11,))),
]


@pytest.mark.parametrize(
    ("name", "write", "options", "count", "left_out", "values"), ORGANS, ids=[o[0] for o in ORGANS]
)
def test_abdominal_sets(
    name: str,
    write: Tree,
    options: tuple[str, ...],
    count: int,
    left_out: str,
    values: tuple[tuple[int, ...], ...],
    tmp_path: Path,
) -> None:
    made, said = imported(name, write, tmp_path, *options)
    assert len(cases(made / name)) == count and left_out in said
    stored = trees.organs(16)
    wanted = np.zeros_like(stored)
    for number, stored_as in enumerate(values, start=1):
        wanted[np.isin(stored, stored_as)] = number
    for row in cases(made / name).values():
        np.testing.assert_array_equal(world(made / name / row["label"])[0], wanted)
        assert world(made / name / row["image"])[0].min() == -1000


def test_an_abdominal_case_without_its_mask_is_a_doubt(tmp_path: Path) -> None:
    done = call("import", "abdomenct1k", trees.abdomenct1k(tmp_path / "raw"), "--to", tmp_path / "new")
    assert done.status == 2 and "Case_00900" in done.err and "--yes" in done.err
    assert not (tmp_path / "new").exists()


def test_nnunet_of_two_nrrd_channels(tmp_path: Path) -> None:
    made, _ = imported("nnunet", trees.nnunet, tmp_path, below="Dataset123_Knee")
    (site,) = (path.parent for path in made.glob("*/cases.csv"))
    assert len(cases(site)) == 4
    row = next(iter(cases(site).values()))
    image, _ = world(site / row["image"])
    assert image.shape == (20, 16, 5, 2) and (image[..., 1] == image[..., 0] + 1).all()
    assert {int(v) for v in np.unique(world(site / row["label"])[0])} == {0, 1, 2}


def test_bids_keeps_the_sessions_of_a_subject_together(tmp_path: Path) -> None:
    made, said = imported("bids", trees.bids, tmp_path, "--images", "T1w", "--labels", "left,right", "--yes")
    (site,) = (path.parent for path in made.glob("*/cases.csv"))
    rows = cases(site)
    assert len(rows) == 4 and "sub-04" in said
    of_one = [row for row in rows.values() if "01" in row["patient"]]
    assert len(of_one) == 2 and len({row["split"] for row in of_one}) == 1
