"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.files import read_json, sweep_drafts, write_bytes, write_json, write_parts, write_text


def full_disk() -> Iterator[bytes]:
    yield b"the first half"
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_midway_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_bytes(b"before", path)
    with pytest.raises(OSError, match="No space left"):
        write_parts(full_disk(), path)
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_short_writes_are_repeated_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nearly full disk takes a few bytes at a time."""
    whole = os.write
    monkeypatch.setattr("consilium.files.os.write", lambda descriptor, view: whole(descriptor, bytes(view[:7])))
    parts = [bytes([number]) * size for number, size in enumerate((3, 40, 1 << 10, 0, 5))]
    assert write_parts(iter(parts), tmp_path / "state") == sum(map(len, parts))
    monkeypatch.undo()
    assert (tmp_path / "state").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("sizes", [(), (0,), (1 << 18,), (1, 1 << 18, 1), (200_000, 200_000, 3), (1 << 19, 5, 1 << 19)])
def test_small_and_large_parts_keep_their_order(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert write_parts(iter(parts), tmp_path / "state") == sum(sizes)
    assert (tmp_path / "state").read_bytes() == b"".join(parts)


def test_a_text_keeps_the_rights_of_the_file_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    write_text("old", path)
    path.chmod(0o640)
    write_text("näu", path, "latin-1")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"n\xe4u", 0o640)


def test_what_killed_processes_were_writing_is_swept(tmp_path: Path) -> None:
    kept = [".lock", "state", ".hidden", "a.123"]
    for name in (*kept, ".state.safetensors.4711"):
        (tmp_path / name).touch()
    sweep_drafts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_json_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json({"x": [1, 2.5, None]}, path)
    with pytest.raises(ValueError, match="Out of range"):
        write_json({"x": float("nan")}, path)
    assert read_json(path) == {"x": [1, 2.5, None]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
