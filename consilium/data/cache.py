"""Preprocessed arrays of a site as memory-mapped files: training never decodes a file twice.

    <cache>/files/<site>-<hash>.json    the size, times and hash of every file, so an unchanged file is not read again
    <cache>/arrays/<site>-<key>/        images.bin  masks.bin  index.json
    <cache>/arrays/.pieces-<site>-<key>/        cases of a build that was stopped (cache_pieces.py)

The key is the content of every file, the labels and the preprocessing, so nothing stale can be read and the folder can
be deleted at any time. The index holds a digest of the two arrays and of itself: a process checks them when it first
opens a site, and what is damaged is made again. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from consilium.data.cache_pieces import Progress, pieces_of
from consilium.data.cache_place import cache_root
from consilium.data.file_hashes import UNREADABLE, FileHashes, sealed, short_digest, unsealed
from consilium.data.preprocess import Preprocess, fingerprint
from consilium.data.site_arrays import SiteArrays
from consilium.data.site_folder import Case, Fault, Federation, SiteFolder, inside_of, refuse
from consilium.errors import StudyError, WorkError
from consilium.fields import nearest
from consilium.files import file_sha256, make_folder

ARRAYS = ("images.bin", "masks.bin")
LAYOUT = 2  # raise it when the files of the cache change
ALIGN = 64  # bytes: sums in some libraries depend on where an array starts
ABANDONED = 24 * 3600  # s: a build this old was killed
FORGOTTEN = 30 * ABANDONED  # s: nobody goes on with it


def open_site(
    federation: Federation,
    site: SiteFolder,
    how: Preprocess,
    cache: Path | None = None,
    annotated: Sequence[str] | None = None,
    complete_tests: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> SiteArrays:
    """A site's arrays, built on first use by so many processes; `annotated` overrides what site.toml says.

    Labels the site does not annotate are removed here, so no training or validation code ever sees them. With
    `complete_tests` the masks of test cases keep them.
    All faults of the site's images and masks are listed in one DataError.
    """
    root = cache_root() if cache is None else Path(cache)
    annotated = site.annotated if annotated is None else tuple(annotated)
    shown = _shown(federation, annotated)
    complete = federation.labels if complete_tests else None
    with _usable(root):
        folder = root / "arrays" / f"{site.name}-{_key(federation, site, how, root, workers)}"
        pieces = folder.with_name(f".pieces-{folder.name}")
        for _ in range(5):  # once, unless another process damages or mends the same folder meanwhile
            if (arrays := _open(folder, site, shown, annotated, complete)) is not None:
                _mark_used(folder)
                return arrays
            _place(folder, site, lambda partial: _build(federation, site, how, partial, pieces, workers, progress))
            shutil.rmtree(pieces, ignore_errors=True)
        raise OSError(f"{folder} is being changed by other processes")


def case_facts(federation: Federation, site: SiteFolder, how: Preprocess, labels: Sequence[str]) -> dict[str, Any]:
    """What tells whether a site's cases are those of an earlier run; nothing is decoded, and no array is made."""
    with _usable(cache_root()) as root:
        arrays = f"{site.name}-{_key(federation, site, how, root)}"
    return {"labels": list(labels), "cases": len(site.cases), "table": table_hash(site.cases), "arrays": arrays}


def image_contents(site: SiteFolder, cases: Iterable[Case]) -> dict[str, str]:
    """Of some cases of a site: what the image file holds, as a hash; without the files that cannot be read."""
    with _usable(cache_root()) as root:
        hashes = _file_hashes(site, root)
        found = {case.name: hashes.of(case.image) for case in cases}
        hashes.save(whole=False)
    return {name: content for name, content in found.items() if content != UNREADABLE}


def table_hash(cases: Sequence[Case]) -> str:
    """Of the names, patients and splits of a site's cases, in their order."""
    table = "\n".join(f"{case.name},{case.patient},{case.split}" for case in cases)
    return hashlib.sha256(table.encode()).hexdigest()[:16]


@contextmanager
def _usable(root: Path) -> Iterator[Path]:
    """The cache's folders, made if needed; what the disk refuses is said in words."""
    try:
        for place in ("files", "arrays"):
            make_folder(root / place, private=True)  # they are patients' images
        yield root
    except OSError as error:
        remedy = "free space there, or set CONSILIUM_CACHE to another folder"
        raise WorkError(f"the cache {root} cannot be used ({error}); {remedy}.") from error


def _shown(federation: Federation, annotated: tuple[str, ...]) -> NDArray[np.uint8] | None:
    """What a mask value becomes: itself if annotated, else the annotated label around it, else background."""
    for label in annotated:
        if label not in federation.labels:
            raise StudyError(f"annotated names {label!r}, which is not in labels; {nearest(label, federation.labels)}")
    if federation.task == "classification" or set(annotated) == set(federation.labels):
        return None
    inside = {outer: inside_of(outer, federation.contains) for outer in annotated}
    table = np.zeros(256, dtype=np.uint8)
    for value, label in enumerate(federation.labels, start=1):
        around = sorted((outer for outer in annotated if label in inside[outer]), key=lambda outer: len(inside[outer]))
        seen = [label] if label in annotated else around[:1]
        table[value] = federation.labels.index(seen[0]) + 1 if seen else 0
    return table


def _file_hashes(site: SiteFolder, root: Path) -> FileHashes:
    return FileHashes(root / "files" / f"{site.name}-{short_digest(os.path.realpath(site.folder))}.json", site.folder)


def _key(federation: Federation, site: SiteFolder, how: Preprocess, root: Path, workers: int = 1) -> str:
    hashes = _file_hashes(site, root)

    def content(case: Case) -> tuple[str, str | None]:
        return hashes.of(case.image), hashes.of(case.label) if isinstance(case.label, Path) else case.label

    try:
        if workers > 1:
            with ThreadPoolExecutor(workers) as pool:  # hashing leaves the interpreter free
                contents = list(pool.map(content, site.cases))
        else:
            contents = [content(case) for case in site.cases]
    except BaseException:
        hashes.save(whole=False)
        raise
    hashes.save()
    kind = (LAYOUT, federation.task, federation.labels, federation.dimensions, federation.channels)
    return short_digest(json.dumps([kind, fingerprint(how), contents]))


def _open(
    folder: Path,
    site: SiteFolder,
    shown: NDArray[np.uint8] | None = None,
    annotated: tuple[str, ...] = (),
    complete: tuple[str, ...] | None = None,
) -> SiteArrays | None:
    """The arrays in a folder, or None if anything is missing, damaged or without a digest, as in version 0.1."""
    try:
        index = unsealed(folder / "index.json")
        entries = tuple(index["cases"])
        if len(entries) != len(site.cases) or not all(_is_sound(folder / n, index["sha256"][n]) for n in ARRAYS):
            return None
        if any("facts" not in entry for entry in entries):  # of version 0.1
            return None
        images = _map(folder / "images.bin").view(np.float32)
        masks = _map(folder / "masks.bin")
        return SiteArrays(site.cases, folder, images, masks, entries, shown, annotated, complete)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mark_used(folder: Path) -> None:
    """So that `consilium cache --older` knows; a cache that may only be read is used all the same."""
    with suppress(OSError):
        os.utime(folder)


def _place(folder: Path, site: SiteFolder, build: Callable[[Path], None]) -> None:
    """Builds beside the folder and renames; whoever comes second leaves what the first one placed."""
    _sweep(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".building-{folder.name}-", dir=folder.parent))
    try:
        build(partial)
        if folder.exists() and _open(folder, site) is None:
            _discard(folder)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _discard(folder: Path) -> None:
    """A damaged folder goes away under another name, so that no one sees half of it."""
    away = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
    try:
        os.rename(folder, away / "it")
    except FileNotFoundError:
        pass  # another process was faster
    finally:
        shutil.rmtree(away, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes what killed builds left; cases that are done are kept longer, for the next build to go on from."""
    for left in (*folder.glob(".building-*"), *folder.glob(".pieces-*")):
        try:
            old = time.time() - left.stat().st_mtime > (ABANDONED if left.name.startswith(".building") else FORGOTTEN)
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


def _build(
    federation: Federation,
    site: SiteFolder,
    how: Preprocess,
    folder: Path,
    pieces: Path,
    workers: int,
    progress: Progress | None,
) -> None:
    """Writes every case of a site, one behind the other."""
    faults: list[Fault] = []
    entries = []
    with (folder / "images.bin").open("wb") as images, (folder / "masks.bin").open("wb") as masks:
        for piece in pieces_of(federation, site, how, pieces, workers, progress):
            faults += piece.faults
            if piece.image is None:
                continue
            entry = {"image": _append(images, piece.image), **piece.entry}
            if piece.mask is not None:
                entry["mask"] = _append(masks, piece.mask)
            entries.append(entry)
    refuse(faults, f"the images of site {site.name!r}")
    digests = {name: file_sha256(folder / name) for name in ARRAYS}
    (folder / "index.json").write_bytes(sealed({"sha256": digests, "cases": entries}))


_checked: dict[Path, tuple[str, int, int, int]] = {}  # files this process has read through, and their stamps then


def _is_sound(path: Path, digest: str) -> bool:
    """Whether a file holds what was written; it is read through once in a process."""
    found = path.stat()
    stamp = (digest, found.st_ino, found.st_size, found.st_mtime_ns)
    if _checked.get(path) != stamp:
        if file_sha256(path) != digest:
            return False
        _checked[path] = stamp
    return True


def _append(file: BinaryIO, array: NDArray[Any]) -> dict[str, Any]:
    """Adds an array at an aligned place; `start` counts elements."""
    file.write(b"\0" * (-file.tell() % ALIGN))
    start = file.tell() // array.itemsize
    file.write(array.data)
    return {"start": start, "shape": array.shape}


def _map(path: Path) -> NDArray[np.uint8]:
    """A file as read-only bytes in memory; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
