"""The files a site's table names: there, of an accepted format, and inside the site's folder or the root it names."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from consilium.data.dicom import series_of
from consilium.data.formats import IMAGE_SUFFIXES, ImageError, stack_of, suffix_of
from consilium.data.images import files_of

_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:")
ROOT = "root:"  # begins a path inside the root that site.toml names


class CaseFiles:
    """Answers whether a path of a table is a file inside the site's folder, with one system call per file.

    `root`: a second folder, outside the site's, that paths with the prefix `root:` and links may lead into.
    """

    def __init__(self, place: Path, root: Path | None = None) -> None:
        self.place = place
        self.root = root
        self.allowed = [os.path.realpath(folder) for folder in (place, root) if folder is not None]
        self.safe: dict[str, bool] = {}
        self.stacks: dict[str, str] = {}

    def path(self, text: str) -> Path:
        """Where a cell's file lies."""
        if text.startswith(ROOT) and self.root is not None:
            return self.root / text.removeprefix(ROOT)
        return self.place / text

    def fault(self, column: str, text: str) -> str:
        stack, place = stack_of(Path(text)) if "#" in text else (None, None)
        if stack is None or place is None:
            sentence = self._fault(text)
        else:  # thousands of cases may lie in one file
            file = stack.as_posix()
            sentence = self.stacks[file] = self.stacks[file] if file in self.stacks else self._fault(file)
        return f"{column} {sentence}" if sentence else ""

    def _fault(self, text: str) -> str:
        if not text:
            return "is missing; write a path relative to the site's folder."
        inner = text.removeprefix(ROOT)
        if inner != text and self.root is None:
            return f'{text!r} needs a root; write root = "/path/to/the/files" into site.toml.'
        if _ABSOLUTE.match(inner) or ".." in re.split(r"[/\\]", inner):
            return f"{text!r} leaves the site's folder; write a path relative to it, without '..'."
        if text.lower().endswith(IMAGE_SUFFIXES):  # making a Path takes longer than looking at the file
            file = os.path.join(self.place if inner == text or self.root is None else self.root, inner)
        else:
            full = self.path(text)
            if not suffix_of(Path(text)):
                if series_of(full)[0].is_dir():
                    return self._series_fault(text, full)
                formats = f"{', '.join(IMAGE_SUFFIXES)}, or the folder of a DICOM series"
                return f"{text!r} is not of an accepted format; use one of {formats}."
            file = str(full)
        try:
            status = os.lstat(file)
        except (OSError, ValueError):
            remedy = "write '/' between folders" if "\\" in text else "correct the path, or copy the file there"
            return f"{text!r} does not exist; {remedy}."
        if not self._is_inside(file, stat.S_ISLNK(status.st_mode)):
            return f"{text!r} is a link that leaves {self._places()}; copy the file into it."
        if not stat.S_ISREG(status.st_mode) and not os.path.isfile(file):
            return f"{text!r} is not a file; give the path of the image itself."
        return ""

    def _series_fault(self, text: str, series: Path) -> str:
        if not self._within(os.path.realpath(series_of(series)[0])):
            return f"{text!r} is a link that leaves {self._places()}; copy the files into it."
        try:
            files_of(series)
        except ImageError as error:
            return f"{text!r} {error.sentence}"
        return ""

    def _is_inside(self, file: str, is_link: bool) -> bool:
        if is_link:
            return self._within(os.path.realpath(file))
        parent = os.path.dirname(file)
        if parent not in self.safe:
            self.safe[parent] = self._within(os.path.realpath(parent))
        return self.safe[parent]

    def _places(self) -> str:
        return "the site's folder" if self.root is None else "the site's folder and its root"

    def _within(self, real: str) -> bool:
        return any(real == folder or real.startswith(folder.rstrip(os.sep) + os.sep) for folder in self.allowed)
