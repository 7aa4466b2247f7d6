"""What the cache holds, how large it is, when it was last used; and how it is emptied. All of it can be made again."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from consilium.data.cache_place import cache_root

KINDS = ("arrays", "facts", "files")  # preprocessed cases; what `check` saw; hashes of files
DAY = 24 * 3600.0
UNDER_WAY = 24 * 3600  # s: a younger folder that is being built belongs to a process that works


@dataclass(frozen=True)
class CacheEntry:
    """One site's part of the cache."""

    kind: str  # one of KINDS
    site: str
    path: Path
    size: int  # bytes
    used: float  # seconds since the epoch

    @property
    def days(self) -> float:
        """Since it was last used."""
        return max(0.0, (time.time() - self.used) / DAY)


def cache_entries() -> list[CacheEntry]:
    """Everything in the cache, the largest first."""
    place, found = cache_root(), []
    for kind in KINDS:
        for path in sorted((place / kind).iterdir()) if (place / kind).is_dir() else ():
            try:
                files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
                stats = [file.stat() for file in files]
                used = max([path.stat().st_mtime, *(s.st_mtime for s in stats)])
            except FileNotFoundError:
                continue  # another process removed it
            if path.name.startswith(".") and time.time() - used < UNDER_WAY:
                continue
            site = (
                path.name.rpartition("-")[0].lstrip(".").removeprefix("building-").removeprefix("pieces-") or path.name
            )
            found.append(CacheEntry(kind, site, path, sum(s.st_size for s in stats), used))
    return sorted(found, key=lambda entry: -entry.size)


def clean_cache(entries: list[CacheEntry]) -> int:
    """Remove entries; returns the bytes that were freed."""
    freed = 0
    for entry in entries:
        if entry.path.is_dir():
            away = entry.path.with_name(f".removed-{entry.path.name}")
            try:
                entry.path.rename(away)  # nobody opens half of it
            except FileNotFoundError:
                continue
            shutil.rmtree(away, ignore_errors=True)
        else:
            entry.path.unlink(missing_ok=True)
        freed += entry.size
    return freed
