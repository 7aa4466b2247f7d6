"""A DICOM series is one volume in its own geometry, and a mask goes back to it as a DICOM SEG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilium.data.check import check
from consilium.data.image_folders import images_in
from consilium.data.images import files_of, read_image, read_mask, together
from consilium.data.mask_files import write_mask, write_segmentation
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import DataError
from tests.dicom_files import write_series

STORED = np.arange(5 * 4 * 6).reshape(5, 4, 6) + 1000
SEEN = STORED[::-1]  # slices go the way of their normal, which points down where rows run backwards
MASK = np.zeros((5, 4, 6), dtype=np.uint8)
MASK[1:4, 1:3, 1:5] = 1
MASK[2, 1:3, 2:4] = 2


def test_a_series_is_one_volume_in_the_order_of_its_places(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", STORED)
    picture = read_image(tmp_path / "scan", 3, 1)
    assert np.array_equal(picture.array[0], SEEN - 1024)
    assert picture.spacing == pytest.approx((3.0, 0.6, 0.5))
    geometry: Any = picture.geometry
    assert geometry.origin == pytest.approx((10, 20, 42))
    assert geometry.direction == pytest.approx((1, 0, 0, 0, -1, 0, 0, 0, -1))
    assert len(files_of(tmp_path / "scan")) == 5


def test_every_slice_is_rescaled_by_its_own_header(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", STORED, slope=0.5, intercept=3.0)
    assert np.array_equal(read_image(tmp_path / "scan", 3, 1).array[0], SEEN * 0.5 + 3)


def test_what_is_shown_dark_where_it_is_high_is_turned(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", STORED, intercept=0.0, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(read_image(tmp_path / "scan", 3, 1).array[0], 4095 - SEEN)


def broken(kind: str, folder: Path) -> None:
    write_series(folder, STORED)
    files = sorted(folder.iterdir(), key=lambda path: _z(path))
    if kind == "missing":
        files[2].unlink()
    elif kind == "twice":
        from pydicom import dcmread
        from pydicom.uid import generate_uid

        copy = dcmread(files[0])
        copy.SOPInstanceUID = copy.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        copy.save_as(folder / "again")
    elif kind == "two series":
        from shutil import copy2

        write_series(folder / "other", STORED)
        for path in (folder / "other").iterdir():
            copy2(path, folder / f"other-{path.name}")
    elif kind == "tilted":
        from pydicom import dcmread

        for z, path in enumerate(files):
            data = dcmread(path)
            data.ImagePositionPatient = [10.0, 20.0 + z, 30.0 + 3 * z]
            data.save_as(path)
    else:
        files[0].write_bytes(files[0].read_bytes()[:200])


def _z(path: Path) -> float:
    from pydicom import dcmread

    return float(dcmread(path).ImagePositionPatient[2])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("missing", "gaps from 3.00 to 6.00 mm"),
        ("twice", "two slices of one place"),
        ("two series", "holds 2 series"),
        ("tilted", "is tilted"),
        ("truncated", "cannot be read"),
    ],
)
def test_a_series_that_is_no_volume_is_refused_in_words(tmp_path: Path, kind: str, why: str) -> None:
    broken(kind, tmp_path / "scan")
    with pytest.raises(DataError, match=why):
        read_image(tmp_path / "scan", 3, 1)


def test_what_a_mac_leaves_beside_the_slices_is_no_slice(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", STORED)
    (tmp_path / "scan/._IM0000.dcm").write_bytes(b"resource fork")
    assert images_in(tmp_path, 3) == [tmp_path / "scan"]
    assert np.array_equal(read_image(tmp_path / "scan", 3, 1).array[0], SEEN - 1024)


def test_one_of_several_series_is_named_by_its_uid(tmp_path: Path) -> None:
    first = write_series(tmp_path / "scan", STORED)
    second = write_series(tmp_path / "other", STORED + 7)
    for path in (tmp_path / "other").iterdir():
        path.rename(tmp_path / "scan" / f"other-{path.name}")
    (tmp_path / "other").rmdir()
    found = images_in(tmp_path, 3)
    assert {path.name for path in found} == {f"scan#{first}", f"scan#{second}"}
    assert np.array_equal(read_image(tmp_path / "scan" / f"../scan#{second}", 3, 1).array[0], SEEN + 7 - 1024)
    files = sorted((tmp_path / "scan").iterdir())
    assert sorted(together(files, 3)) == sorted(found)  # what a shell makes of scan/*
    assert len(images_in(tmp_path, 2)) == 10  # pictures


@pytest.mark.parametrize("inside", [{}, {"liver": {"vessel"}}])
def test_a_mask_comes_back_from_its_seg_on_the_same_grid(tmp_path: Path, inside: dict[str, set[str]]) -> None:
    from pydicom import dcmread

    write_series(tmp_path / "scan", STORED)
    picture = read_image(tmp_path / "scan", 3, 1)
    path = write_segmentation(MASK, tmp_path / "scan", ["liver", "vessel"], inside, tmp_path / "mask.seg.dcm")
    back = read_mask(path, 3)
    assert np.array_equal(back.array, MASK)
    one, two = picture.geometry, back.geometry
    for part in ("spacing", "origin", "direction", "shape"):
        assert getattr(two, part) == pytest.approx(getattr(one, part), abs=1e-5)
    seg = dcmread(path)
    assert [part.SegmentLabel for part in seg.SegmentSequence] == ["liver", "vessel"]
    liver = [frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber for frame in
             seg.PerFrameFunctionalGroupsSequence].count(1)  # fmt: skip
    assert liver == 5
    places = {tuple(frame.PlanePositionSequence[0].ImagePositionPatient)
              for frame in seg.PerFrameFunctionalGroupsSequence}  # fmt: skip
    assert places == {(10.0, 20.0, 30.0 + 3 * z) for z in range(5)}
    assert seg.PatientID  # an archive files it under the same patient


def test_the_plain_mask_lies_where_the_series_lies(tmp_path: Path) -> None:
    write_series(tmp_path / "scan", STORED)
    picture = read_image(tmp_path / "scan", 3, 1)
    path = write_mask(MASK, picture, tmp_path / "scan.dcm")
    assert path.name == "scan.nii.gz"
    import SimpleITK

    back = SimpleITK.ReadImage(str(path))
    assert np.array_equal(SimpleITK.GetArrayFromImage(back), MASK)
    geometry: Any = picture.geometry
    assert back.GetOrigin() == pytest.approx(geometry.origin)
    assert back.GetDirection() == pytest.approx(geometry.direction)


def test_a_site_folder_holds_series_and_segs(tmp_path: Path) -> None:
    write_federation_toml(tmp_path, "segmentation", ["liver", "vessel"], 3, 1)
    cases = []
    for number, split in enumerate(("train", "valid", "test")):
        scan = tmp_path / "ada" / "images" / f"c{number}"
        write_series(scan, STORED + number)
        label = write_segmentation(MASK, scan, ["liver", "vessel"], {}, tmp_path / "ada" / "labels" / f"c{number}.dcm")
        cases.append(Case(f"c{number}", f"p{number}", split, scan, label))
    write_site(tmp_path, "ada", cases)
    assert not check(tmp_path).faults
    (tmp_path / "ada" / "images" / "c1" / "IM0007").unlink()
    assert "gaps" in str(check(tmp_path).faults[0])
    for path in (tmp_path / "ada" / "images" / "c1").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="without DICOM files"):
        read_federation(tmp_path)
