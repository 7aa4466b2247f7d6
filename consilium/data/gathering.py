"""Reads every case of a federation, on all cores, and remembers what it saw: a stopped check goes on where it was.

    <cache>/facts/<site>-<hash of the folder>.jsonl    one line per case: the stamp of its files, what was seen

A line counts while size and times of the case's files are the same. Cases with faults are read again each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from consilium.data.cache_place import SETTLED, cache_root
from consilium.data.case_facts import CaseFacts, facts_of
from consilium.data.examining import examine
from consilium.data.formats import ImageError, stack_of
from consilium.data.images import files_of
from consilium.data.site_folder import Case, Fault, Federation
from consilium.files import append_lines, make_folder

ALONE = 64 << 20  # bytes: less than this is read by this process, sooner than others could be started
FORMAT = 1  # raise it when facts change their meaning
_AT_ONCE = 16  # cases handed to a process

Progress = Callable[[int, int], None]  # cases done, cases in all


@dataclass(frozen=True)
class LookedAt:
    """A case of a site, and what was seen: facts, or faults."""

    site: str
    case: Case
    facts: CaseFacts | None
    faults: tuple[Fault, ...]


def look_at_all(federation: Federation, workers: int | None = None, progress: Progress | None = None) -> list[LookedAt]:
    """Every case of a federation, in the order of its tables.

    Args:
        workers: processes; None takes one per core where there is much to read.
        progress: called after every case.
    """
    todo = [(site.name, case) for site in federation.sites.values() for case in site.cases]
    stores = {site.name: _Store(site.folder) for site in federation.sites.values()}
    stamps = [_stamp(case) for _, case in todo]
    seen: dict[int, LookedAt] = {}
    for i, ((site, case), (stamp, _)) in enumerate(zip(todo, stamps, strict=True)):
        if stamp and (known := stores[site].known.get(stamp)):
            seen[i] = LookedAt(site, case, known, ())
    rest = [i for i in range(len(todo)) if i not in seen]
    size = sum(stamps[i][1] for i in rest)
    for i, found in zip(rest, _looked(federation, [todo[i] for i in rest], _processes(workers, size)), strict=True):
        seen[i] = found
        if found.facts is not None and stamps[i][0]:
            stores[found.site].add(stamps[i][0], found.facts)
        if progress is not None:
            progress(len(seen), len(todo))
    return [seen[i] for i in range(len(todo))]


def _processes(workers: int | None, size: int) -> int:
    if workers is not None:
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if size > ALONE else 0


def _looked(federation: Federation, todo: Sequence[tuple[str, Case]], workers: int) -> Iterator[LookedAt]:
    if workers < 2 or len(todo) < 2:
        yield from (_look(federation, *one) for one in todo)
        return
    bare = replace(federation, sites={})  # the cases go one by one
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        some = max(1, min(_AT_ONCE, len(todo) // (4 * workers)))
        yield from pool.map(_look, [bare] * len(todo), *zip(*todo), chunksize=some)
    finally:
        pool.shutdown(cancel_futures=True)


def _look(federation: Federation, site: str, case: Case) -> LookedAt:
    seen = examine(federation, site, case.name, case.image, case.label)
    if seen.faults or seen.image is None:
        return LookedAt(site, case, None, seen.faults)
    return LookedAt(site, case, facts_of(seen.image, seen.mask, seen.values), ())


def _stamp(case: Case) -> tuple[str, int]:
    """A text that changes when a file of the case changes, and the bytes to read; "" while a file is too new."""
    parts: list[object] = [FORMAT]
    size = 0
    newest = 0
    for path in (case.image, case.label):
        if not isinstance(path, Path):
            continue
        try:
            parts.append(stack_of(path)[1])
            for file in files_of(path):
                status = file.stat()
                parts += [file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
                size += status.st_size
                newest = max(newest, status.st_mtime_ns)
        except (ImageError, OSError):
            return "", size  # reading says why
    if newest > time.time_ns() - SETTLED:
        return "", size
    return hashlib.sha256(json.dumps([case.image.name, *parts]).encode()).hexdigest()[:32], size


class _Store:
    """What is known of a site's cases; a cache that cannot be used is done without."""

    def __init__(self, site: Path) -> None:
        place = hashlib.sha256(os.path.realpath(site).encode()).hexdigest()[:24]
        self.path = cache_root() / "facts" / f"{site.name}-{place}.jsonl"
        self.known: Mapping[str, CaseFacts] = dict(self._read())

    def _read(self) -> Iterator[tuple[str, CaseFacts]]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            try:
                entry = json.loads(line)
                yield entry["stamp"], CaseFacts.from_json(entry["facts"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # cut short when the check was stopped, or of another version

    def add(self, stamp: str, facts: CaseFacts) -> None:
        try:
            make_folder(self.path.parent, private=True)
            append_lines(json.dumps({"stamp": stamp, "facts": facts.to_json()}) + "\n", self.path, private=True)
        except OSError:
            return
