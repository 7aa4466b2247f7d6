"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from consilium.errors import RunError

_DRAFT = re.compile(r"\..+\.\d+")  # of a file being written: .name.process
_SMALL = 1 << 18  # bytes; below, a copy costs less than a system call of its own

Part = bytes | memoryview


def write_parts(parts: Iterable[Part], path: Path, durable: bool = False, rights: bool = False) -> int:
    """Write a file under a temporary name, then rename it; returns its size in bytes.

    `durable` waits until it is on the disk; `rights` gives it those of the file it replaces.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # see _DRAFT
    size = 0
    try:
        with draft.open("wb", buffering=0) as file:
            for part in _gathered(parts):
                size += _write_all(file.fileno(), part)
            if durable:
                os.fsync(file.fileno())
        if rights and path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return size


def write_bytes(data: Part, path: Path, durable: bool = False) -> None:
    write_parts([data], path, durable)


def write_text(text: str, path: Path, encoding: str = "utf-8") -> None:
    """A text, with the rights of the file it replaces."""
    write_parts([text.encode(encoding)], path, rights=True)


def write_json(value: Any, path: Path, durable: bool = True) -> None:
    text = json.dumps(value, indent=1, allow_nan=False)
    write_bytes(text.encode() + b"\n", path, durable)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); restore it, or start the study again elsewhere.") from error


def sweep_drafts(folder: Path) -> None:
    """Delete what killed processes were writing, at any depth; only for a folder that nobody else is writing to."""
    for path in folder.rglob(".*"):
        if _DRAFT.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


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
