"""Cases of some sites that are cases of others, file for file."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

from consilium.data.examining import file_hash
from consilium.data.formats import ImageError, stack_of
from consilium.data.images import files_of
from consilium.data.site_folder import SiteFolder

HEAD = 4096  # bytes that tell most files of one size apart
Outside = tuple[int, bytes]  # of an image: the size of its files, and how they begin


def same_files(
    asked: Iterable[SiteFolder], splits: Collection[str], before: Iterable[SiteFolder], their_splits: Collection[str]
) -> list[str]:
    """Those of the asked cases, as "site/case", whose image file holds what one of the others' holds."""
    ours, theirs = dict(_images(asked, splits)), dict(_images(before, their_splits))
    outside, inside = cache(_outside), cache(file_hash)
    alike = {outside(stack_of(path)[0]) for path in ours.values()}  # only of these files all bytes are read
    alike &= {outside(stack_of(path)[0]) for path in theirs.values()} - {None}

    def content(path: Path) -> tuple[str, int | None] | None:
        """Of an image that may be another's: its file's, and its place in a stack."""
        file, place = stack_of(path)
        return (inside(file), place) if outside(file) in alike else None

    known = {content(path) for path in theirs.values()} - {None}
    return sorted(name for name, path in ours.items() if content(path) in known)


def _images(sites: Iterable[SiteFolder], splits: Collection[str]) -> Iterator[tuple[str, Path]]:
    for site in sites:
        yield from ((f"{site.name}/{case.name}", case.image) for case in site.cases if case.split in splits)


def _outside(path: Path) -> Outside | None:
    """None of a file that cannot be read, which opening it puts into words."""
    size, begin = 0, hashlib.sha256()
    try:
        for part in files_of(path):
            size += part.stat().st_size
            with part.open("rb") as file:
                begin.update(file.read(HEAD))
    except (ImageError, OSError):
        return None
    return size, begin.digest()
