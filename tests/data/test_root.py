"""The one exception to "paths may not leave the site's folder": a root that site.toml names."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.data.check import check
from consilium.data.fixing import fix
from consilium.data.site_folder import Case, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A site of one case whose image lies in tmp_path/raw; tmp_path/other is nobody's."""
    for place in ("raw/sub", "other", "to/site/labels"):
        (tmp_path / place).mkdir(parents=True)
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
    for place in ("raw/sub", "other"):
        Image.fromarray(pixels).save(tmp_path / place / "a.png")
    Image.fromarray((pixels > 7).astype(np.uint8)).save(tmp_path / "to/site/labels/a.png")
    write_federation_toml(tmp_path / "to", "segmentation", ["x"], 2, 1)
    case = Case("a", "a", "train", tmp_path / "raw/sub/a.png", Path("labels/a.png"))
    write_site(tmp_path / "to", "site", [case], root=tmp_path / "raw")
    return tmp_path


def test_an_image_may_lie_in_the_root(folder: Path) -> None:
    assert "root:sub/a.png" in (folder / "to/site/cases.csv").read_text()
    site = read_federation(folder / "to").sites["site"]
    assert site.root == folder / "raw"
    assert site.cases[0].image == folder / "raw/sub/a.png"
    assert check(folder / "to").faults == ()


def test_a_mended_copy_still_refers_to_the_root(folder: Path) -> None:
    fix(folder / "to", folder / "sound")
    shutil.rmtree(folder / "to")
    assert read_federation(folder / "sound").sites["site"].cases[0].image == folder / "raw/sub/a.png"
    assert not (folder / "sound/site/sub").exists()


def test_a_link_may_lead_into_the_root(folder: Path) -> None:
    (folder / "to/site/a.png").symlink_to(folder / "raw/sub/a.png")
    replace_in(folder, "root:sub/a.png", "a.png")
    assert check(folder / "to").faults == ()


def replace_in(folder: Path, old: str, new: str) -> None:
    table = folder / "to/site/cases.csv"
    table.write_text(table.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("root:../other/a.png", "leaves the site's folder"),
        ("root:/etc/passwd.png", "leaves the site's folder"),
        ("root:link.png", "is a link that leaves the site's folder and its root"),
        ("root:loop.png", "does not exist|is a link that leaves|is not a file"),
        ("root:none.png", "does not exist"),
    ],
)
def test_nothing_leaves_the_root(cell: str, words: str, folder: Path) -> None:
    (folder / "raw/link.png").symlink_to(folder / "other/a.png")
    (folder / "raw/loop.png").symlink_to(folder / "raw/loop.png")
    replace_in(folder, "root:sub/a.png", cell)
    with pytest.raises(DataError, match=words):
        read_federation(folder / "to")


def test_a_root_is_named_by_its_whole_path(folder: Path) -> None:
    toml = folder / "to/site/site.toml"
    toml.write_text(toml.read_text().replace(str(folder / "raw"), "../../raw"))
    with pytest.raises(DataError, match=r"root '\.\./\.\./raw' is not a folder; write its whole path"):
        read_federation(folder / "to")
    toml.write_text('name = "site"\n')
    with pytest.raises(DataError, match=r"'root:sub/a\.png' needs a root"):
        read_federation(folder / "to")
