"""What files hold, by their hashes; an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilium.data.cache_place import SETTLED
from consilium.data.examining import file_hash
from consilium.data.formats import ImageError, stack_of
from consilium.data.images import files_of
from consilium.files import write_bytes

UNREADABLE = "unreadable"


class FileHashes:
    """The content hash of files, read again only when size or times changed."""

    def __init__(self, path: Path, site: Path) -> None:
        self.path = path
        self.site = f"{site}{os.sep}"
        try:
            known = unsealed(path)["files"]
        except (OSError, ValueError, KeyError, TypeError):
            known = {}  # damaged, or of version 0.1: the files are read again
        self.known: dict[str, list[Any]] = known
        self.fresh: dict[str, list[Any]] = {}
        self.stacks: dict[Path, str] = {}

    def of(self, path: Path) -> str:
        file, place = stack_of(path)
        if place is None:
            return self._of_file(path)
        if file not in self.stacks:
            self.stacks[file] = self._of_file(file)
        return f"{self.stacks[file]}#{place}"

    def _of_file(self, path: Path) -> str:
        name = str(path).removeprefix(self.site)  # the folder may be written in two ways
        try:
            stats = [part.stat() for part in files_of(path)]
            stamp = [value for s in stats for value in (s.st_size, s.st_mtime_ns, s.st_ctime_ns)]
            before = self.known.get(name, [])
            digest = str(before[-1]) if before[:-1] == stamp else file_hash(path)
        except (ImageError, OSError):
            return UNREADABLE  # building says why, in words
        if max(s.st_mtime_ns for s in stats) < time.time_ns() - SETTLED:
            self.fresh[name] = [*stamp, digest]
        return digest

    def save(self, whole: bool = True) -> None:
        """Keeps what is known; where not all files were asked for, also what was known of the others."""
        told = self.fresh if whole else {**self.known, **self.fresh}
        if told != self.known:
            write_bytes(sealed({"files": told}), self.path, private=True)


def sealed(facts: Mapping[str, Any]) -> bytes:
    """Facts as JSON with a digest of them."""
    return json.dumps({**facts, "digest": short_digest(json.dumps(facts))}).encode()


def unsealed(path: Path) -> dict[str, Any]:
    """The facts in a file; `ValueError` if they are not what was written."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if facts.pop("digest") != short_digest(json.dumps(facts)):
        raise ValueError(f"{path} is damaged")
    return facts


def short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
