"""What check finds beyond faults: every finding says its severity, its file, what it does, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from pydicom import dcmread

from consilium.data.alike import near_pairs, perceptual_hash, thumbnail
from consilium.data.check import CheckResult, check
from consilium.data.fixing import fix
from consilium.data.gathering import look_at_all
from consilium.data.seen import SEVERITIES, DataFinding
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from tests.dicom_files import PERSON, write_series

SPLITS = ("train", "train", "valid", "test")
SIZE = 64


def picture(number: int, size: int = SIZE) -> Any:
    """Smooth spots, different for each number."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:size, :size] / size
    spots = sum(rng.uniform(50, 200) * np.exp(-((y - a) ** 2 + (x - b) ** 2) / 0.02) for a, b in rng.random((6, 2)))
    return np.clip(spots, 0, 255).astype(np.uint8)


def block(number: int) -> Any:
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[20:40, 20 : 40 + number] = 1
    return mask


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of four different pictures, one label."""
    folder = tmp_path_factory.mktemp("findings") / "fed"
    write_federation_toml(folder, "segmentation", ["disc"], 2, 1)
    for s, site in enumerate(("east", "west")):
        cases = []
        for kind in ("images", "labels"):
            (folder / site / kind).mkdir(parents=True)
        for i, split in enumerate(SPLITS):
            save(folder / site / f"images/{i}.png", picture(10 * s + i))
            save(folder / site / f"labels/{i}.png", block(4 * s + i))
            cases.append(Case(f"c{i}", f"{site}-{i}", split, Path(f"images/{i}.png"), Path(f"labels/{i}.png")))
        write_site(folder, site, cases)
    return folder


@pytest.fixture
def fed(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "fed")
    return tmp_path / "fed"


def save(path: Path, array: Any) -> None:
    Image.fromarray(np.asarray(array, np.uint8)).save(path)


def change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def brighter(fed: Path) -> None:
    """A training picture of the west, saved again smaller and brighter, becomes a test picture of the east."""
    small = Image.fromarray(picture(10)).resize((60, 60))
    save(fed / "east/images/3.png", np.asarray(small) * 0.8 + 20)
    save(fed / "east/labels/3.png", block(3)[:60, :60])


def spoilt(file: str, array: Any) -> Callable[[Path], None]:
    return lambda fed: save(fed / file, array)


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda fed: change(fed / "west/cases.csv", old, new)


PIC, MASK = "west/images/0.png", "west/labels/1.png"
FOUND: list[tuple[str, Callable[[Path], object], str, str, str]] = [
    ("flat image", spoilt(PIC, np.full((SIZE, SIZE), 7)), "warning", PIC, "all its values are 7"),
    ("empty mask", spoilt(MASK, np.zeros((SIZE, SIZE))), "warning", MASK, "no label"),
    ("inverted mask", spoilt(MASK, 1 - block(1)), "warning", MASK, "100 %"),
    ("tiny mask", spoilt(MASK, np.eye(SIZE) * (np.arange(SIZE) < 2)), "warning", MASK, "2 voxels"),
    ("repeated mask", spoilt(MASK, block(0)), "warning", MASK, "east/c0"),
    ("copy", spoilt(PIC, picture(13)), "error", PIC, "test case 'c3'"),
    ("copy", spoilt(PIC, picture(11)), "warning", "west/images/1.png", "train case 'c0'"),
    ("near copy", brighter, "error", PIC, "nearly the same picture as test case 'c3' of site 'east'"),
    ("patient in two sites", renamed("west-3", "east-0"), "error", "west/images/3.png", "'east' (train; here test)"),
    ("patient in two sites", renamed("west-1", "east-0"), "warning", "west/images/1.png", "'east'"),
]  # fmt: skip


def only(found: CheckResult) -> DataFinding:
    assert found.faults == ()
    (one,) = [one for one in found.findings if one.kind not in ("sizes", "islands")]
    return one


def test_a_sound_federation_has_no_finding(sound: Path) -> None:
    assert check(sound).findings == ()


@pytest.mark.parametrize(("kind", "spoil", "severity", "file", "words"), FOUND)
def test_every_finding_says_file_effect_and_remedy(
    fed: Path, kind: str, spoil: Callable[[Path], object], severity: str, file: str, words: str
) -> None:
    spoil(fed)
    found = only(check(fed))
    assert (found.kind, found.severity, found.file) == (kind, severity, file)
    assert words in found.what
    assert found.effect.endswith(".") and found.remedy.endswith(".")


def test_islands_and_specks(fed: Path) -> None:
    mask = block(0)
    mask[::16, ::16] = 1  # single pixels; the label has 400
    save(fed / "west/labels/2.png", mask)
    (found,) = check(fed).findings
    assert (found.kind, found.case) == ("islands", "c2")


def test_a_small_site_is_named_with_the_batch(sound: Path) -> None:
    findings = check(sound, batch=3).findings
    assert [(found.kind, found.site) for found in findings] == [("small site", "east"), ("small site", "west")]
    assert "2 training cases, the study's batch 3" in findings[0].what
    assert check(sound, batch=2).findings == ()


def test_grey_images_in_a_federation_of_colour(fed: Path) -> None:
    write_federation_toml(fed, "segmentation", ["disc"], 2, 3)
    for path in fed.glob("*/images/*.png"):
        grey = np.asarray(Image.open(path))
        save(path, np.stack([grey, grey, grey if path.parts[-3] == "west" else 255 - grey], axis=-1))
    assert {(found.kind, found.site) for found in check(fed).findings} == {("grey as colour", "west")}


def volumes(folder: Path, cases: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], site: str = "west") -> None:
    write_federation_toml(folder, "segmentation", ["liver"], 3, 1)
    (folder / site).mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (image, mask) in enumerate(cases):
        for name, array in ((f"{i}.nii.gz", image), (f"m{i}.nii.gz", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([1.0, 1, 2, 1])), folder / site / name)
        rows.append(Case(f"c{i}", f"{site}-{i}", ("train", "test")[i % 2], Path(f"{i}.nii.gz"), Path(f"m{i}.nii.gz")))
    write_site(folder, site, rows)


def ct(number: int, offset: float = 0.0) -> Any:
    rng = np.random.default_rng(number)
    return (rng.integers(-1000, 400, (20, 12, 6)) + offset).astype(np.int16)


def liver(number: int, left: bool = False) -> Any:
    mask = np.zeros((20, 12, 6), np.uint8)
    mask[12:18, 3 : 8 + number % 2, 1 : 4 + number % 3 // 2] = 1
    return mask[::-1].copy() if left else mask


def test_a_mirrored_volume_is_found_by_its_organ(tmp_path: Path) -> None:
    volumes(tmp_path, [(ct(i), liver(i, left=i == 4)) for i in range(7)])
    found = [one for one in check(tmp_path).findings if one.kind == "other side"]
    assert [one.case for one in found] == ["c4"]
    assert "'liver' lies on the left; in 6 of 7 cases it lies on the other side" in found[0].what


def test_values_that_cannot_be_hounsfield_units(tmp_path: Path) -> None:
    volumes(tmp_path, [(ct(i), liver(i)) for i in range(3)], "east")
    volumes(tmp_path, [(ct(9 + i, offset=1024), liver(i)) for i in range(2)], "west")
    found = [one for one in check(tmp_path).findings if one.kind == "not HU"]
    assert [one.site for one in found] == ["west", "west"]
    assert "which cannot be HU" in found[0].what and "intercept" in found[0].remedy


def test_sites_with_other_spacings_types_and_ranges(tmp_path: Path) -> None:
    volumes(tmp_path, [(np.abs(ct(i)), liver(i)) for i in range(2)], "east")
    volumes(tmp_path, [(np.abs(ct(9 + i)).astype(np.float32) * 30, liver(i)) for i in range(2)], "west")
    for path in (tmp_path / "west").glob("*.nii.gz"):
        image = nibabel.load(path)
        nibabel.save(nibabel.Nifti1Image(np.asanyarray(image.dataobj), np.diag([2.0, 2, 2, 1])), path)
    found = {one.kind: one for one in check(tmp_path).findings}
    assert found["spacings"].severity == "warning" and "2.0 times" in found["spacings"].effect
    assert "east int16; west float32" in found["number types"].what
    assert found["intensities"].severity == "warning"


def test_a_site_whose_own_cases_have_other_ranges(tmp_path: Path) -> None:
    """As the hippocampus of the Decathlon: bytes, and values up to 400,000."""
    cases = [(np.abs(ct(i)).astype(np.int32) * (1000 if i % 2 else 1), liver(i)) for i in range(6)]
    volumes(tmp_path, cases, "east")
    (found,) = [one for one in check(tmp_path).findings if one.kind == "intensities"]
    assert (found.severity, found.site) == ("warning", "east")
    assert "cases of site 'east' differ" in found.what and "zscore" in found.remedy


def test_a_dicom_header_that_names_a_patient(tmp_path: Path) -> None:
    write_federation_toml(tmp_path / "fed", "classification", ["x"], 3, 1)
    for i, name in enumerate((PERSON, "Anonymous")):
        place = tmp_path / "fed/west" / f"s{i}"
        write_series(place, np.random.default_rng(i).integers(0, 99, (3, 5, 4)).astype(np.int16))
        for file in place.iterdir() if i else ():
            header = dcmread(file)
            header.PatientName, header.PatientBirthDate = name, ""
            header.save_as(file)
    write_site(tmp_path / "fed", "west", [Case(f"c{i}", f"p{i}", "train", Path(f"s{i}"), "x") for i in range(2)])
    result = check(tmp_path / "fed")
    (found,) = [one for one in result.findings if one.kind == "names a person"]
    assert (found.case, "PatientName" in found.what) == ("c0", True)
    assert PERSON not in str(result.findings) + json.dumps(result.tally())
    said = fix(tmp_path / "fed", tmp_path / "to")
    assert ["names no person now" in line for line in said] == [True]
    assert not [one for one in check(tmp_path / "to").findings if one.kind == "names a person"]
    assert PERSON.encode() not in b"".join(path.read_bytes() for path in (tmp_path / "to").rglob("*") if path.is_file())


def test_a_referenced_dicom_header_stays_and_fix_says_so(tmp_path: Path) -> None:
    write_federation_toml(tmp_path / "fed", "classification", ["x"], 3, 1)
    write_series(tmp_path / "raw/s0", np.random.default_rng(0).integers(0, 99, (3, 5, 4)).astype(np.int16))
    cases = [Case("c0", "p0", "train", tmp_path / "raw/s0", "x")]
    write_site(tmp_path / "fed", "west", cases, root=tmp_path / "raw")
    (found,) = [one for one in check(tmp_path / "fed").findings if one.kind == "names a person"]
    assert found.remedy == "De-identify it where it lies: --fix does not change what is outside the site's folder."
    said = fix(tmp_path / "fed", tmp_path / "to")
    assert said == ["not mended: the DICOM header of case 'c0' of site 'west': the file stays under its root."]


def test_fix_mends_what_is_safe_and_leaves_out_leaks(fed: Path, tmp_path: Path) -> None:
    save(fed / "west/labels/1.png", block(5) * 255)
    save(fed / "west/images/2.png", np.stack([picture(12)] * 3, axis=-1))
    save(fed / "east/images/0.png", picture(3))  # the east's own test picture
    assert len(check(fed).faults) == 2
    said = fix(fed, tmp_path / "to")
    assert [line.split(":")[0] for line in said] == ["left out", "mended", "mended"]
    after = check(tmp_path / "to")
    assert (after.faults, after.errors) == ((), ())
    assert np.asarray(Image.open(tmp_path / "to/west/labels/1.png")).max() == 1
    assert [case.name for case in read_federation(tmp_path / "to").sites["east"].cases] == ["c1", "c2", "c3"]


def test_only_counts_may_leave(fed: Path) -> None:
    brighter(fed)
    save(fed / "west/labels/1.png", np.zeros((SIZE, SIZE)))
    (fed / "east/images/1.png").write_bytes(b"")
    tally = check(fed).tally()
    assert tally["findings"]["west"] == {"error": {"near copy": 1}, "warning": {"empty mask": 1}}
    assert tally["findings"]["east"] == {"error": {"fault": 1}}
    text = json.dumps(tally)
    assert not [word for word in ("c0", "c1", "east-", "west-", ".png", str(fed)) if word in text]


def test_what_was_seen_is_not_read_again(fed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.data.gathering.SETTLED", -(10**12))
    federation = read_federation(fed)
    with pytest.raises(RuntimeError):  # stopped after three of eight
        look_at_all(federation, progress=lambda done, _: _stop() if done == 3 else None)
    seen: list[tuple[int, int]] = []
    looks = look_at_all(federation, progress=lambda *now: seen.append(now))
    assert seen == [(n, 8) for n in range(4, 9)]
    monkeypatch.setattr("consilium.data.gathering.examine", None)  # nothing is left to read
    assert look_at_all(federation) == looks


def _stop() -> None:
    raise RuntimeError("stopped")


@pytest.mark.slow
def test_processes_see_the_same(sound: Path) -> None:
    federation = read_federation(sound)
    assert look_at_all(federation, workers=2) == look_at_all(federation, workers=0)


def test_a_copy_is_told_from_another_patient() -> None:
    rng = np.random.default_rng(0)
    base = picture(0)
    noisy = np.clip(base * 0.9 + 10 + rng.normal(0, 2, base.shape), 0, 255)
    pictures = [base, noisy, picture(1), base[:, ::-1]]
    thumbnails = np.stack([thumbnail(one[None].astype(np.float32)) for one in pictures])
    assert list(near_pairs([perceptual_hash(one) for one in thumbnails], thumbnails)) == [(0, 1)]


def test_severities_are_ordered(fed: Path) -> None:
    save(fed / "west/images/0.png", picture(13))
    save(fed / "west/labels/1.png", np.zeros((SIZE, SIZE)))
    found = [SEVERITIES.index(one.severity) for one in check(fed).findings]
    assert found == sorted(found) and set(found) == {0, 1}
