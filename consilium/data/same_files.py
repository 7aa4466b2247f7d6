"""Cases of one federation that are cases of another, file for file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from consilium.data.examining import file_hash
from consilium.data.formats import ImageError, stack_of
from consilium.data.images import files_of
from consilium.data.site_folder import Federation

Content = tuple[str, int | None]  # of an image: its file's, and its place in a stack


def same_files(
    asked: Federation, splits: Collection[str], before: Federation, their_splits: Collection[str]
) -> list[str]:
    """Those of the asked cases, as "site/case", whose image file holds what one of the others' holds."""
    ours, theirs = dict(_images(asked, splits)), dict(_images(before, their_splits))
    sizes = {path: _size(path) for path in (*ours.values(), *theirs.values())}  # only files of one size are read
    alike = {sizes[path] for path in ours.values()} & {sizes[path] for path in theirs.values()} - {-1}
    hashes: dict[Path, str] = {}

    def content(path: Path) -> Content:
        file, place = stack_of(path)
        if file not in hashes:
            hashes[file] = file_hash(file)
        return hashes[file], place

    known = {content(path) for path in theirs.values() if sizes[path] in alike}
    return sorted(name for name, path in ours.items() if sizes[path] in alike and content(path) in known)


def _images(federation: Federation, splits: Collection[str]) -> Iterator[tuple[str, Path]]:
    for site in federation.sites.values():
        yield from ((f"{site.name}/{case.name}", case.image) for case in site.cases if case.split in splits)


def _size(path: Path) -> int:
    """In bytes; -1 of a file that cannot be read, which opening it puts into words."""
    try:
        return sum(part.stat().st_size for part in files_of(path))
    except (ImageError, OSError):
        return -1
