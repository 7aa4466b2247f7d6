"""The tables of a federation: what is read, and the sentence for everything that can be wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from consilium.data.case_table import read_table
from consilium.data.site_folder import Case, inside_of, read_federation, survey
from consilium.data.site_writing import write_federation_toml, write_site, write_table
from consilium.errors import DataError

HEAD = 'task = "segmentation"\nlabels = ["disc", "cup"]\ndimensions = 2\nchannels = 3\ncontains = {disc = ["cup"]}\n'
ROWS = "case,patient,split,image,label\na,p1,train,images/a.png,labels/a.png\nb,p2,,images/b.png,labels/b.png\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "federation.toml").write_text(HEAD)
    for site in ("west", "east"):
        for kind in ("images", "labels"):
            (tmp_path / site / kind).mkdir(parents=True)
            for name in "abc":
                (tmp_path / site / kind / f"{name}.png").write_bytes(b"not opened by reading tables")
        (tmp_path / site / "site.toml").write_text(f'name = "{site}"\n')
        (tmp_path / site / "cases.csv").write_text(ROWS)
    return tmp_path


def test_reads_what_is_written(folder: Path) -> None:
    federation = read_federation(folder)
    assert (federation.task, federation.labels, federation.dimensions) == ("segmentation", ("disc", "cup"), 2)
    assert federation.channels == 3
    assert federation.contains == {"disc": ("cup",)}
    assert list(federation.sites) == ["east", "west"]
    west = federation.sites["west"]
    assert west.annotated == ("disc", "cup")
    place = folder / "west"
    assert west.cases[0] == Case("a", "p1", "train", place / "images/a.png", place / "labels/a.png")
    assert west.cases[1].split == ""


def test_a_site_that_says_what_it_draws_may_have_cases_without_a_mask(folder: Path) -> None:
    (folder / "west/site.toml").write_text('name = "west"\nannotated = ["disc"]\n')
    table = folder / "west/cases.csv"
    table.write_text(ROWS + "c,p3,train,images/c.png,\n")
    west = read_federation(folder).sites["west"]
    assert west.cases[2] == Case("c", "p3", "train", folder / "west/images/c.png", None)
    write_site(folder, "west", west.cases, west.annotated)
    assert table.read_text() == ROWS + "c,p3,train,images/c.png,\n"
    table.write_text(ROWS + "c,p3,test,images/c.png,\n")
    with pytest.raises(DataError, match=r"case 'c': label is missing, so nothing can be scored on this test case"):
        read_federation(folder)


def test_written_tables_come_back(tmp_path: Path) -> None:
    write_federation_toml(tmp_path, "classification", ["nævus", 'a "quoted" one'], 2, 1)
    place = tmp_path / "north"
    place.mkdir()
    for name in ("1.png", "2.png"):
        (place / name).touch()
    cases = (
        Case("one", "p, 1", "test", place / "1.png", "nævus"),
        Case("two", "p2", "", Path("2.png"), 'a "quoted" one'),
    )
    write_site(tmp_path, "north", cases, annotated=["nævus"], source="a\\b", licence="CC0")
    site = read_federation(tmp_path).sites["north"]
    assert (site.annotated, site.source, site.licence) == (("nævus",), "a\\b", "CC0")
    assert [(c.name, c.patient, c.split, c.image.name, c.label) for c in site.cases] == [
        ("one", "p, 1", "test", "1.png", "nævus"),
        ("two", "p2", "", "2.png", 'a "quoted" one'),
    ]


def test_a_case_outside_the_site_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not inside"):
        write_site(tmp_path, "north", [Case("a", "a", "", tmp_path / "elsewhere.png", "x")])


def test_spreadsheet_habits_are_accepted(folder: Path) -> None:
    text = "\ufeffcase,patient,split,image,label,age,\r\n a , p1 ,train,images/a.png,labels/a.png,44,\r\n,,,,,,\r\n"
    (folder / "west" / "cases.csv").write_bytes(text.encode())
    (folder / "federation.toml").write_bytes(b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode())
    cases = read_federation(folder).sites["west"].cases
    assert [(case.name, case.patient) for case in cases] == [("a", "p1")]


def test_rewriting_a_table_keeps_its_columns_mark_and_line_ends(folder: Path) -> None:
    path = folder / "west" / "cases.csv"
    raw = b'\xef\xbb\xbfcase,patient,split,image,label,age\r\na,"p,1",train,images/a.png,labels/a.png,44\r\n'
    path.write_bytes(raw)
    write_table(path, read_table(path))
    assert path.read_bytes() == raw


def test_other_folders_and_hidden_ones_are_not_sites(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "site.toml").touch()
    assert list(read_federation(folder).sites) == ["east", "west"]


def test_regions_inside_at_any_depth() -> None:
    assert inside_of("eye", {"eye": ("disc",), "disc": ("cup",)}) == {"disc", "cup"}


def head(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: _replace(folder / "federation.toml", old, new)


def site(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "west" / "site.toml").write_text(text)


def rows(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: _replace(folder / "west" / "cases.csv", old, new)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def link_out(folder: Path) -> None:
    path = folder / "west" / "images" / "a.png"
    path.unlink()
    path.symlink_to(folder / "east" / "images" / "a.png")


def link_folder_out(folder: Path) -> None:
    (folder / "west" / "far").symlink_to(folder / "east" / "images")
    _replace(folder / "west" / "cases.csv", "images/a.png", "far/a.png")


def folder_as_table(folder: Path) -> None:
    (folder / "west" / "cases.csv").unlink()
    (folder / "west" / "cases.csv").mkdir()


def classes(folder: Path) -> None:
    head('"segmentation"', '"classification"')(folder)
    head('contains = {disc = ["cup"]}\n', "")(folder)
    for name in ("west", "east"):
        text = (folder / name / "cases.csv").read_text()
        (folder / name / "cases.csv").write_text(text.replace("labels/a.png", "disk").replace("labels/b.png", "cup"))


BROKEN = [
    # what is broken, words the sentence must contain
    (lambda f: (f / "federation.toml").unlink(), ["federation.toml", "is missing"]),
    (lambda f: (f / "federation.toml").write_text("task = "), ["federation.toml", "TOML"]),
    (lambda f: (f / "federation.toml").write_bytes(b"\xff\xfe"), ["federation.toml", "TOML"]),
    (head("labels =", "lables ="), ["'lables'", "did you mean 'labels'", "key 'labels' is missing"]),
    (head("channels = 3\n", ""), ["key 'channels' is missing", "whole number"]),
    (head("channels = 3", 'channels = "3"'), ["channels", "must be a whole number"]),
    (head("channels = 3", "channels = true"), ["channels", "must be a whole number"]),
    (head("channels = 3", "channels = 0"), ["channels is 0"]),
    (head("dimensions = 2", "dimensions = 4"), ["dimensions is 4"]),
    (head('"segmentation"', '"segmentations"'), ["'segmentations'", "did you mean 'segmentation'"]),
    (head('["disc", "cup"]', "[]"), ["labels is empty"]),
    (head('["disc", "cup"]', '"disc"'), ["labels", "list of texts"]),
    (head('["disc", "cup"]', '["cup", "cup"]'), ["repeated"]),
    (head('["disc", "cup"]', '["background", "disc", "cup"]'), ["'background'", "value 0"]),
    (head('["disc", "cup"]', '["disc", "cup", "mean"]'), ["labels has 'mean'", "another name"]),
    (head('["cup"]', '["cop"]'), ["contains names 'cop'", "did you mean 'cup'"]),
    (head('["cup"]', '["disc"]'), ["'disc' inside itself"]),
    (head('"segmentation"', '"classification"'), ["contains is for masks"]),
    (lambda f: (f / "west" / "site.toml").unlink(), ["west/site.toml", "is missing"]),
    (site('nmae = "west"\n'), ["west/site.toml", "'nmae'", "did you mean 'name'"]),
    (site('name = "a/b"\n'), ["'a/b' cannot be used"]),
    (site('name = "east"\n'), ["'east' is also the name of"]),
    (site('name = "west"\nannotated = ["disk"]\n'), ["annotated names 'disk'", "did you mean 'disc'"]),
    (site('name = "west"\nannotated = []\n'), ["annotated is empty"]),
    (site('name = "west"\nlicense = "x"\n'), ["'license'", "did you mean 'licence'"]),
    (lambda f: (f / "west" / "cases.csv").unlink(), ["west/cases.csv", "is missing"]),
    (folder_as_table, ["west/cases.csv", "cannot be read: Is a directory"]),
    (lambda f: (f / "west" / "cases.csv").write_text(""), ["west/cases.csv", "is empty"]),
    (lambda f: (f / "west" / "cases.csv").write_text(ROWS.splitlines()[0]), ["west/cases.csv", "has no case"]),
    (lambda f: (f / "west" / "cases.csv").write_bytes(ROWS.encode() + b"\xe4,"), ["UTF-8"]),
    (lambda f: (f / "west" / "cases.csv").write_text(ROWS.replace(",", ";")), ["separated by ';'", "commas"]),
    (rows("case,patient,split", "case,patients,split"), ["no column patient", "rename 'patients'"]),
    (rows("a,p1,train", "b,p1,train"), ["case 'b'", "twice"]),
    (rows("a,p1,train", ",p1,train"), ["row 1 has no case name"]),
    (rows("a,p1,train", "../a,p1,train"), ["cannot name a file"]),
    (rows("a,p1,train", "a,,train"), ["case 'a'", "patient is missing"]),
    (rows("a,p1,train", "a,p1,training"), ["case 'a'", "'training' is unknown", "train, valid or test"]),
    (rows("b,p2,,", "b,p1,test,"), ["case 'b'", "patient 'p1' is in two splits, train and test"]),
    (rows("images/a.png", "images/z.png"), ["case 'a'", "'images/z.png' does not exist"]),
    (rows("images/a.png", "images\\a.png"), ["does not exist", "write '/'"]),
    (rows("images/a.png", "../east/images/a.png"), ["leaves the site's folder"]),
    (rows("images/a.png", "/etc/hostname.png"), ["leaves the site's folder"]),
    (rows("images/a.png", "C:\\a.png"), ["leaves the site's folder"]),
    (rows("images/a.png", "images/a.gif"), ["'images/a.gif'", "accepted format", ".png"]),
    (rows("images/a.png", ""), ["image is missing"]),
    (rows(",labels/a.png", ""), ["case 'a'", "label is missing"]),
    (rows("labels/a.png", "labels/a.png,more"), ["case 'a'", "'more' have no column"]),
    (link_out, ["'images/a.png' is a link that leaves"]),
    (link_folder_out, ["'far/a.png' is a link that leaves"]),
    (classes, ["class 'disk' is not in federation.toml", "did you mean 'disc'"]),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN, ids=[words[-1][:30] for _, words in BROKEN])
def test_every_fault_has_its_sentence(folder: Path, damage: Callable[[Path], object], words: list[str]) -> None:
    damage(folder)
    with pytest.raises(DataError) as caught:
        read_federation(folder)
    for word in words:
        assert word in str(caught.value)


def test_no_fault_hides_behind_the_first(folder: Path) -> None:
    rows("images/a.png", "images/y.png")(folder)
    rows("labels/a.png", "labels/y.png")(folder)
    rows("images/b.png", "images/z.png")(folder)
    (folder / "east" / "site.toml").write_text('name = "east"\ncolour = "red"\n')
    head("channels = 3", "channels = 3\nchanels = 3")(folder)
    with pytest.raises(DataError) as caught:
        read_federation(folder)
    first, *others = str(caught.value).splitlines()
    assert first.startswith("5 faults in the tables of the federation")
    assert len(others) == 5


def test_sound_cases_survive_a_broken_neighbour(folder: Path) -> None:
    rows("images/a.png", "images/y.png")(folder)
    found = survey(folder)
    assert found.federation is not None
    assert [case.name for case in found.federation.sites["west"].cases] == ["b"]
    assert [(fault.site, fault.case, fault.file) for fault in found.faults] == [("west", "a", "west/cases.csv")]
    (row,) = found.rejected
    assert (row.name, row.image, row.label) == ("a", None, folder / "west" / "labels/a.png")


def test_a_folder_without_sites_and_no_folder_at_all(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(HEAD)
    with pytest.raises(DataError, match="no site was found"):
        read_federation(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        read_federation(tmp_path / "nowhere")
