"""Bad input: cut files, files that unpack to a thousand times their size, links in circles, names in any script."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.data import limits
from consilium.data.check import check
from consilium.data.images import read_image
from consilium.data.importers import import_dataset, import_found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.patterns import matches
from consilium.data.importers.sources import files_under
from consilium.data.importers.writing import Writing
from consilium.errors import DataError
from tests.dicom_files import write_series
from tests.raw_trees import disc_and_cup, image_of, save_itk, save_nifti, save_picture, some

DISC = disc_and_cup()[0].astype(np.uint8)
PAIRS = ImportOptions(images="i/{case}.png", masks=("m/{case}.png",), labels=("x",))


# ---------------------------------------------------------------------------------------------------------- cut files


def write_volume(folder: Path, name: str, kind: str) -> Path:
    """An image of some format, and the file of it that can be cut."""
    volume = some(4, 16, 16, kind="int16")
    if kind == "dicom":
        write_series(folder / name, volume, intercept=0.0)
        return next((folder / name).iterdir())
    path = folder / f"{name}.{kind}"
    if kind == "npy":
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, volume)
    elif kind in ("png", "jpg", "bmp", "tif"):
        return save_picture(path, some(16, 16))
    else:
        (save_nifti if kind == "nii.gz" else save_itk)(path, volume)
    return path.with_suffix(".raw") if kind == "mhd" else path


@pytest.mark.parametrize("kind", ["png", "jpg", "bmp", "tif", "nii.gz", "nrrd", "mhd", "mha", "npy", "dicom"])
def test_a_cut_file_gets_a_sentence(kind: str, tmp_path: Path) -> None:
    flat = kind in ("png", "jpg", "bmp", "tif")
    for name in ("a", "b"):
        cut = write_volume(tmp_path / "raw/i", name, kind)
        mask = tmp_path / f"raw/m/{name}"
        if flat:
            save_picture(mask.with_suffix(".png"), DISC)
        else:
            save_nifti(mask.with_suffix(".nii.gz"), np.stack([DISC] * 4))
    cut.write_bytes(cut.read_bytes()[: int(cut.stat().st_size * 0.6)])
    options = ImportOptions(
        images="i/{case}" + ("" if kind == "dicom" else f".{kind}"),
        masks=("m/{case}" + (".png" if flat else ".nii.gz"),), labels=("x",), dimensions=2 if flat else 3, channels=1,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"(?s)One doubt, so nothing was written.*/b(\.|: |/).*"):
        import_found("folder", [tmp_path / "raw"], tmp_path / "to", options)
    assert not (tmp_path / "to").exists()


# -------------------------------------------------------------------------------------------------------------- bombs


def png_bomb(path: Path) -> None:
    """40,000 × 40,000 white pixels in a few kilobytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 40000, 40000, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def nifti_bomb(path: Path) -> None:
    """A header of 30,000³ voxels and no voxels."""
    head = nibabel.Nifti1Header()
    head.set_data_shape((30000, 30000, 30000))
    head["magic"], head["vox_offset"] = b"n+1", 352
    path.write_bytes(gzip.compress(head.binaryblock + b"\0" * 4))


def nifti_header_bomb(path: Path) -> None:
    """Gigabytes before the first voxel."""
    head = nibabel.Nifti1Header()
    head.set_data_shape((2, 2, 2))
    head["magic"], head["vox_offset"] = b"n+1", 2**33
    path.write_bytes(gzip.compress(head.binaryblock + b"\1\0\0\0" + b"\0" * 64))


def nrrd_bomb(path: Path) -> None:
    path.write_bytes(
        b"NRRD0004\ntype: short\ndimension: 3\nsizes: 30000 30000 30000\nendian: little\nencoding: gzip\n\n"
        + gzip.compress(b"\0" * 99)
    )


def mha_bomb(path: Path) -> None:
    path.write_bytes(
        b"ObjectType = Image\nNDims = 3\nBinaryData = True\nCompressedData = True\nDimSize = 30000 30000 30000\n"
        b"ElementType = MET_SHORT\nElementDataFile = LOCAL\n" + zlib.compress(b"\0" * 99)
    )


def npy_bomb(path: Path) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**12, 2**12)}
        )


BOMBS: dict[str, tuple[Callable[[Path], None], int]] = {
    "a.png": (png_bomb, 2), "a.nii.gz": (nifti_bomb, 3), "b.nii.gz": (nifti_header_bomb, 3),
    "a.nrrd": (nrrd_bomb, 3), "a.mha": (mha_bomb, 3), "a.npy": (npy_bomb, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_is_not_unpacked(name: str, tmp_path: Path) -> None:
    make, dimensions = BOMBS[name]
    make(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 500_000
    with pytest.raises(DataError, match="cannot be read" if name == "a.npy" else "it was not unpacked"):
        read_image(tmp_path / name, dimensions, 1)


def test_a_tif_of_too_many_pages_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [Image.new("L", (8, 8)) for _ in range(20)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert read_image(tmp_path / "a.tif", 3, 1).array.shape == (1, 20, 8, 8)
    monkeypatch.setattr(limits, "MOST_VALUES", 1000)
    with pytest.raises(
        DataError, match=r"says it holds 20×8×8 values, more than 1,000 of one image; it was not unpacked"
    ):
        read_image(tmp_path / "a.tif", 3, 1)


def test_an_npz_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """Two gigabytes of zeros in two megabytes, as a stream that is never held whole."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key in ("labels", "classes"):
            plain = io.BytesIO()
            np.save(plain, np.zeros(2, np.uint8))
            archive.writestr(f"{key}.npy", plain.getvalue())
        archive.writestr("images.npy", b"\0" * 10_000)
    raw = bytearray(path.read_bytes())
    at = raw.rfind(b"images.npy") - 46  # the entry in the directory at the end
    raw[at + 24 : at + 28] = struct.pack("<I", 2**31)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"images.npy would unpack from .* bytes, which no pictures do"):
        import_dataset("mednist", [path], tmp_path / "to")


def test_an_idx_bomb_is_not_unpacked(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        for kind, axes in (("images", 3), ("labels", 1)):
            head = bytes([0, 0, 8, axes]) + struct.pack(f">{axes}I", *[3000] * axes)
            (tmp_path / f"{part}-{kind}-idx{axes}-ubyte.gz").write_bytes(gzip.compress(head))
    with pytest.raises(DataError, match=r"would unpack from .* to 27,000,000,000 bytes"):
        import_dataset("mnist", [tmp_path], tmp_path.with_name("to"))


# ---------------------------------------------------------------------------------------- links, names, rights, numbers


def write_pairs(folder: Path, names: list[str]) -> None:
    for name in names:
        save_picture(folder / f"i/{name}.png", some(16, 16))
        save_picture(folder / f"m/{name}.png", DISC)


def test_links_in_a_circle_and_out_of_the_folder(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_pairs(raw, ["a", "b"])
    save_picture(tmp_path / "secret.png", some(16, 16))
    (raw / "i/loop").symlink_to(raw)
    (raw / "i/self.png").symlink_to(raw / "i/self.png")
    (raw / "i/c.png").symlink_to(raw / "i/a.png")  # inside: an image like others
    save_picture(raw / "m/c.png", DISC)
    assert len(files_under(raw).files) == 6
    federation = import_found("folder", [raw], tmp_path / "to", PAIRS).federation
    assert [case.name for case in federation.sites["site1"].cases] == ["a", "b", "c"]
    assert not any(path.is_symlink() for path in (tmp_path / "to").rglob("*"))
    (raw / "i/d.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=r"1 link leads out of .*; not read: i/d\.png"):
        import_found("folder", [raw], tmp_path / "other", PAIRS)


def test_names_in_any_script(tmp_path: Path) -> None:
    names = ["患者 1", "étude", "наблюдение", "عين", "a'b, c", "#5"]
    write_pairs(tmp_path / "raw", names)
    federation = import_found("folder", [tmp_path / "raw"], tmp_path / "to", PAIRS).federation
    assert {case.name for case in federation.sites["site1"].cases} == set(names)
    assert check(tmp_path / "to").faults == ()
    np.testing.assert_array_equal(image_of(federation, "患者 1")[0], some(16, 16))


def test_a_name_that_breaks_lines_is_a_doubt(tmp_path: Path) -> None:
    write_pairs(tmp_path / "raw", ["a", "b\nc"])
    with pytest.raises(DataError, match=r"the case name 'b\\nc' cannot name a file"):
        import_found("folder", [tmp_path / "raw"], tmp_path / "to", PAIRS)


def test_a_read_only_source_gives_files_that_can_be_changed(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    write_pairs(raw, ["a", "b"])
    for path in raw.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        import_found("folder", [raw], tmp_path / "to", PAIRS)
    finally:
        for path in (raw / "i", raw / "m"):
            path.chmod(0o755)
    assert all(os.stat(path).st_mode & stat.S_IWUSR for path in (tmp_path / "to").rglob("*"))
    shutil.rmtree(tmp_path / "to")


def test_a_folder_that_cannot_be_read_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pairs(tmp_path, ["a"])

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\); give yourself the right to read it"):
        files_under(tmp_path)


def test_ten_thousand_names_are_matched() -> None:
    files = [Path(f"i/{n // 2:05d}_{'LR'[n % 2]}.png") for n in range(10_000)]
    found = matches("i/{patient}_{eye}.png", files)
    assert len({one.case for one in found}) == 10_000


@pytest.mark.slow
def test_ten_thousand_cases(tmp_path: Path) -> None:
    for number in range(10_000):
        path = tmp_path / f"raw/{'ab'[number % 2]}/{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number % 251, np.uint8)).save(path)
    options = ImportOptions(images="{class}/*.png")
    federation = import_found(
        "folder", [tmp_path / "raw"], tmp_path / "to", options, Writing(reference=True)
    ).federation
    assert len(federation.sites["site1"].cases) == 10_000
