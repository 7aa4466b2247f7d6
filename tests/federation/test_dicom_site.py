"""Hospitals that keep DICOM: they train on series and SEGs, predict into SEGs, and nobody's name leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilium import tree
from consilium.data.images import read_image, read_mask
from consilium.data.mask_files import write_segmentation
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.hospital import Hospital
from consilium.prediction import open_at_hospital, predict_with
from consilium.wires.flare import FlareAnswer
from tests.dicom_files import PERSON, PERSON_ID, write_series
from tests.federation.test_service_and_wire import deploy
from tests.toy import SIZES, draw, toy_study


@pytest.fixture
def hospitals(tmp_path: Path) -> dict[str, Hospital]:
    """Three sites with three scans each, of three slices."""
    data = tmp_path / "dicom"
    write_federation_toml(data, "segmentation", ["blob"], 3, 1)
    for site in SIZES:
        cases = []
        for number, split in enumerate(("train", "valid", "test")):
            images, masks = zip(*(draw(site, 3 * number + z) for z in range(3)))
            scan = data / site / "images" / f"c{number}"
            write_series(scan, np.stack(images).astype(np.uint16))
            label = write_segmentation(np.stack(masks), scan, ["blob"], {}, data / site / "labels" / f"c{number}.dcm")
            cases.append(Case(f"c{number}", f"p{number}", split, scan, label))
        write_site(data, site, cases)
    places = tmp_path / "hospitals"
    return {name: Hospital(name, str(data / name), str(places / name), ("blob",), "cpu") for name in SIZES}


def test_nobodys_name_leaves_and_masks_come_back_as_segs(hospitals: dict[str, Hospital], tmp_path: Path) -> None:
    said: list[bytes] = []

    def listen(site: str, request: Any, answer: FlareAnswer) -> FlareAnswer:
        said.extend((answer.body, tree.to_text(answer.head).encode()))
        return answer

    study = toy_study(tmp_path / "dicom", study__rounds=1, study__score_every=1, preprocess__slices="axial")
    folder = deploy(study, hospitals, tmp_path / "server", listen)
    kept = [path for path in folder.path.rglob("*") if path.is_file()]
    heard = b"".join([*said, *(path.read_bytes() for path in kept)])
    for secret in (PERSON, PERSON_ID, "18200512", "Nightingale"):
        assert secret.encode() not in heard

    scans = tmp_path / "dicom" / "ada" / "images"
    ours, predictor = open_at_hospital(hospitals["ada"])
    done = predict_with(ours, predictor, [scans], tmp_path / "masks")
    assert [Path(one.result).name for one in done] == ["c0.nii.gz", "c1.nii.gz", "c2.nii.gz"]
    again = predict_with(ours, predictor, sorted((scans / "c1").iterdir()), tmp_path / "again")  # scan/* of a shell
    assert [Path(one.result).name for one in again] == ["c1.nii.gz"]
    for name in ("c0", "c1", "c2"):
        image, plain = read_image(scans / name, 3, 1), read_mask(tmp_path / "masks" / f"{name}.nii.gz", 3)
        seg = read_mask(tmp_path / "masks" / f"{name}.seg.dcm", 3)
        assert np.array_equal(seg.array, plain.array)
        assert seg.spacing == pytest.approx(image.spacing)
        for part in ("origin", "direction"):
            assert getattr(seg.geometry, part) == pytest.approx(getattr(image.geometry, part), abs=1e-5)
    named = {path.name for path in (tmp_path / "masks").iterdir() if PERSON.encode() in path.read_bytes()}
    assert named == {"c0.seg.dcm", "c1.seg.dcm", "c2.seg.dcm"}
