"""Images that are in two federations, told by their content and not by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from consilium.data import same_files as module
from consilium.data.same_files import same_files
from consilium.data.site_folder import Case, SiteFolder

LONG = bytes(2 * module.HEAD)


def a_site(folder: Path, contents: Mapping[str, bytes], split: str) -> SiteFolder:
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    cases = tuple(Case(name, name, split, folder / name, None) for name in contents)
    return SiteFolder(folder.name, folder, (), "", "", cases)


def test_only_files_that_begin_alike_are_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = a_site(
        tmp_path / "new", {"copy.npy": LONG, "near.npy": LONG[:-1] + b"x", "other.npy": b"x" + LONG[1:]}, "test"
    )
    old = a_site(tmp_path / "old", {"first.npy": LONG, "second.npy": b"y" + LONG[1:]}, "train")
    read: list[str] = []
    whole = module.file_hash
    monkeypatch.setattr(module, "file_hash", lambda path: read.append(path.name) or whole(path))
    assert same_files([new], ["test"], [old], ["train"]) == ["new/copy.npy"]
    assert sorted(read) == ["copy.npy", "first.npy", "near.npy"]


def test_pictures_of_one_stack_are_told_by_their_places(tmp_path: Path) -> None:
    stack, copy = (a_site(tmp_path / name, {"all.npy": LONG}, "").folder / "all.npy" for name in ("old", "new"))
    old = SiteFolder("old", stack.parent, (), "", "", (Case("a", "a", "train", Path(f"{stack}#0"), None),))
    new = SiteFolder(
        "new", copy.parent, (), "", "", tuple(Case(f"c{i}", "", "test", Path(f"{copy}#{i}"), None) for i in range(3))
    )
    assert same_files([new], ["test"], [old], ["train"]) == ["new/c0"]


def test_a_file_that_cannot_be_read_is_no_other(tmp_path: Path) -> None:
    new, old = a_site(tmp_path / "new", {"a.npy": LONG}, "test"), a_site(tmp_path / "old", {"a.npy": LONG}, "train")
    (old.folder / "a.npy").unlink()
    (new.folder / "a.npy").unlink()
    assert same_files([new], ["test"], [old], ["train"]) == []
