"""One case of the cache at a time: made by any process, kept in a file of its own until the site's arrays are whole.

    <cache>/arrays/.pieces-<site>-<key>/<case number>    a line of JSON with a digest, the image, the mask

A build that was stopped finds the pieces of the build before. Small sites are made without: sooner than files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.examining import blame, examine
from consilium.data.formats import ImageError
from consilium.data.images import files_of
from consilium.data.preprocess import Preprocess, forward, forward_mask
from consilium.data.profile import image_facts
from consilium.data.site_folder import Case, Fault, Federation, SiteFolder
from consilium.files import make_folder, write_parts

SMALL = 64 << 20  # bytes of a site's files, below which a stopped build begins anew

Progress = Callable[[int, int], None]  # cases done, cases in all


@dataclass(frozen=True)
class CasePiece:
    """A preprocessed case, or why there is none."""

    entry: Mapping[str, Any]  # of the index, without the places of its arrays
    image: NDArray[np.float32] | None
    mask: NDArray[np.uint8] | None
    faults: tuple[Fault, ...]


def pieces_of(
    federation: Federation, site: SiteFolder, how: Preprocess, folder: Path, workers: int, progress: Progress | None
) -> Iterator[CasePiece]:
    """Every case of a site in table order; one is in memory at a time, in each of `workers` processes."""
    count = len(site.cases)
    store = _PieceFiles(folder) if workers > 1 or _bytes(site.cases) > SMALL else None
    jobs = [(i, case) for i, case in enumerate(site.cases) if store is None or not store.has(i)]
    bare = replace(federation, sites={})  # the cases go one by one
    with _PieceMakers(bare, site.name, how, store, jobs, workers) as makers:
        for i, case in enumerate(site.cases):
            made = makers.next(i)
            if made is None and store is not None:
                made = store.read(i)
            yield made or make_piece(bare, site.name, case, how)  # a piece that was damaged, or removed meanwhile
            if progress is not None:
                progress(i + 1, count)


def make_piece(federation: Federation, site: str, case: Case, how: Preprocess) -> CasePiece:
    """Decodes and preprocesses one case."""
    seen = examine(federation, site, case.name, case.image, case.label, bool(how.orientation))
    if seen.faults or seen.image is None:
        return CasePiece({}, None, None, seen.faults)
    try:
        array, undo = forward(seen.image, how)
        entry: dict[str, Any] = {"undo": undo.to_json(), "facts": asdict(image_facts(seen.image, array, undo))}
        if seen.image.geometry is not None:
            entry["spacing"] = undo.spacing(seen.image.spacing)
        mask = None if seen.mask is None else forward_mask(seen.mask, undo)
        if mask is None and case.label is not None:
            entry["class"] = federation.labels.index(str(case.label))
    except ImageError as error:
        return CasePiece({}, None, None, (blame(federation, site, case.name, case.image, error.sentence),))
    return CasePiece(entry, array, mask, ())


class _PieceMakers:
    """Makes the pieces that are missing: here, or in processes of which each leaves its pieces in the store."""

    def __init__(
        self,
        federation: Federation,
        site: str,
        how: Preprocess,
        store: _PieceFiles | None,
        jobs: Sequence[tuple[int, Case]],
        workers: int,
    ) -> None:
        self.federation, self.site, self.how, self.store = federation, site, how, store
        self.jobs = dict(jobs)
        self.pool = (
            ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 and len(jobs) > 1 else None
        )
        self.made: Iterator[CasePiece | None] = iter(())
        if self.pool is not None and store is not None:
            given = ([one] * len(jobs) for one in (federation, site, how, store.folder))
            self.made = self.pool.map(_left_in_store, *given, *zip(*jobs))

    def __enter__(self) -> _PieceMakers:
        return self

    def __exit__(self, *why: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def next(self, i: int) -> CasePiece | None:
        """The piece of case `i`, which comes after those asked for before; None: it is in the store."""
        if i not in self.jobs:
            return None
        if self.pool is not None:
            return next(self.made)
        made = make_piece(self.federation, self.site, self.jobs[i], self.how)
        if self.store is not None and not made.faults:
            self.store.write(i, made)
        return made


def _left_in_store(
    federation: Federation, site: str, how: Preprocess, folder: Path, i: int, case: Case
) -> CasePiece | None:
    """In another process: only faults come back through the pipe."""
    made = make_piece(federation, site, case, how)
    if made.faults:
        return made
    _PieceFiles(folder).write(i, made)
    return None


class _PieceFiles:
    """Pieces on disk. Whoever has built the site first removes the folder, also while others still build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, i: int) -> bool:
        return self._path(i).exists()

    def write(self, i: int, piece: CasePiece) -> None:
        """Keeps a piece, unless the folder is being removed just now; the build does without it."""
        arrays = [array for array in (piece.image, piece.mask) if array is not None]
        parts = [np.ascontiguousarray(array).data.cast("B") for array in arrays]
        shapes = [list(array.shape) for array in arrays]
        head = {"entry": piece.entry, "shapes": shapes, "sha256": _digest(parts)}
        with suppress(FileNotFoundError, FileExistsError):  # it went away, or came and went, between two calls
            make_folder(self.folder, private=True)
            write_parts([json.dumps(head).encode() + b"\n", *parts], self._path(i), private=True)

    def read(self, i: int) -> CasePiece | None:
        """None: it is not there, or not what was written; then it is made again."""
        try:
            head, _, body = self._path(i).read_bytes().partition(b"\n")
            told = json.loads(head)
            if told["sha256"] != _digest([body]):
                return None
            shapes = told["shapes"]
            end = 4 * math.prod(shapes[0])
            image = np.frombuffer(body[:end], np.float32).reshape(shapes[0])
            mask = np.frombuffer(body[end:], np.uint8).reshape(shapes[1]) if len(shapes) > 1 else None
            return CasePiece(told["entry"], image, mask, ())
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def _path(self, i: int) -> Path:
        return self.folder / str(i)


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()


def _bytes(cases: Sequence[Case]) -> int:
    """About how much there is to read."""
    total = 0
    for path in {path for case in cases for path in (case.image, case.label) if isinstance(path, Path)}:
        try:
            total += sum(os.stat(file).st_size for file in files_of(path))
        except (ImageError, OSError):
            continue  # making the piece says why
    return total
