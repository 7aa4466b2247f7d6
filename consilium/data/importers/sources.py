"""The files of a source folder: every one once, never outside the folder, whatever links say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from consilium.data.dicom import series_in
from consilium.data.image_folders import is_rubbish
from consilium.errors import DataError


@dataclass(frozen=True)
class SourceFiles:
    """A folder, its files as paths relative to it, and the links that were not followed."""

    root: Path
    files: tuple[Path, ...]
    outside: tuple[Path, ...]

    def doubts(self) -> list[str]:
        some = ", ".join(path.as_posix() for path in self.outside[:3]) + (", …" if len(self.outside) > 3 else "")
        lead = "1 link leads" if len(self.outside) == 1 else f"{len(self.outside)} links lead"
        return [f"{lead} out of {self.root}; not read: {some}."] if self.outside else []


def files_under(root: Path) -> SourceFiles:
    """Every file in a folder and below, sorted; folders behind links are not entered, so a loop of links ends."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; give the folder of the dataset, unpacked.")
    real = os.path.realpath(root) + os.sep
    found, outside = [], []
    for place, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not is_rubbish(name))
        here = Path(place).relative_to(root)
        for name in names:
            if is_rubbish(name):
                continue
            full = os.path.join(place, name)
            if os.path.islink(full) and not os.path.realpath(full).startswith(real):
                outside.append(here / name)
            elif os.path.isfile(full):
                found.append(here / name)
    return SourceFiles(root, tuple(sorted(found)), tuple(sorted(outside)))


def only_folder(sources: Iterable[Path], what: str) -> Path:
    """The one folder of a dataset."""
    given = list(sources)
    if len(given) != 1:
        raise DataError(
            f"{what} is one folder, but {len(given)} sources were given; name the folder that holds all of it."
        )
    if not given[0].is_dir():
        raise DataError(f"{given[0]} is not a folder; give the folder of {what}, unpacked.")
    return given[0]


def series_under(root: Path, doubts: list[str]) -> dict[Path, tuple[str, ...]]:
    """Every folder with DICOM images in it, and the series in it; folders that cannot be read are added to `doubts`."""
    found = {}
    for folder in sorted({root / path.parent for path in files_under(root).files}):
        try:
            found[folder] = tuple(series_in(folder))
        except DataError as error:
            doubts.append(f"{folder}: {error}")
    return {folder: series for folder, series in found.items() if series}


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); give yourself the right to read it.")
