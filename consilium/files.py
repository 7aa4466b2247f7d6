"""Writes files completely or not at all.

`durable`: the file survives a power cut. Its bytes are on the disk before it gets its name, and the folder that holds
the name is on the disk before the call returns. `private`: only its owner can read it, whatever the umask is; files
are 0600, folders 0700.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from consilium.errors import RunError, UserError

_DRAFT = re.compile(r"\..+\.\d+")  # of a file being written: .name.process
_SMALL = 1 << 18  # bytes; below, a copy costs less than a separate system call

Part = bytes | memoryview


def write_parts(
    parts: Iterable[Part],
    path: Path,
    durable: bool = False,
    rights: bool = False,
    private: bool = False,
    sync_name: bool = True,
) -> int:
    """Write a file under a temporary name, then rename it; returns its size in bytes.

    `rights` gives it those of the file it replaces. Without `sync_name` a durable file's folder is not synced: whoever
    writes many files into one calls `sync_folder` once.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # see _DRAFT
    try:
        with _created(draft, private) as file:
            size = write_open(parts, file)
            if durable:
                os.fsync(file.fileno())
        if rights and path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
        if durable and sync_name:
            sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return size


def write_open(parts: Iterable[Part], file: FileIO) -> int:
    """Write to an open file; returns the number of bytes."""
    return sum(_write_all(file.fileno(), part) for part in _gathered(parts))


def write_bytes(data: Part, path: Path, durable: bool = False, private: bool = False) -> None:
    write_parts([data], path, durable, private=private)


def write_text(text: str, path: Path, encoding: str = "utf-8", durable: bool = False) -> None:
    """A text, with the rights of the file it replaces."""
    write_parts([text.encode(encoding)], path, durable, rights=True)


def write_json(value: Any, path: Path, durable: bool = True, private: bool = False) -> None:
    text = json.dumps(value, indent=1, allow_nan=False)
    write_bytes(text.encode() + b"\n", path, durable, private)


def append_lines(text: str, path: Path, durable: bool = False, private: bool = False) -> None:
    """Add whole lines to a log. They start on a new line, even after a line that a crash cut short."""
    new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600 if private else 0o666)
    try:
        if private:
            _restrict(descriptor, 0o600)
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        _write_all(descriptor, ("\n" if torn else "").encode() + text.encode())
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if durable and new:
        sync_folder(path.parent)


def make_folder(path: Path, private: bool = False, durable: bool = False) -> None:
    """Make a folder and the missing ones above it; a private one that exists is closed to others."""
    if path.is_dir():
        if private:
            _close_folder(path)
        return
    if not path.parent.is_dir():
        make_folder(path.parent, private, durable)
    try:
        path.mkdir(0o700 if private else 0o777)
    except FileExistsError:
        if not path.is_dir():  # another process may have been faster
            raise
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk: a renamed file is safe only then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, remedy: str = "restore it, or start the study again elsewhere") -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); {remedy}.") from error


_CHECK = re.compile(r', "(.{3})": "(.{8})"\}$')  # at the end of a line: its own name may be damaged too


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_line(facts: Mapping[str, Any]) -> str:
    """Facts as one line of JSON that ends with a checksum of the rest."""
    text = json.dumps(facts, allow_nan=False)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}'


def read_line(line: str) -> dict[str, Any]:
    """The facts of a line; ValueError if they are not what was written. Version 0.1 wrote no checksum."""
    found = _CHECK.search(line)
    text = line[: found.start()] + "}" if found else line
    facts = json.loads(text)
    if found and found.groups() != ("crc", f"{zlib.crc32(text.encode()):08x}"):
        raise ValueError("a line is not what was written")
    if not isinstance(facts, dict) or "crc" in facts:
        raise ValueError("a line is no event")
    return facts


def sweep_drafts(folder: Path) -> None:
    """Delete unfinished files of killed processes, at any depth; only for a folder without other writers."""
    for path in folder.rglob(".*"):
        if _DRAFT.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def _created(draft: Path, private: bool) -> FileIO:
    """A new file to write to. A file that a killed process left under this name may be open to others: delete it."""
    flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666
    try:
        return FileIO(os.open(draft, flags, mode), "wb")
    except FileExistsError:
        draft.unlink()
        return FileIO(os.open(draft, flags, mode), "wb")


def _restrict(descriptor: int, mode: int) -> None:
    if stat.S_IMODE(os.fstat(descriptor).st_mode) & ~mode:
        os.fchmod(descriptor, mode)


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Make the folder of `--to`; a place that cannot be written is said in a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror or error}; choose another place with --to."
        ) from error


def _close_folder(path: Path) -> None:
    """Close our own folder to others; a folder of another owner is not changed."""
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(0o700)


def _gathered(parts: Iterable[Part]) -> Iterator[Part]:
    """The same bytes, small pieces joined."""
    small: list[Part] = []
    count = 0
    for part in parts:
        if len(part) < _SMALL:
            small.append(part)
            count += len(part)
        if count >= _SMALL or len(part) >= _SMALL:
            yield b"".join(small)
            small, count = [], 0
        if len(part) >= _SMALL:
            yield part
    yield b"".join(small)


def _write_all(descriptor: int, part: Part) -> int:
    """Raw writes may be short, for instance on a nearly full disk."""
    view = memoryview(part)
    sent = 0
    while sent < len(view):
        sent += os.write(descriptor, view[sent:])
    return sent
