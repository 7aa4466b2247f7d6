"""Files appear whole or not at all, stay after a power cut where that is promised, and are private where asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.files import (
    append_lines,
    make_folder,
    read_json,
    sweep_drafts,
    write_bytes,
    write_json,
    write_parts,
    write_text,
)


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


# ---------------------------------------------------------------------------------------------- durable


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a write does to the disk, in order: which file or folder is synced, and when a file gets its name."""
    seen: list[str] = []
    replace = Path.replace

    def synced(descriptor: int) -> None:
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def replaced(path: Path, target: Path) -> Path:
        seen.append(f"rename {path.name} {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    return seen


def test_a_durable_file_is_synced_before_its_rename_and_its_folder_after_it(tmp_path: Path, steps: list[str]) -> None:
    write_bytes(b"x", tmp_path / "state", durable=True)
    draft = f".state.{os.getpid()}"
    assert steps == [f"sync {draft}", f"rename {draft} state", f"sync {tmp_path.name}"]


def test_a_file_that_is_not_durable_waits_for_nothing(tmp_path: Path, steps: list[str]) -> None:
    write_bytes(b"x", tmp_path / "state")
    append_lines("x\n", tmp_path / "log")
    make_folder(tmp_path / "a" / "b")
    assert [step for step in steps if step.startswith("sync")] == []


def test_a_durable_line_is_synced_and_the_folder_when_the_log_is_new(tmp_path: Path, steps: list[str]) -> None:
    append_lines("one\n", tmp_path / "log", durable=True)
    append_lines("two\n", tmp_path / "log", durable=True)
    assert steps == ["sync log", f"sync {tmp_path.name}", "sync log"]


def test_a_durable_folder_is_synced_at_every_depth(tmp_path: Path, steps: list[str]) -> None:
    make_folder(tmp_path / "a" / "b", durable=True)
    make_folder(tmp_path / "a" / "b", durable=True)
    assert steps == [f"sync {tmp_path.name}", "sync a"]


def test_a_line_after_a_torn_one_starts_on_its_own(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"a": 1}\n{"b": ')
    append_lines('{"c": 3}\n', tmp_path / "log")
    assert (tmp_path / "log").read_text().splitlines() == ['{"a": 1}', '{"b": ', '{"c": 3}']


# ---------------------------------------------------------------------------------------------- private


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def test_private_files_and_folders_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    make_folder(tmp_path / "a" / "b", private=True)
    write_bytes(b"x", tmp_path / "a" / "bytes", private=True)
    write_json({}, tmp_path / "a" / "json", private=True)
    append_lines("x\n", tmp_path / "a" / "log", private=True)
    assert {path.name: rights(path) for path in tmp_path.rglob("*")} == {
        **dict.fromkeys(("a", "b"), "0o700"),
        **dict.fromkeys(("bytes", "json", "log"), "0o600"),
    }


def test_other_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    write_bytes(b"x", tmp_path / "file")
    make_folder(tmp_path / "a" / "b")
    assert rights(tmp_path / "file") == oct(0o666 & ~umask)
    assert {rights(tmp_path / "a"), rights(tmp_path / "a" / "b")} == {oct(0o777 & ~umask)}


def test_what_was_open_to_others_is_closed(tmp_path: Path) -> None:
    """Memories of earlier versions, and drafts of killed processes."""
    make_folder(tmp_path / "memory")
    (tmp_path / "memory").chmod(0o755)
    for name in ("state", "log", f".state.{os.getpid()}"):
        (tmp_path / "memory" / name).write_text("before\n")
        (tmp_path / "memory" / name).chmod(0o666)
    make_folder(tmp_path / "memory", private=True)
    write_bytes(b"x", tmp_path / "memory" / "state", private=True)
    append_lines("x\n", tmp_path / "memory" / "log", private=True)
    assert {path.name: rights(path) for path in tmp_path.rglob("*")} == {
        "memory": "0o700",
        "state": "0o600",
        "log": "0o600",
    }


def test_a_private_folder_leaves_the_existing_ones_above_it_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_folder(tmp_path / "memory" / "run", private=True)
    assert [rights(path) for path in (tmp_path, tmp_path / "memory", tmp_path / "memory" / "run")] == [
        "0o755",
        "0o700",
        "0o700",
    ]
