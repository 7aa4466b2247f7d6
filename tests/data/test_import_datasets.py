"""Every dataset of the papers, as a small tree in its publisher's layout and formats, with one oddity in each."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.data import importers
from consilium.data.check import check
from consilium.data.importers import import_federation, import_found
from consilium.data.importers.abdomenct1k import importer as abdomenct1k
from consilium.data.importers.federations import DATASETS
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.writing import Imported, Writing
from consilium.errors import DataError, StudyError, UserError
from tests.dicom_files import write_seg, write_series
from tests.raw_trees import (
    block,
    case_of,
    disc_and_cup,
    image_of,
    mask_of,
    save_itk,
    save_nifti,
    save_picture,
    some,
    split_counts,
)  # fmt: skip

DISC, CUP = disc_and_cup()
BOTH = DISC.astype(np.uint8) + CUP
SHAPE = (4, 8, 6)
VOLUME = some(*SHAPE, kind="int16")
GLAND = (block(labels=2) > 0).astype(np.uint8)


def photo(path: Path, width: int = 16) -> Path:
    return save_picture(path, some(16, width, 3))


# ------------------------------------------------------------------------------------------------- the raw trees


def drishti(raw: Path) -> None:
    """Oddities: test photographs in sub-folders, their maps in Test_GT, a macOS file beside them."""
    for part, names, sub, truth in (("Training", (2, 4, 8), "", "GT"), ("Test", (1, 3), "GLAUCOMA/", "Test_GT")):
        for number in names:
            case = f"drishtiGS_{number:03d}"
            photo(raw / f"{part}/Images/{sub}{case}.png")
            for kind, region in (("ODseg", DISC), ("cupseg", CUP)):
                soft = region * 191 + (~region) * 64  # three of four experts inside, one outside
                save_picture(raw / f"{part}/{truth}/{case}/SoftMap/{case}_{kind}Softmap.png", soft)
            (raw / f"{part}/{truth}/{case}/AvgBoundary").mkdir()
    (raw / "Training/Images/._drishtiGS_002.png").write_bytes(b"macOS")


def ring(size: int, radius: int, at: int) -> Any:
    """A closed line, two pixels wide."""
    y, x = np.mgrid[:size, :size]
    away = np.hypot(y - at, x - at)
    return (away <= radius) & (away > radius - 2)


def riga(raw: Path) -> None:
    """Oddities: outlines instead of masks, a capital I, BinRushed1 beside its correction, one grader's open line."""
    pixels = some(32, 32, 3) // 2
    groups = {"BinRushed/BinRushed1-Corrected": "jpg", "BinRushed/BinRushed1": "jpg", "Magrabia/MagrabiaMale": "tif",
              "MESSIDOR": "tif"}  # fmt: skip
    for group, ending in groups.items():
        for number in (1, 2, 3):
            save_picture(raw / group / f"image{number}prime.{ending}", pixels)
            for rater in range(1, 7):
                lines = ring(32, 12, 16) | ring(32, 6, 16)
                if rater == 3:
                    lines[:, 14:] = False  # open
                if rater == 5:
                    lines = ring(32, 14, 16) | ring(32, 8, 16)
                drawn = pixels.copy()
                drawn[lines] = 255
                capital = "I" if rater == 1 and ending == "tif" else "i"
                save_picture(raw / group / f"{capital}mage{number}-{rater}.{ending}", drawn)


def rimone(raw: Path) -> None:
    """r3. Oddity: stereo pairs, twice as wide as their masks, and text files beside the masks."""
    for part, letter in (("Healthy", "N"), ("Glaucoma and suspects", "G")):
        for number, eye in ((1, "L"), (1, "R"), (2, "L"), (3, "R")):
            case = f"{letter}-{number}-{eye}"
            photo(raw / part / f"Stereo Images/{case}.jpg", 32)
            for kind, region in (("Disc", DISC), ("Cup", CUP)):
                save_picture(raw / part / f"Average_masks/{case}-{kind}-Avg.png", region * 255)
                (raw / part / f"Average_masks/{case}-{kind}-Avg.txt").write_text("8 8 4")
                save_picture(raw / part / f"Expert1_masks/{case}-{kind}-exp1.png", region * 0)


def refuge(raw: Path) -> None:
    """Oddities: other folders in each part, a capital suffix, pictures that illustrate the masks."""
    stored = np.where(CUP, 0, np.where(DISC, 128, 255))
    for images, masks, names in (
        ("Training400/Glaucoma", "Annotation-Training400/Disc_Cup_Masks/Glaucoma", ("g0001", "g0002")),
        ("Training400/Non-Glaucoma", "Annotation-Training400/Disc_Cup_Masks/Non-Glaucoma", ("n0001", "n0002")),
        ("REFUGE-Validation400", "REFUGE-Validation400-GT/Disc_Cup_Masks", ("V0001", "V0002")),
        ("Test400", "REFUGE-Test-GT/Disc_Cup_Masks/G", ("T0001",)),
    ):
        for name in names:
            photo(raw / images / f"{name}.jpg")
            save_picture(raw / masks / f"{name}.{'BMP' if name == 'V0002' else 'bmp'}", stored)
            photo(raw / masks.split("/")[0] / f"Disc_Cup_Fovea_Illustration/{name}.jpg")


def i2cvb(raw: Path) -> None:
    """Oddities: a patient to drop, and masks of which only the slices with gland are there."""
    for vendor, number in (("GE", 387), ("GE", 428260), ("Siemens", 1036), ("Siemens", 416)):
        place = raw / vendor / f"Patient {number}"
        write_series(place / "T2W", VOLUME, intercept=0.0)
        write_series(place / "GT/prostate", GLAND[1:3] * 255, intercept=0.0, first=1)
        write_series(place / "GT/cap", GLAND[1:3] * 0 + 1, intercept=0.0, first=1)


def msd_prostate(raw: Path) -> None:
    """Oddities: macOS files beside the volumes, two channels, a test without labels."""
    for number in (0, 1, 2, 4):
        save_nifti(raw / f"Task05_Prostate/imagesTr/prostate_{number:02d}.nii.gz", np.stack([VOLUME, VOLUME + 7]))
        save_nifti(raw / f"Task05_Prostate/labelsTr/prostate_{number:02d}.nii.gz", block(labels=2))
        (raw / f"Task05_Prostate/imagesTr/._prostate_{number:02d}.nii.gz").write_bytes(b"macOS")
    save_nifti(raw / "Task05_Prostate/imagesTs/prostate_03.nii.gz", np.stack([VOLUME, VOLUME]))


def nci_isbi(raw: Path) -> None:
    """Oddities: the case with a wrong mask, a corrected mask under another name, and test images without masks."""
    for collection, kind, numbers in (("Prostate-3T", "3T", (1, 2, 3)), ("PROSTATE-DIAGNOSIS", "Dx", (1, 6, 7, 55))):
        for number in numbers:
            case = f"Prostate{kind}-01-{number:04d}"
            place = raw / f"manifest-1/{collection}/{case}/01-01-2000-1/4.000-T2-1"
            write_series(place, VOLUME, intercept=0.0, ImageOrientationPatient=[1, 0, 0, 0, 1, 0])
            mask = block(labels=2)[:2] if number == 55 else block(labels=2)
            if (kind, number) != ("3T", 3):
                end = "_correctedLabels" if number == 6 else ""
                save_itk(raw / f"NCI-ISBI 2013 Prostate Challenge - Training/Training/{case}{end}.nrrd", mask)


def promise12(raw: Path) -> None:
    """Oddity: the parts of the training are folders of their own; the test has no masks."""
    for number in (0, 1, 13, 26):
        part = raw / f"TrainingData_Part{1 + number // 13}"
        save_itk(part / f"Case{number:02d}.mhd", VOLUME)
        save_itk(part / f"Case{number:02d}_segmentation.mhd", GLAND)
    save_itk(raw / "TestData/Case40.mhd", VOLUME)


def prostatex(raw: Path) -> None:
    """The NIfTI release. Oddities: a mask whose number has other zeros, and a mask stored upside down."""
    for number, mask in ((0, "0000"), (1, "0001"), (12, "012"), (204, "0204")):
        save_nifti(raw / f"Images/ProstateX-{number:04d}_t2_tse_tra_4.nii.gz", VOLUME)
        affine = np.diag([0.5, 0.75, 3.0, 1.0])
        affine[:3, 3] = (10, -20, 30)
        stored = GLAND
        if number == 1:
            stored, affine[2, 2], affine[2, 3] = GLAND[::-1], -3.0, 30 + 3 * 3
        save_nifti(raw / f"mask_prostate/ProstateX-{mask}.nii.gz", stored, affine)
        save_nifti(raw / f"mask_pz/ProstateX-{mask}.nii.gz", GLAND)


def organs(values: dict[int, int]) -> Any:
    """A mask with a voxel row of each of a dataset's values, and where they are."""
    mask = np.zeros(SHAPE, np.uint8)
    for place, value in enumerate(values):
        mask[1:3, place % 8, 1 + place // 8] = value
    return mask


WORD = {1: 2, 2: 3, 3: 1, 4: 1, 5: 0, 8: 4, 16: 0}  # stored: kidney 1, liver 2, spleen 3, pancreas 4
CT1K = {1: 2, 2: 1, 3: 3, 4: 4}
AMOS = {1: 3, 2: 1, 3: 1, 4: 0, 6: 2, 10: 4, 15: 0}
BTCV = {1: 3, 2: 1, 3: 1, 6: 2, 11: 4, 13: 0}


def word(raw: Path) -> None:
    """Oddity: the test has labels too, which the paper does not use."""
    for part, numbers in (("Tr", (2, 5, 6, 7, 8, 9, 10)), ("Val", (1, 3, 4)), ("Ts", (12,))):
        for number in numbers:
            save_nifti(raw / f"WORD-V0.1.0/images{part}/word_{number:04d}.nii.gz", VOLUME)
            save_nifti(raw / f"WORD-V0.1.0/labels{part}/word_{number:04d}.nii.gz", organs(WORD))


def abdomenct_1k(raw: Path) -> None:
    """Oddity: images lie in several folders, as the parts of the download."""
    for number in (1, 2, 3, 400, 401):
        part = raw / f"AbdomenCT-1K-ImagePart{1 + number // 400}"
        save_nifti(part / f"Case_{number:05d}_0000.nii.gz", VOLUME)
        save_nifti(raw / f"Mask/Case_{number:05d}.nii.gz", organs(CT1K))


def amos(raw: Path) -> None:
    """Oddities: MR among CT, and a validation that the paper does not use."""
    for part, numbers in (("Tr", (1, 4, 5, 6, 507)), ("Va", (8,))):
        for number in numbers:
            save_nifti(raw / f"amos22/images{part}/amos_{number:04d}.nii.gz", VOLUME)
            save_nifti(raw / f"amos22/labels{part}/amos_{number:04d}.nii.gz", organs(AMOS))
    save_nifti(raw / "amos22/imagesTs/amos_0009.nii.gz", VOLUME)


def btcv(raw: Path) -> None:
    """Oddity: the test volumes have numbers like the others, but no labels."""
    for number in (1, 2, 40):
        save_nifti(raw / f"RawData/Training/img/img{number:04d}.nii.gz", VOLUME)
        save_nifti(raw / f"RawData/Training/label/label{number:04d}.nii.gz", organs(BTCV).astype(np.float32))
    save_nifti(raw / "RawData/Testing/img/img0061.nii.gz", VOLUME)


TREES: dict[str, Callable[[Path], None]] = {
    "drishti": drishti, "riga": riga, "rimone": rimone, "refuge": refuge, "i2cvb": i2cvb, "msd-prostate": msd_prostate,
    "nci-isbi": nci_isbi, "promise12": promise12, "prostatex": prostatex, "word": word, "abdomenct1k": abdomenct_1k,
    "amos": amos, "btcv": btcv,
}  # fmt: skip


def bring(name: str, place: Path, options: ImportOptions | None = None, how: Writing | None = None) -> Imported:
    """Makes the tree, imports it, and holds that `check` finds nothing wrong and nothing out of place."""
    TREES[name](place / "raw")
    imported = import_found(name, [place / "raw"], place / "to", options, how)
    found = check(place / "to")
    assert found.faults == ()
    assert not [note for note in found.notes if "another place" in note]
    return imported


# -------------------------------------------------------------------------------------------------------- retina


def test_every_dataset_has_a_tree() -> None:
    assert TREES.keys() == DATASETS.keys()


def test_every_importer_s_folder_has_the_same_files() -> None:
    home = Path(importers.__file__).parent
    folders = [path for path in home.iterdir() if (path / "importer.py").exists()]
    assert {path.name.replace("_", "-") for path in folders} == {*importers.FINDERS, *importers.STACKS}
    for path in folders:
        assert {"README.md", "importer.py", "licence.txt"} <= {file.name for file in path.iterdir()}, path.name
        readme = (path / "README.md").read_text(encoding="utf-8")
        for word in ("Source", "Terms", "Citation", "xpected layout"):
            assert word in readme, f"{path.name}/README.md says nothing of its {word}"


def test_drishti(tmp_path: Path) -> None:
    federation = bring("drishti", tmp_path).federation
    assert (federation.labels, federation.contains, federation.channels) == (("disc", "cup"), {"disc": ("cup",)}, 3)
    assert [case.name[-3:] for case in federation.sites["drishti"].cases] == ["001", "002", "003", "004", "008"]
    assert split_counts(federation, "drishti") == (3, 1, 1)  # the paper draws anew
    np.testing.assert_array_equal(mask_of(federation, "drishtiGS_001"), BOTH)
    np.testing.assert_array_equal(image_of(federation, "drishtiGS_003"), np.moveaxis(some(16, 16, 3), -1, 0))


def test_published_splits_are_kept_if_asked(tmp_path: Path) -> None:
    federation = bring("drishti", tmp_path, how=Writing(split="published")).federation
    assert split_counts(federation, "drishti") == (3, 0, 2)


def test_riga(tmp_path: Path) -> None:
    imported = bring("riga", tmp_path)
    federation = imported.federation
    assert {name: len(site.cases) for name, site in federation.sites.items()} == {
        "binrushed": 3, "magrabia": 3, "messidor": 3,
    }  # fmt: skip
    disc, cup = disc_and_cup(32, (16, 16), (12, 6))
    np.testing.assert_array_equal(mask_of(federation, "MagrabiaMale-image2"), disc + 0 + cup)
    assert case_of(federation, "image3").image.suffix == ".tif"
    assert sum("rater left out" in line and "-3." in line for line in imported.said) == 9
    assert not any("of 6 graders" in line for line in imported.said)
    assert any("21 files of BinRushed1, which BinRushed1-Corrected replaces" in line for line in imported.said)


def test_riga_as_masks_and_one_grader(tmp_path: Path) -> None:
    """Mirrors ship masks; the outer region is the disc whichever values they have."""
    for rater, values in (("1", (0, 128, 255)), ("2", (255, 128, 0))):
        photo(tmp_path / "raw/MESSIDOR/image1prime.tif")
        save_picture(tmp_path / f"raw/MESSIDOR/image1-{rater}.tif", np.array(values)[BOTH])
    federation = import_found("riga", [tmp_path / "raw"], tmp_path / "to", how=Writing(rater="2")).federation
    np.testing.assert_array_equal(mask_of(federation, "image1"), BOTH)


def test_rimone_r3(tmp_path: Path) -> None:
    federation = bring("rimone", tmp_path).federation
    assert federation.sites["rimone"].annotated == ("disc", "cup")
    assert case_of(federation, "G-1-L").patient == case_of(federation, "G-1-R").patient == "G-1"
    assert case_of(federation, "G-1-L").split == case_of(federation, "G-1-R").split
    assert image_of(federation, "N-2-L").shape == (3, 16, 16)
    left = np.asarray(Image.open(tmp_path / "raw/Healthy/Stereo Images/N-2-L.jpg"))[:, :16]
    np.testing.assert_array_equal(image_of(federation, "N-2-L"), np.moveaxis(left, -1, 0))
    np.testing.assert_array_equal(mask_of(federation, "N-2-L"), BOTH)


def test_rimone_dl_r2_and_r1(tmp_path: Path) -> None:
    for part in ("partitioned_randomly", "partitioned_by_hospital"):
        for name, place in (("r1_Im001", "training_set/glaucoma"), ("r3_N-5-L", "test_set/normal")):
            photo(tmp_path / "DL" / part / place / f"{name}.png")
    for name, place in (("r1_Im001", "glaucoma"), ("r3_N-5-L", "normal")):
        for kind, region in (("Disc", DISC), ("Cup", CUP)):
            save_picture(
                tmp_path / f"DL/RIM-ONE_DL_reference_segmentations/{place}/{name}-1-{kind}-T.png", region * 255
            )
    for place, names in (("Normal", ("Im001", "Im002")), ("Glaucoma and glaucoma suspicious", ("Im256",))):
        for name in names:
            photo(tmp_path / "r2" / place / f"{name}.jpg")
            save_picture(tmp_path / "r2" / place / f"{name}-gs_mask.jpg", DISC * 255)
            photo(tmp_path / "r1" / place / f"{name}.bmp")
            for rater in range(1, 6):
                save_picture(tmp_path / "r1" / place / f"{name}-exp{rater}.bmp", (DISC if rater < 4 else CUP) * 255)
    made = {name: import_found("rimone", [tmp_path / name], tmp_path / f"to-{name}",
                               how=Writing(split="published")).federation for name in ("DL", "r2", "r1")}  # fmt: skip
    assert {c.name: (c.patient, c.split) for c in made["DL"].sites["rimone"].cases} == {
        "r1_Im001": ("r1_Im001", "train"), "r3_N-5-L": ("r3_N-5", "test"),
    }  # fmt: skip
    np.testing.assert_array_equal(mask_of(made["DL"], "r3_N-5-L"), BOTH)
    for release in ("r2", "r1"):
        assert made[release].sites["rimone"].annotated == ("disc",)
        np.testing.assert_array_equal(mask_of(made[release], "Im256"), DISC)
    with pytest.raises(DataError, match=r"holds DL and r2 and r1 of RIM-ONE; give the folder of one release"):
        import_found("rimone", [tmp_path], tmp_path / "to")


def test_refuge(tmp_path: Path) -> None:
    imported = bring("refuge", tmp_path)
    assert {case.name for case in imported.federation.sites["refuge"].cases} == {
        "g0001", "g0002", "n0001", "n0002", "V0001", "V0002",
    }  # fmt: skip
    assert "left out: 1 photograph of the test, which the paper does not use (--all takes them)." in imported.said
    np.testing.assert_array_equal(mask_of(imported.federation, "V0002"), BOTH)
    every = import_found(
        "refuge", [tmp_path / "raw"], tmp_path / "all", ImportOptions(all=True), Writing(split="published")
    )
    assert split_counts(every.federation, "refuge") == (4, 2, 1)


# ------------------------------------------------------------------------------------------------------ prostate


def test_i2cvb(tmp_path: Path) -> None:
    imported = bring("i2cvb", tmp_path)
    federation = imported.federation
    assert [case.name for case in federation.sites["i2cvb"].cases] == ["patient1036", "patient387", "patient416"]
    assert "left out: patient 428260: a slice of its mask is missing." in imported.said
    np.testing.assert_array_equal(image_of(federation, "patient387")[0], VOLUME[::-1])
    np.testing.assert_array_equal(mask_of(federation, "patient387"), GLAND[::-1])


def test_msd_prostate(tmp_path: Path) -> None:
    imported = bring("msd-prostate", tmp_path)
    federation = imported.federation
    assert split_counts(federation, "msd") == (2, 1, 1)
    np.testing.assert_array_equal(image_of(federation, "prostate_04")[0], VOLUME)
    np.testing.assert_array_equal(mask_of(federation, "prostate_04"), GLAND)
    affine = nibabel.load(case_of(federation, "prostate_04").image).affine
    np.testing.assert_allclose(affine[:3, 3], (10, -20, 30))
    assert "left out: 1 volume without labels, of the challenge's test." in imported.said


def test_nci_isbi(tmp_path: Path) -> None:
    imported = bring("nci-isbi", tmp_path)
    federation = imported.federation
    assert {site: [c.name[-4:] for c in f.cases] for site, f in federation.sites.items()} == {
        "nci3t": ["0001", "0002"], "ncidx": ["0001", "0006", "0007"],
    }  # fmt: skip
    assert "left out: ProstateDx-01-0055: its mask has fewer slices than its image." in imported.said
    assert "left out: 1 patient without a mask, such as Prostate3T-01-0003." in imported.said
    np.testing.assert_array_equal(image_of(federation, "ProstateDx-01-0006")[0], VOLUME)
    np.testing.assert_array_equal(mask_of(federation, "ProstateDx-01-0006"), GLAND)


def test_promise12(tmp_path: Path) -> None:
    imported = bring("promise12", tmp_path)
    federation = imported.federation
    assert [case.name for case in federation.sites["promise12"].cases] == ["Case00", "Case01", "Case13", "Case26"]
    assert "left out: 1 case of the test, without masks." in imported.said
    np.testing.assert_array_equal(image_of(federation, "Case26")[0], VOLUME)
    np.testing.assert_array_equal(mask_of(federation, "Case26"), GLAND)


def test_a_training_case_without_a_mask_is_a_doubt(tmp_path: Path) -> None:
    """Whatever the folders above the dataset are called."""
    promise12(tmp_path / "latest")
    (tmp_path / "latest/TrainingData_Part1/Case01_segmentation.mhd").unlink()
    with pytest.raises(DataError, match=r"(?s)One doubt.*Case01\.mhd: there is no label file of the number 1"):
        import_found("promise12", [tmp_path / "latest"], tmp_path / "to")


def test_prostatex_as_nifti(tmp_path: Path) -> None:
    federation = bring("prostatex", tmp_path).federation
    assert [case.name[-4:] for case in federation.sites["prostatex"].cases] == ["0000", "0001", "0012", "0204"]
    for name in ("ProstateX-0001", "ProstateX-0012"):
        np.testing.assert_array_equal(mask_of(federation, name), GLAND)


def test_prostatex_as_dicom(tmp_path: Path) -> None:
    """Oddities: other series beside the one that was drawn on, a SEG in a tree of its own, without its empty frames."""
    for number in (4, 5):
        study = tmp_path / f"raw/PROSTATEx/ProstateX-{number:04d}/10-18-2011-1"
        write_series(study / "4.000-t2tsetra-1", VOLUME, intercept=0.0)
        write_series(study / "3.000-t2tsesag-2", VOLUME + 9, intercept=0.0)
        seg = tmp_path / f"raw/Seg/ProstateX-{number:04d}/10-18-2011-1/300.000-Segmentation-3/1-1.dcm"
        write_seg(seg, study / "4.000-t2tsetra-1", block(labels=4), 4)
    federation = import_found("prostatex", [tmp_path / "raw"], tmp_path / "to").federation
    assert check(tmp_path / "to").faults == ()
    np.testing.assert_array_equal(image_of(federation, "ProstateX-0005")[0], VOLUME[::-1])
    np.testing.assert_array_equal(mask_of(federation, "ProstateX-0005"), block(labels=4) > 0)


# ------------------------------------------------------------------------------------------------------- abdomen


@pytest.mark.parametrize(
    ("name", "site", "table", "cases", "splits", "left_out"),
    [
        ("word", "word", WORD, 10, (7, 1, 2), "1 volume of the test"),
        ("abdomenct1k", "abdomenct1k", CT1K, 5, (4, 0, 1), ""),
        ("amos", "amos", AMOS, 4, (3, 0, 1), "1 volume with a number above 500: MR."),
        ("btcv", "btcv", BTCV, 3, (0, 0, 3), "1 volume of the challenge's test"),
    ],
)
def test_abdomen(
    name: str, site: str, table: dict[int, int], cases: int, splits: tuple[int, int, int], left_out: str, tmp_path: Path
) -> None:
    imported = bring(name, tmp_path)
    federation = imported.federation
    assert federation.labels == ("kidney", "liver", "spleen", "pancreas")
    assert len(federation.sites[site].cases) == cases
    assert split_counts(federation, site) == splits
    case = federation.sites[site].cases[-1].name
    stored, mask = organs(table), mask_of(federation, case)
    for value, label in table.items():
        assert set(mask[stored == value].tolist()) == {label}, value
    assert not mask[stored == 0].any()
    assert any(left_out in line for line in imported.said)


def test_large_files_of_abdomenct1k_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abdomenct1k, "LARGE", 1)
    abdomenct_1k(tmp_path / "raw")
    with pytest.raises(DataError, match=r"(?s)no case of abdomenct1k was found.*5 volumes of 30 MB or more"):
        import_found("abdomenct1k", [tmp_path / "raw"], tmp_path / "to")
    every = import_found("abdomenct1k", [tmp_path / "raw"], tmp_path / "to", ImportOptions(all=True))
    assert len(every.federation.sites["abdomenct1k"].cases) == 5


# --------------------------------------------------------------------------------------------------- federations


@pytest.mark.parametrize(
    ("name", "members", "sites"),
    [
        ("fedsm-retina", ("drishti", "riga", "rimone", "refuge"),
         {"drishti", "binrushed", "magrabia", "messidor", "rimone", "refuge"}),
        pytest.param("fedsm-prostate", ("i2cvb", "msd-prostate", "nci-isbi", "promise12", "prostatex"),
                     {"i2cvb", "msd", "nci3t", "ncidx", "promise12", "prostatex"}, marks=pytest.mark.slow),
        pytest.param("ufps-abdomen", ("word", "abdomenct1k", "amos", "btcv"), {"word", "abdomenct1k", "amos", "btcv"},
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_one_command_makes_a_paper_s_federation(
    name: str, members: tuple[str, ...], sites: set[str], tmp_path: Path
) -> None:
    for member in members:
        TREES[member](tmp_path / member)
    crop = Writing(crop="disc") if name == "fedsm-retina" else None
    federation = import_federation(name, {m: tmp_path / m for m in members}, tmp_path / "to", how=crop).federation
    assert federation.sites.keys() == sites
    assert check(tmp_path / "to").faults == ()
    assert all(site.source and site.licence for site in federation.sites.values())
    if name == "ufps-abdomen":
        assert federation.sites["amos"].annotated == ("liver",)
        assert federation.sites["btcv"].annotated == federation.labels
        assert split_counts(federation, "btcv") == (0, 0, 3)
    elif name == "fedsm-retina":
        assert split_counts(federation, "refuge") == (3, 2, 1)


def test_mistakes_of_federations_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="needs the folders of its sources: --drishti DIR, --riga DIR"):
        import_federation("fedsm-retina", {}, tmp_path / "to")
    with pytest.raises(StudyError, match="--word is no source of fedsm-retina; its sources are --drishti"):
        import_federation("fedsm-retina", {"word": tmp_path}, tmp_path / "to")
    with pytest.raises(DataError, match="is not a folder; give the folder of Drishti-GS1"):
        import_federation("fedsm-retina", {"drishti": tmp_path / "none"}, tmp_path / "to")


def test_a_folder_without_the_dataset_is_refused_with_the_layout_that_is_expected(tmp_path: Path) -> None:
    word(tmp_path / "word")
    drishti(tmp_path / "drishti")
    layout = r"(?s)no case of drishti was found in .*word, so nothing was written.*Training/Images/.*drishtiGS_002.png"
    with pytest.raises(DataError, match=layout):
        import_found("drishti", [tmp_path / "word"], tmp_path / "to")
    folders = {"drishti": tmp_path / "word", "refuge": tmp_path / "drishti"}
    with pytest.raises(DataError, match=layout):  # and not a federation that lacks a hospital
        import_federation("fedsm-retina", folders, tmp_path / "to", how=Writing(yes=True))
    assert not (tmp_path / "to").exists()


def test_training_volumes_whose_labels_are_not_there_are_a_doubt_and_no_test_set(tmp_path: Path) -> None:
    word(tmp_path / "raw")
    shutil.rmtree(tmp_path / "raw/WORD-V0.1.0/labelsTr")
    with pytest.raises(DataError, match=r"(?s)7 doubts, .*imagesTr/word_0002.nii.gz: there is no label file"):
        import_found("word", [tmp_path / "raw"], tmp_path / "to")


def test_a_federation_says_of_which_source_it_left_something_out(tmp_path: Path) -> None:
    amos(tmp_path / "amos")
    said = import_federation("ufps-abdomen", {"amos": tmp_path / "amos"}, tmp_path / "to").said
    assert "left out: amos: 1 volume with a number above 500: MR." in said
    assert "left out: word, abdomenct1k, btcv: no folder was given." in said


# ------------------------------------------------------------------------------------------------ nnU-Net and BIDS


def write_nnunet(raw: Path, labels: str, channels: int = 1) -> None:
    for part, numbers in (("Tr", (1, 2, 3, 4)), ("Ts", (5,))):
        for number in numbers:
            for channel in range(channels):
                save_nifti(raw / f"images{part}/case_{number}_{channel:04d}.nii.gz", VOLUME + channel)
            save_nifti(raw / f"labels{part}/case_{number}.nii.gz", block(labels=3))
    names = ", ".join(f'"{i}": "m{i}"' for i in range(channels))
    (raw / "dataset.json").write_text(f'{{"channel_names": {{{names}}}, "labels": {labels}, "name": "mine"}}')


def test_nnunet(tmp_path: Path) -> None:
    raw = tmp_path / "Dataset007_Mine"
    write_nnunet(raw, '{"background": 0, "a": 1, "b": 2, "c": 3}', channels=2)
    federation = import_found("nnunet", [raw], tmp_path / "to").federation
    assert (federation.labels, federation.channels) == (("a", "b", "c"), 2)
    assert split_counts(federation, "Dataset007_Mine") == (3, 1, 1)
    np.testing.assert_array_equal(image_of(federation, "case_5"), np.stack([VOLUME, VOLUME + 1]))
    np.testing.assert_array_equal(mask_of(federation, "case_5"), block(labels=3))


def test_nnunet_of_version_1_and_regions(tmp_path: Path) -> None:
    write_nnunet(tmp_path / "one", '{"0": "background", "1": "a", "2": "b", "3": "c"}')
    assert import_found("nnunet", [tmp_path / "one"], tmp_path / "to1").federation.labels == ("a", "b", "c")
    write_nnunet(tmp_path / "two", '{"background": 0, "core": [2, 3], "whole": [1, 2, 3], "inner": [3]}')
    federation = import_found("nnunet", [tmp_path / "two"], tmp_path / "to2").federation
    assert federation.labels == ("whole", "core", "inner")
    assert federation.contains == {"whole": ("core", "inner"), "core": ("inner",)}
    np.testing.assert_array_equal(mask_of(federation, "case_1"), block(labels=3))
    for labels, words in (('{"a": [1, 2], "b": [2, 3]}', "overlap without nesting"), ('{"ignore": 3}', "ignore label"),
                          ("[]", "is not nnU-Net's")):  # fmt: skip
        write_nnunet(tmp_path / "wrong", labels)
        with pytest.raises(DataError, match=words):
            import_found("nnunet", [tmp_path / "wrong"], tmp_path / "to3")


def test_bids(tmp_path: Path) -> None:
    """Oddity: a session in some names, an image of another kind, and a table of names beside the pipeline."""
    raw = tmp_path / "raw"
    for name, place in (("sub-01", "sub-01/anat"), ("sub-02_ses-a", "sub-02/ses-a/anat"), ("sub-03", "sub-03/anat")):
        save_nifti(raw / place / f"{name}_T1w.nii.gz", VOLUME)
        save_nifti(raw / place / f"{name}_T2w.nii.gz", VOLUME + 1)
        save_nifti(raw / "derivatives/manual" / place / f"{name}_space-T1w_dseg.nii.gz", block(labels=2) * 5)
    (raw / "derivatives/manual/dseg.tsv").write_text("index\tname\n0\tbackground\n5\tleft\n10\tright\n")
    with pytest.raises(StudyError, match=r"say with --images which images to take; .* has T1w, T2w"):
        import_found("bids", [raw], tmp_path / "to")
    federation = import_found("bids", [raw], tmp_path / "to", ImportOptions(images="T2w")).federation
    assert federation.labels == ("left", "right")
    assert {case.name: case.patient for case in federation.sites["bids"].cases} == {
        "sub-01": "sub-01", "sub-02_ses-a": "sub-02", "sub-03": "sub-03",
    }  # fmt: skip
    np.testing.assert_array_equal(image_of(federation, "sub-03")[0], VOLUME + 1)
    np.testing.assert_array_equal(mask_of(federation, "sub-03"), block(labels=2))


# -------------------------------------------------------------------------------------------------------- damage


def damage(file: Path, rng: random.Random) -> None:
    """Cuts a file, empties it, changes some of its first bytes, or takes it away."""
    raw = bytearray(file.read_bytes())
    kind = rng.choice(["cut", "empty", "change", "gone"])
    if kind == "gone":
        file.unlink()
        return
    for _ in range(20 if kind == "change" and raw else 0):
        raw[rng.randrange(min(len(raw), 400))] = rng.randrange(256)
    file.write_bytes(raw if kind == "change" else raw[: rng.randrange(len(raw) + 1)] if kind == "cut" else b"")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of decoders, about what was damaged
@pytest.mark.parametrize("name", list(TREES))
def test_damaged_files_get_a_sentence(name: str, tmp_path: Path) -> None:
    TREES[name](tmp_path / "raw")
    for seed in range(5):
        work = tmp_path / f"work{seed}"
        shutil.copytree(tmp_path / "raw", work)
        rng = random.Random(f"{name} {seed}")
        for file in rng.sample(sorted(path for path in work.rglob("*") if path.is_file()), 2):
            damage(file, rng)
        with contextlib.suppress(UserError):
            import_found(name, [work], tmp_path / f"to{seed}", how=Writing(yes=True))
            assert check(tmp_path / f"to{seed}").counts
