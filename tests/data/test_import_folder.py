"""A person's own folder becomes a site folder: what pairs, what values become, and that doubts stop the import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from consilium.data.check import check
from consilium.data.importers import import_found
from consilium.data.importers.crops import bright_place
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.patterns import matches
from consilium.data.importers.writing import Writing
from consilium.data.site_folder import Federation
from consilium.errors import DataError, StudyError
from tests.dicom_files import PERSON, write_series
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
TWO = ImportOptions(labels=("disc", "cup"), contains=("disc=cup",))


def bring(place: Path, how: Writing | None = None, **options: Any) -> Federation:
    """Imports place/raw to place/to, and holds that `check` finds nothing wrong with it."""
    federation = import_found("folder", [place / "raw"], place / "to", ImportOptions(**options), how).federation
    assert check(place / "to").faults == ()
    return federation


# --------------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "path", "name", "about"),
    [
        ("img/*.png", "img/a b.png", "a b", {}),
        ("**/{case}.png", "x/y/ü.png", "ü", {}),
        ("**/{case}.png", "ü.png", "ü", {}),
        ("{site}/{split}/{patient}_{eye}.png", "north/Test/7_left.png", "left-7", {"site": "north", "split": "Test"}),
        ("GT/{case}/Soft/{case}_{label}.png", "GT/d1/Soft/d1_cup.png", "d1", {"label": "cup"}),
        ("r{rater}/{case}[1].png", "r2/患者[1].png", "患者", {"rater": "2"}),
    ],
)
def test_a_pattern_captures(pattern: str, path: str, name: str, about: dict[str, str]) -> None:
    (one,) = matches(pattern, [Path(path), Path("elsewhere.txt")], ["disc", "cup"])
    assert (one.name, one.about) == (name, about)


def test_the_same_field_twice_is_the_same_text() -> None:
    assert matches("{case}/{case}.png", [Path("a/b.png")]) == []
    with pytest.raises(StudyError, match=r"has the field \{1x\}"):
        matches("{1x}.png", [])


# ------------------------------------------------------------------------------------------------------------ masks


def test_images_beside_masks_need_no_pattern(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_picture(tmp_path / f"raw/images/{name}.png", some(16, 16, 3))
        save_picture(tmp_path / f"raw/masks/{name}.bmp", DISC + 0 + CUP)
    federation = bring(tmp_path, labels=("disc", "cup"), contains=("disc=cup",), site="mine")
    assert (federation.task, federation.channels, federation.contains) == ("segmentation", 3, {"disc": ("cup",)})
    assert len(federation.sites["mine"].cases) == 3
    np.testing.assert_array_equal(image_of(federation, "b"), np.moveaxis(some(16, 16, 3), -1, 0))
    np.testing.assert_array_equal(mask_of(federation, "b"), DISC + 0 + CUP)


MASKS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {  # files, options, what the mask must be
    "value map": ({"m/a.png": DISC * 255}, {"masks": ("m/{case}.png",), "labels": ("x",), "values": ("255=x",)}, DISC),
    "white is the label": ({"m/a.png": DISC * 255}, {"masks": ("x=m/{case}.png",), "labels": ("x",)}, DISC),
    "jpeg": ({"m/a.jpg": DISC * 255}, {"masks": ("m/{case}.jpg",), "labels": ("x",), "threshold": 128.0}, DISC),
    "soft map": ({"m/a.png": DISC * 100 + CUP * 100}, {"masks": ("m/{case}.png",), "labels": ("x",),
                                                        "threshold": 150.0}, CUP),
    "a file per label": ({"m/a_cup.png": CUP * 255, "m/a_disc.png": DISC * 255},
                         {"masks": ("m/{case}_{label}.png",), "labels": ("disc", "cup")}, DISC + 0 + CUP),
    "a pattern per label": ({"od/a.png": DISC, "oc/a.png": CUP},
                            {"masks": ("cup=oc/{case}.png", "disc=od/{case}.png"), "labels": ("disc", "cup")},
                            DISC + 0 + CUP),
    "majority": ({"r1/a.png": DISC + 0 + CUP, "r2/a.png": DISC + 0 + CUP, "r3/a.png": np.zeros((16, 16))},
                 {"masks": ("r{rater}/{case}.png",), "labels": ("disc", "cup"), "contains": ("disc=cup",)},
                 DISC + 0 + CUP),
    "half is not most": ({"r1/a.png": DISC, "r2/a.png": CUP}, {"masks": ("r{rater}/{case}.png",), "labels": ("x",)},
                         CUP),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MASKS))
def test_what_a_mask_becomes(name: str, tmp_path: Path) -> None:
    files, options, wanted = MASKS[name]
    for case in ("a", "b"):
        save_picture(tmp_path / f"raw/i/{case}.png", some(16, 16))
        for path, pixels in files.items():
            save_picture(tmp_path / "raw" / path.replace("/a", f"/{case}"), pixels + 0)
    federation = bring(tmp_path, images="i/{case}.png", **options)
    np.testing.assert_array_equal(mask_of(federation, "b"), wanted)


def test_a_majority_counts_the_inside_as_the_outside() -> None:
    """One rater draws a cup where another draws disc only: both say disc there."""
    from consilium.data.importers.rules import majority

    masks = [np.array(row, np.uint8) for row in ([1, 2, 2, 0], [1, 1, 2, 1], [0, 0, 2, 0])]
    assert majority(masks, {1: {2}, 2: set()}, 2).tolist() == [1, 1, 2, 0]
    assert majority(masks, {}, 2).tolist() == [1, 0, 2, 0]


def test_one_rater_is_chosen(tmp_path: Path) -> None:
    save_picture(tmp_path / "raw/i/a.png", some(16, 16))
    for rater, mask in (("anna", DISC), ("ben", CUP)):
        save_picture(tmp_path / f"raw/{rater}/a.png", mask + 0)
    options = {"images": "i/{case}.png", "masks": ("{rater}/{case}.png",), "labels": ("x",)}
    with pytest.raises(DataError, match="no rater 'carl'; it has anna, ben"):
        bring(tmp_path, Writing(rater="carl"), **options)
    np.testing.assert_array_equal(mask_of(bring(tmp_path, Writing(rater="anna"), **options), "a"), DISC)


# ---------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("kind", ["nii.gz", "nrrd", "mhd", "mha", "npy", "DICOM"])
def test_volumes_keep_values_and_place(kind: str, tmp_path: Path) -> None:
    raw, image, mask = tmp_path / "raw", some(4, 8, 6, kind="int16"), block()
    for name in ("a", "b"):
        if kind == "DICOM":
            write_series(raw / f"i/{name}", image, intercept=0.0)
            save_nifti(raw / f"m/{name}.nii.gz", mask)
        elif kind == "npy":
            for place, array in (("i", image), ("m", mask)):
                (raw / place).mkdir(parents=True, exist_ok=True)
                np.save(raw / place / f"{name}.npy", array)
        else:
            for place, array in (("i", image), ("m", mask)):
                (save_nifti if kind == "nii.gz" else save_itk)(raw / place / f"{name}.{kind}", array)
    ending = "" if kind == "DICOM" else f".{kind}"
    masks = "m/{case}.nii.gz" if kind == "DICOM" else f"m/{{case}}{ending}"
    federation = bring(tmp_path, images=f"i/{{case}}{ending}", masks=(masks,), labels=("gland",))
    assert federation.dimensions == 3
    stored = image[::-1] if kind == "DICOM" else image  # slices go the way of their normal
    np.testing.assert_array_equal(image_of(federation, "b")[0], stored)
    np.testing.assert_array_equal(mask_of(federation, "b"), mask)
    if kind == "DICOM":
        affine = nibabel.load(case_of(federation, "b").image).affine  # in RAS, from the highest slice down
        np.testing.assert_allclose(
            affine, [[-0.5, 0, 0, -10], [0, 0.6, 0, -20], [0, 0, -3, 39], [0, 0, 0, 1]], atol=1e-5
        )
        assert not any(PERSON.encode() in path.read_bytes() for path in (tmp_path / "to").rglob("*") if path.is_file())
    elif kind != "npy":
        assert not any("another place" in note for note in check(tmp_path / "to").notes)


@pytest.mark.parametrize(("stored", "channels"), [((8, 8, 3), 1), ((8, 8), 3)])
def test_colour_and_grey(stored: tuple[int, ...], channels: int, tmp_path: Path) -> None:
    save_picture(tmp_path / "raw/x/a.png", some(*stored))
    save_picture(tmp_path / "raw/y/a.png", some(*stored, seed=1))
    federation = bring(tmp_path, images="{class}/*.png", channels=channels)
    image = image_of(federation, "x-a")
    if channels == 3:
        np.testing.assert_array_equal(image, np.stack([some(*stored)] * 3))
    else:
        np.testing.assert_allclose(image[0], some(*stored) @ [0.299, 0.587, 0.114], atol=0.5)


def test_class_folders(tmp_path: Path) -> None:
    for label in ("ill", "well"):
        for i in range(8):
            save_picture(tmp_path / f"raw/{label}/{i}.jpg", some(8, 8))
    federation = bring(tmp_path, images="{class}/*.jpg")
    assert (federation.task, federation.labels) == ("classification", ("ill", "well"))
    assert case_of(federation, "well-3").label == "well"
    assert split_counts(federation, "site1") == (8, 4, 4)


# ------------------------------------------------------------------------------------------- tables, splits, places


def write_pairs(folder: Path, names: list[str]) -> None:
    for name in names:
        save_picture(folder / f"i/{name}.png", some(16, 16))
        save_picture(folder / f"m/{name}.png", DISC + 0)


PAIRS: dict[str, Any] = {"images": "i/{case}.png", "masks": ("m/{case}.png",), "labels": ("x",)}


def test_a_table_says_everything(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b", "c"])
    table = tmp_path / "list.csv"
    table.write_text(
        "image,mask:x@anna,mask:x@ben,patient,split,site,case\n"
        "i/a.png,m/a.png,m/b.png,p1,train,north,one\ni/b.png,m/b.png,,p2,Validation,north,two\n"
        "i/c.png,m/c.png,,p3,test,south,\n"
    )
    federation = bring(tmp_path, table=table, labels=("x",))
    assert {site: [(c.name, c.patient, c.split) for c in f.cases] for site, f in federation.sites.items()} == {
        "north": [("one", "p1", "train"), ("two", "p2", "valid")],
        "south": [("c", "p3", "test")],
    }


WRONG_ROWS = {
    "../secret.png,m/a.png": "the path '../secret.png' leaves the source folder",
    "/etc/hosts,m/a.png": "the path '/etc/hosts' leaves the source folder",
    "i/link.png,m/a.png": "the path 'i/link.png' leaves the source folder",
    "i/none.png,m/a.png": "the path 'i/none.png' does not exist",
    "i/a.png,": "i/a.png has no mask",
}


@pytest.mark.parametrize("row", list(WRONG_ROWS))
def test_a_table_that_leaves_the_folder(row: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b"])
    save_picture(tmp_path / "secret.png", some(16, 16))
    (tmp_path / "raw/i/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "list.csv").write_text(f"image,mask\ni/b.png,m/b.png\n{row}\n")
    with pytest.raises(DataError, match=rf"nothing was written(.|\n)*line 3: {WRONG_ROWS[row]}"):
        bring(tmp_path, table=tmp_path / "list.csv", labels=("x",))
    assert not (tmp_path / "to").exists()


def test_patients_stay_together(tmp_path: Path) -> None:
    for patient in range(8):
        for eye in ("L", "R"):
            save_picture(tmp_path / f"raw/i/{patient}_{eye}.png", some(16, 16))
            save_picture(tmp_path / f"raw/m/{patient}_{eye}.png", DISC + 0)
    federation = bring(tmp_path, images="i/{patient}_{eye}.png", masks=("m/{patient}_{eye}.png",), labels=("x",))
    assert split_counts(federation, "site1") == (8, 4, 4)
    cases = federation.sites["site1"].cases
    assert len({(case.patient, case.split) for case in cases}) == 8


def test_a_referenced_series_stays_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_series(tmp_path / f"raw/scans/{name}", some(4, 8, 6), intercept=0.0)
        save_nifti(tmp_path / f"raw/m/{name}.nii.gz", block())
    options = {"images": "scans/{case}", "masks": ("m/{case}.nii.gz",), "labels": ("x",)}
    federation = bring(tmp_path, Writing(reference=True), **options)
    assert case_of(federation, "b").image == (tmp_path / "raw/scans/b").resolve()
    np.testing.assert_array_equal(image_of(federation, "b")[0], some(4, 8, 6)[::-1])


def test_references_leave_images_where_they_are(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b"])
    federation = bring(tmp_path, Writing(reference=True), **PAIRS)
    assert case_of(federation, "a").image == (tmp_path / "raw/i/a.png").resolve()
    assert not (tmp_path / "to/site1/images").exists()
    with pytest.raises(DataError, match="is changed by the import, so it cannot stay"):
        import_found("folder", [tmp_path / "raw"], tmp_path / "other", ImportOptions(channels=3, **PAIRS),
                     Writing(reference=True))  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- doubts


def spoil_unpaired_image(raw: Path) -> None:
    save_picture(raw / "i/lonely.png", some(16, 16))


def spoil_unpaired_mask(raw: Path) -> None:
    save_picture(raw / "m/lonely.png", DISC + 0)


def spoil_value(raw: Path) -> None:
    save_picture(raw / "m/b.png", DISC * 7)


def spoil_size(raw: Path) -> None:
    save_picture(raw / "m/b.png", np.ones((8, 8)))


def spoil_bytes(raw: Path) -> None:
    (raw / "i/b.png").write_bytes((raw / "i/b.png").read_bytes()[:60])


DOUBTS = {
    spoil_unpaired_image: "lonely.png: no mask fits it",
    spoil_unpaired_mask: "lonely.png: no image fits it",
    spoil_value: r"b.png: has the values 7, which no rule names",
    spoil_size: r"b.png: is 8×8 but its image is 16×16",
    spoil_bytes: r"b.png: cannot be read",
}


@pytest.mark.parametrize("spoil", list(DOUBTS), ids=lambda f: f.__name__)
def test_doubt_writes_nothing_without_yes(spoil: Any, tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b", "c"])
    spoil(tmp_path / "raw")
    with pytest.raises(DataError, match=rf"(?s)One doubt, so nothing was written.*add --yes.*{DOUBTS[spoil]}"):
        bring(tmp_path, **PAIRS)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    imported = import_found("folder", [tmp_path / "raw"], tmp_path / "to", ImportOptions(**PAIRS), Writing(yes=True))
    left = {"lonely"} if "lonely" in DOUBTS[spoil] else {"b"}
    assert {case.name for case in imported.federation.sites["site1"].cases} == {"a", "b", "c"} - left
    assert any(line.startswith("left out: ") for line in imported.said)
    assert imported.said[0].startswith(
        f"site1: paired {3 - (left == {'b'})} images with their masks, such as i/a.png with m/a"
    )


def test_images_and_masks_in_one_folder_are_told_apart_by_the_longer_pattern(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_picture(tmp_path / f"raw/{name}.png", some(16, 16, 3))
        save_picture(tmp_path / f"raw/{name}_mask.png", DISC + 0)
    options = ImportOptions(images="{case}.png", masks=("{case}_mask.png",), labels=("disc",))
    said = import_found("folder", [tmp_path / "raw"], tmp_path / "to", options).said
    assert said[0] == "site1: paired 3 images with their masks, such as a.png with a_mask.png"


def test_a_broken_first_image_is_a_doubt_like_any_other(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b", "c"])
    (tmp_path / "raw/i/a.png").write_bytes((tmp_path / "raw/i/a.png").read_bytes()[:60])
    with pytest.raises(
        DataError, match=r"(?s)One doubt.*add --yes to import the 2 other cases.*i/a.png: cannot be read"
    ):
        bring(tmp_path, **PAIRS)
    federation = bring(tmp_path, Writing(yes=True), **PAIRS)
    assert [case.name for case in federation.sites["site1"].cases] == ["b", "c"]
    assert (federation.dimensions, federation.channels) == (2, 1)


def test_if_no_case_can_be_used_the_reasons_are_given(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_picture(tmp_path / f"raw/i/{name}.png", some(16, 16))
        save_picture(tmp_path / f"raw/m/{name}.png", DISC * 255)
    with pytest.raises(DataError, match=r"(?s)none of the 2 cases can be used, so nothing was written.*values 255"):
        bring(tmp_path, **PAIRS)


def test_a_patient_in_two_splits_of_a_table_is_a_doubt(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b", "c"])
    table = tmp_path / "cases.csv"
    rows = ("i/a.png,m/a.png,p1,train", "i/b.png,m/b.png,p1,test", "i/c.png,m/c.png,p2,test")
    table.write_text("\n".join(("image,mask,patient,split", *rows)))
    with pytest.raises(
        DataError, match=r"(?s)2 doubts, .*i/a.png: its patient 'p1' is in several splits, test and train"
    ):
        bring(tmp_path, table=table, labels=PAIRS["labels"])
    options = ImportOptions(table=table, labels=PAIRS["labels"])
    imported = import_found("folder", [tmp_path / "raw"], tmp_path / "to", options, Writing(yes=True))
    assert [case.name for case in imported.federation.sites["site1"].cases] == ["c"]


def test_images_without_masks_are_for_training_whatever_their_folders_say(tmp_path: Path) -> None:
    """So their patient is in one split."""
    for split in ("train", "test"):
        save_picture(tmp_path / f"raw/{split}/p1_{split}.png", some(16, 16))
    federation = bring(tmp_path, images="{split}/{patient}_{visit}.png", labels=("disc",))
    assert [(case.patient, case.split) for case in federation.sites["site1"].cases] == [("p1", "train")] * 2


def test_a_label_may_contain_two(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b", "c"])
    options = {**PAIRS, "labels": ("x", "y", "z"), "contains": ("x=y", "x=z")}
    assert bring(tmp_path, **options).contains == {"x": ("y", "z")}


def test_mistakes_get_a_sentence(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a"])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"images": "x/*.png", "masks": ("m/*.png",), "labels": ("x",)}, r"no file in .* fits --images 'x/\*.png'"),
        ({"images": "i/*.png", "masks": ("y/*.png",), "labels": ("x",)}, r"no file in .* fits --masks 'y/\*.png'"),
        ({"images": "i/*.png"}, "--images needs --masks"),
        ({"images": "i/*.png", "masks": ("m/*.png",)}, "masks need --labels"),
        ({**PAIRS, "values": ("255=y",)}, "--values names 'y', which is not a label"),
        ({**PAIRS, "values": ("white=x",)}, "write a stored whole number"),
        ({**PAIRS, "contains": ("x=cup",)}, "--contains names 'cup', which is not a label"),
        ({**PAIRS, "labels": ("x", "x")}, "--labels has 'x' twice"),
        ({**PAIRS, "labels": ("background",)}, "in the tables for .*/to; nothing was done"),
        ({"images": "i/{case}.png", "masks": ("m/{other}.png",), "labels": ("x",)}, "must have the same fields"),
        ({}, "say which files of .* are images"),
    ]
    for options, words in wrong:
        with pytest.raises((DataError, StudyError), match=words):
            bring(tmp_path, **options)
    with pytest.raises(StudyError, match="there is no importer 'foldr'; did you mean 'folder'"):
        import_found("foldr", [tmp_path], tmp_path / "to")
    with pytest.raises(StudyError, match="--crop cup: this is not a label"):
        bring(tmp_path, Writing(crop="cup"), **PAIRS)


# ------------------------------------------------------------------------------------------------------------- crop


def test_a_crop_is_three_discs_wide_and_stays_in_the_picture(tmp_path: Path) -> None:
    disc, cup = disc_and_cup(40, (10, 30), (3, 1))  # a box of 7 pixels, rows 7 to 13, columns 27 to 33
    save_picture(tmp_path / "raw/i/a.png", some(40, 40, 3))
    save_picture(tmp_path / "raw/m/a.png", disc + 0 + cup)
    options = {**PAIRS, "labels": ("disc", "cup"), "contains": ("disc=cup",)}
    federation = bring(tmp_path, Writing(crop="disc"), **options)
    np.testing.assert_array_equal(mask_of(federation, "a"), (disc + 0 + cup)[0:21, 19:40])
    np.testing.assert_array_equal(image_of(federation, "a"), np.moveaxis(some(40, 40, 3), -1, 0)[:, 0:21, 19:40])


def test_a_new_photograph_is_cropped_at_its_brightest_place(tmp_path: Path) -> None:
    y, x = np.mgrid[:100, :120]
    photo = np.where(np.hypot(y - 50, x - 60) < 50, 80, 0) + np.where(np.hypot(y - 40, x - 80) < 7, 120, 0)
    photo = np.stack([photo, photo // 2, photo // 8], axis=-1)
    (row, column), side = bright_place(np.moveaxis(photo, -1, 0))
    assert np.hypot(row - 40, column - 80) < 2
    assert side == pytest.approx(0.42 * 99)
    save_picture(tmp_path / "raw/i/a.png", photo)
    federation = bring(tmp_path, Writing(crop="disc"), images="i/{case}.png", labels=("disc",))
    assert image_of(federation, "a").shape == (3, 42, 42)
    assert (case_of(federation, "a").label, case_of(federation, "a").split) == (None, "train")
