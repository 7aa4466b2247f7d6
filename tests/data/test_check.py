"""Checking a federation: every fault, what is worth knowing, and a copy without broken cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from PIL import Image

from consilium.data.check import check
from consilium.data.fixing import fix
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import DataError

SPLITS = ("train", "valid", "test")


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    """Two sites of three different grey 6×5 images with both labels in every mask."""
    folder = tmp_path / "fed"
    write_federation_toml(folder, "segmentation", ["disc", "cup"], 2, 1)
    for s, site in enumerate(("east", "west")):
        cases = []
        for i, split in enumerate(SPLITS):
            for kind in ("images", "labels"):
                (folder / site / kind).mkdir(parents=True, exist_ok=True)
            save(folder / site / "images" / f"{i}.png", picture(10 * s + i))
            save(folder / site / "labels" / f"{i}.png", mask(3 * s + i))
            cases.append(Case(f"c{i}", f"p{i}", split, Path(f"images/{i}.png"), Path(f"labels/{i}.png")))
        write_site(folder, site, cases)
    return folder


def picture(number: int, shape: tuple[int, int] = (6, 5)) -> Any:
    return np.random.default_rng(number).integers(0, 200, shape)


def mask(number: int, values: tuple[int, ...] = (1, 2)) -> Any:
    """Every label is one block, and no two masks are the same."""
    drawn = np.zeros((6, 5))
    for value in values:
        drawn[2 * value - 1 : 2 * value + (number >= 3), : 1 + number % 3] = value
    return drawn


def save(path: Path, array: Any) -> None:
    Image.fromarray(np.asarray(array, np.uint8)).save(path)


def test_a_sound_federation_has_no_fault_and_no_note(fed: Path) -> None:
    finding = check(fed)
    assert finding.faults == ()
    assert finding.notes == ()
    assert finding.counts == {name: {"train": 1, "valid": 1, "test": 1, "empty": 0} for name in ("east", "west")}


def test_cases_without_a_mask_are_counted_and_copied(fed: Path, tmp_path: Path) -> None:
    (fed / "west/site.toml").write_text('name = "west"\nannotated = ["disc", "cup"]\n')
    save(fed / "west/images/3.png", picture(77))
    with (fed / "west/cases.csv").open("a") as table:
        table.write("c3,p3,train,images/3.png,\n")
    finding = check(fed)
    assert finding.faults == () and finding.unlabelled == {"west": 1}
    assert finding.counts["west"]["train"] == 2
    (note,) = finding.notes
    assert "site 'west' has 1 case without a mask. Methods with teachers learn from them" in note
    assert fix(fed, tmp_path / "copy") == []
    assert check(tmp_path / "copy") == finding
    (fed / "west/images/3.png").write_bytes(b"x" * 99)
    assert [fault.case for fault in check(fed).faults] == ["c3"]


FAULTS = [
    # what is broken, case, file, words of the sentence
    (lambda w: (w / "images/0.png").write_bytes(b""), "c0", "west/images/0.png", ["is empty"]),
    (lambda w: (w / "images/0.png").write_bytes(b"x" * 99), "c0", "west/images/0.png", ["cannot be read"]),
    (lambda w: (w / "labels/0.png").write_bytes(b"x" * 99), "c0", "west/labels/0.png", ["cannot be read"]),
    (lambda w: save(w / "images/1.png", np.zeros((6, 5, 3))), "c1", "west/images/1.png", ["colour", "channels = 1"]),
    (lambda w: save(w / "labels/1.png", np.zeros((5, 6))), "c1", "west/labels/1.png", ["5×6", "6×5"]),
    (
        lambda w: save(w / "labels/2.png", np.eye(6, 5) * 3),
        "c2",
        "west/labels/2.png",
        ["mask values 3", "0 background, 1 disc, 2 cup", "federation.toml"],
    ),
    (lambda w: (w / "images/2.png").unlink(), "c2", "west/cases.csv", ["'images/2.png' does not exist"]),
]


@pytest.mark.parametrize(("damage", "case", "file", "words"), FAULTS)
def test_every_fault_is_named_with_its_file(
    fed: Path, damage: Callable[[Path], object], case: str, file: str, words: list[str]
) -> None:
    damage(fed / "west")
    (fault,) = check(fed).faults
    assert (fault.site, fault.case, fault.file) == ("west", case, file)
    for word in words:
        assert word in fault.sentence


def test_none_hides_behind_the_first(fed: Path) -> None:
    for damage, *_ in FAULTS:
        damage(fed / "west")
    edit(fed / "west" / "cases.csv", "c0,p0,train", "c0,p0,sometimes")
    (fed / "east" / "site.toml").write_text('name = "east"\nkolour = 3\n')
    save(fed / "east" / "labels" / "1.png", np.eye(6, 5) * 9)
    assert sorted(fault.file for fault in check(fed).faults) == [
        "east/labels/1.png",
        "east/site.toml",
        "west/cases.csv",  # the split
        "west/cases.csv",  # the missing image
        "west/images/0.png",
        "west/images/1.png",
        "west/labels/0.png",
        "west/labels/2.png",
    ]


def test_a_white_mask_of_one_label_gets_a_hint(fed: Path) -> None:
    write_federation_toml(fed, "segmentation", ["disc"], 2, 1)
    for path in fed.glob("*/labels/*.png"):
        save(path, np.eye(6, 5) * 255)
    faults = check(fed).faults
    assert len(faults) == 6
    assert "write 1 instead of 255?" in faults[0].sentence


def test_unusable_tables_are_faults_not_exceptions(tmp_path: Path, fed: Path) -> None:
    (fed / "federation.toml").write_text("task = 3")
    finding = check(fed)
    assert len(finding.faults) == 4  # task is no text, and three keys are missing
    assert finding.counts == {}
    assert "is not a folder" in check(tmp_path / "nowhere").faults[0].sentence


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def only_disc(west: Path) -> None:
    for path in west.glob("labels/*.png"):
        save(path, mask(3 + int(path.stem), (1,)))


def bigger(west: Path) -> None:
    save(west / "images/0.png", picture(5, (8, 4)))
    save(west / "labels/0.png", np.repeat(mask(3)[:4, :4], 2, axis=0))


def twin(west: Path, split: int, of: Path) -> None:
    (west / "images" / f"{split}.png").write_bytes((of / "images" / "2.png").read_bytes())


NOTES = [
    (lambda w: edit(w / "cases.csv", ",valid,", ",train,"), ["site 'west' has no valid cases"]),
    (lambda w: edit(w / "cases.csv", ",valid,", ",,"), ["site 'west' has 1 case without a split", "--split"]),
    (only_disc, ["site 'west' says it draws 'cup'", "value 2"]),
    (lambda w: (w / "site.toml").write_text('name = "west"\nannotated = ["disc"]'), ["'cup'", "it is hidden"]),
    (bigger, ["2 sizes, from 6×4 to 8×5"]),
    (lambda w: twin(w, 2, of=w.parent / "east"), ["the same picture as test case 'c2' of site 'east'", "Two sites"]),
]


@pytest.mark.parametrize(("change", "words"), NOTES, ids=[words[0] for _, words in NOTES])
def test_what_is_legal_but_worth_knowing(fed: Path, change: Callable[[Path], object], words: list[str]) -> None:
    change(fed / "west")
    finding = check(fed)
    assert finding.faults == ()
    (note,) = finding.notes
    for word in words:
        assert word in note


def test_volumes_that_lie_differently(tmp_path: Path) -> None:
    write_federation_toml(tmp_path, "segmentation", ["organ"], 3, 1)
    (tmp_path / "west").mkdir()
    cases = []
    for i, flip in enumerate((1, -1)):
        image = np.random.default_rng(i).integers(0, 9, (4, 5, 6)).astype(np.int16)
        affine = np.diag([flip, 1, 2 + i, 1]).astype(float)
        nibabel.save(nibabel.Nifti1Image(image, affine), tmp_path / "west" / f"{i}.nii.gz")
        moved = affine + i * 50 * np.eye(4, 4, 3)  # 50 mm along x
        nibabel.save(nibabel.Nifti1Image((image > 4).astype(np.uint8), moved), tmp_path / "west" / f"m{i}.nii.gz")
        cases.append(Case(f"c{i}", f"p{i}", SPLITS[i], Path(f"{i}.nii.gz"), Path(f"m{i}.nii.gz")))
    write_site(tmp_path, "west", cases)
    notes = check(tmp_path).notes
    assert any("2 spacings (2×1×1, 3×1×1 mm" in note for note in notes)
    assert any("2 orientations (LAS, RAS)" in note for note in notes)
    (moved,) = [found for found in check(tmp_path).findings if found.kind == "misplaced mask"]
    assert (moved.case, moved.file, moved.severity) == ("c1", "west/m1.nii.gz", "warning")


def test_fix_copies_what_is_sound_and_says_what_is_not(tmp_path: Path, fed: Path) -> None:
    (fed / "west" / "images" / "0.png").write_bytes(b"")
    (fed / "west" / "images" / "1.png").unlink()
    table = fed / "west" / "cases.csv"
    table.write_text(table.read_text() + "c2,p9,train,images/2.png,labels/2.png\n")
    before = {path: path.read_bytes() for path in fed.rglob("*") if path.is_file()}
    said = fix(fed, tmp_path / "to")
    assert len(said) == 3
    for sentence, words in zip(
        said,
        ["case 'c1': image 'images/1.png' does not", "case 'c2': this case name", "case 'c0': is empty"],
        strict=True,
    ):
        assert sentence.startswith("left out: west/")
        assert words in sentence
    assert check(tmp_path / "to").faults == ()
    sites = read_federation(tmp_path / "to").sites
    assert [case.name for case in sites["west"].cases] == ["c2"]
    assert [case.name for case in sites["east"].cases] == ["c0", "c1", "c2"]
    assert not (tmp_path / "to" / "west" / "images" / "0.png").exists()
    assert {path: path.read_bytes() for path in fed.rglob("*") if path.is_file()} == before


def test_fix_of_a_sound_federation_is_a_copy(tmp_path: Path, fed: Path) -> None:
    assert fix(fed, tmp_path / "to") == []
    names = [{path.relative_to(place) for path in place.rglob("*")} for place in (fed, tmp_path / "to")]
    assert names[0] == names[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fed", "to"]


def test_fix_leaves_out_a_site_without_sound_cases(tmp_path: Path, fed: Path) -> None:
    for path in (fed / "west" / "images").iterdir():
        path.write_bytes(b"")
    said = fix(fed, tmp_path / "to")
    assert said[-1] == "left out: site 'west', which has no sound case."
    assert list(read_federation(tmp_path / "to").sites) == ["east"]


def test_fix_copies_the_data_of_an_mhd(tmp_path: Path) -> None:
    write_federation_toml(tmp_path / "fed", "classification", ["x"], 3, 1)
    (tmp_path / "fed" / "west").mkdir()
    image = SimpleITK.GetImageFromArray(np.arange(24, dtype=np.int16).reshape(2, 3, 4))
    SimpleITK.WriteImage(image, str(tmp_path / "fed" / "west" / "a.mhd"))
    write_site(tmp_path / "fed", "west", [Case("a", "a", "train", Path("a.mhd"), "x")])
    fix(tmp_path / "fed", tmp_path / "to")
    assert (tmp_path / "to" / "west" / "a.raw").is_file()
    assert check(tmp_path / "to").faults == ()


def test_fix_refuses_to_overwrite_or_to_mend_the_head(tmp_path: Path, fed: Path) -> None:
    with pytest.raises(DataError, match="inside each other"):
        fix(fed, fed / "to")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "file").touch()
    with pytest.raises(DataError, match="exists already"):
        fix(fed, tmp_path / "to")
    for path in fed.glob("*/images/*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no sound case"):
        fix(fed, tmp_path / "new")
    (fed / "federation.toml").write_text("")
    with pytest.raises(DataError, match="cannot be mended"):
        fix(fed, tmp_path / "new")
    assert not (tmp_path / "new").exists()
