"""Which cases a stopped import has written: a line each, in the folder that is not yet whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from consilium.data.formats import ImageError
from consilium.data.images import files_of
from consilium.data.importers.found import Found, RawCase
from consilium.data.new_folder import OWNER
from consilium.data.site_folder import Case
from consilium.files import append_lines

FILE = ".done.jsonl"


class WrittenCases:
    """The cases in a folder. A case counts while its sources, its rules and the files made of it are the same."""

    def __init__(self, folder: Path, how: object) -> None:
        self.folder, self.how = folder, repr(how)
        self.known: dict[str, Any] = dict(self._read())

    def find(self, case: RawCase, found: Found) -> tuple[Case, list[str]] | None:
        """The row of a case and the notes that were made on it; None: it is to be written."""
        line = self.known.get(self._stamp(case, found))
        if line is None or any(_size(self.folder / name) != size for name, size in line["files"].items()):
            return None
        label = line["label"] and self.folder / line["label"] if line["drawn"] else line["label"]
        row = Case(case.name, case.patient, line["split"], self.folder / line["image"], label)
        return row, list(line["notes"])

    def add(self, case: RawCase, found: Found, row: Case, notes: Sequence[str]) -> None:
        drawn = isinstance(row.label, Path)
        made = self._made(row)
        line = {
            "stamp": self._stamp(case, found),
            "split": row.split,
            "image": self._inside(row.image),
            "label": self._inside(row.label) if isinstance(row.label, Path) else row.label,
            "drawn": drawn,
            "notes": list(notes),
            "files": {self._inside(path): _size(path) for path in made},
        }
        append_lines(json.dumps(line) + "\n", self.folder / FILE)

    def keep_only(self, rows: Iterable[Case]) -> None:
        """Removes all else: of cases that are gone from the sources, or that are in doubt, and tables of before."""
        wanted = {path for row in rows for path in self._made(row)} | {self.folder / FILE, self.folder / OWNER}
        for place, folders, files in os.walk(self.folder, topdown=False):
            for name in files:
                if Path(place, name) not in wanted:
                    Path(place, name).unlink()
            for name in folders:
                path = Path(place, name)
                if path.is_symlink():
                    path.unlink()
                elif not any(path.iterdir()):
                    path.rmdir()

    def close(self) -> None:
        (self.folder / FILE).unlink(missing_ok=True)

    def _made(self, row: Case) -> list[Path]:
        """The files of a case that are in the folder."""
        return [path for path in (row.image, row.label) if isinstance(path, Path) and self.folder in path.parents]

    def _inside(self, path: Path) -> str:
        """Relative to the folder; a referenced image keeps its own place."""
        return path.relative_to(self.folder).as_posix() if self.folder in path.parents else str(path)

    def _stamp(self, case: RawCase, found: Found) -> str:
        """A rule that is a function has another name in every process: then nothing is taken over."""
        layers = [layer.path for drawn in case.raters.values() for layer in drawn]
        states = [list(_state(path)) for path in (*case.images, *layers)]
        facts = replace(found, cases=(), left_out=(), doubts=())
        return hashlib.sha256(repr([case, facts, self.how, states]).encode()).hexdigest()[:32]

    def _read(self) -> Iterator[tuple[str, Any]]:
        try:
            lines = (self.folder / FILE).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            try:
                told = json.loads(line)
                yield told["stamp"], told
            except (ValueError, KeyError, TypeError):
                continue  # cut short when the import was stopped


def _state(path: Path) -> Iterator[tuple[str, int, int]]:
    try:
        for file in files_of(path):
            status = os.stat(file)
            yield file.name, status.st_size, status.st_mtime_ns
    except (ImageError, OSError):
        return  # reading says why


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
