"""What can be removed from a hospital or a server because nobody has used it for long; results and logs stay."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from consilium.caps import held_by
from consilium.errors import RunError
from consilium.federation.places import OVER, runs_of
from consilium.files import read_json
from consilium.hospital import Hospital
from consilium.left_log import LOG
from consilium.store import RELEASE

DAY = 24 * 3600.0
YOUNGEST = 1.0  # day: anything younger may belong to a run under way
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Leftover:
    """One thing that can be removed."""

    kind: str  # "memory", "release", "job" or "run"
    name: str
    paths: tuple[Path, ...]
    size: int
    days: float  # since anything in it was last written, or a release opened


def of_hospital(hospital: Hospital, kit: Path | None, older: float | None = None) -> list[Leftover]:
    """What `[keep]` of a hospital.toml lets go, or what is `older` than so many days, whatever it says."""
    keep = hospital.keep
    days = {
        "memory": keep.memories if older is None else older,
        "release": keep.releases if older is None else 0,  # the models themselves: only as hospital.toml says
        "job": keep.jobs if older is None else older,
    }
    found = [*_of_runs(Path(hospital.memory)), *(_jobs(kit) if kit else ())]
    return [item for item in found if days[item.kind] and item.days >= max(days[item.kind], YOUNGEST)]


def of_server(kit: Path, older: float, runs: bool) -> list[Leftover]:
    """Files of the engine's jobs, and run folders only if they are asked for."""
    found = [*_jobs(kit), *(_made("run", path) for path in _folders(runs_of(kit)) if runs)]
    return [item for item in found if item.days >= max(older, YOUNGEST)]


def remove(items: list[Leftover]) -> int:
    """Remove what was found; returns the bytes that were freed."""
    for item in items:
        for path in item.paths:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return sum(item.size for item in items)


def _of_runs(memory: Path) -> Iterator[Leftover]:
    """A run's folder holds its memory and its release. A log of what left, which 0.1 wrote there, stays."""
    for place in _folders(memory):
        if not (place / "memory").is_dir() and not (place / "order.safetensors").exists():
            if (place / RELEASE).exists():
                yield _made("release", place, _but_the_log(place))
            continue
        working = tuple(path for path in (place / "memory", place / "order.safetensors") if path.exists())
        if not (place / RELEASE).exists():
            yield _made("memory", place, working)
        else:  # a personal model needs the memory beside the release
            yield _made("release", place, _but_the_log(place))


def _but_the_log(place: Path) -> tuple[Path, ...]:
    return tuple(path for path in sorted(place.iterdir()) if path.name != LOG) if (place / LOG).exists() else ()


def _jobs(kit: Path) -> Iterator[Leftover]:
    """Files of jobs that are over; a server keeps a copy of what every job found in `jobs`."""
    places = [
        path
        for folder in (kit, kit / "jobs", kit / "snapshots", kit / "returned")
        for path in _folders(folder)
        if JOB.fullmatch(path.name)
    ]
    under_way = {path.name for path in places if path.parent.name == "jobs" and not _over(path / "meta")}
    yield from (_made("job", path) for path in places if path.name not in under_way)


def _over(meta: Path) -> bool:
    """Whether a job of the server's store has ended; one that waits or runs may be old."""
    try:
        return str(read_json(meta)["status"]).startswith(OVER)
    except (RunError, KeyError, TypeError):
        return False


def _folders(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")]


def _made(kind: str, place: Path, paths: tuple[Path, ...] = ()) -> Leftover:
    taken = paths or (place,)
    files = [file for path in taken for file in (path.rglob("*") if path.is_dir() else [path])]
    used = max((file.stat().st_mtime for file in [place, *files] if file.exists()), default=0.0)
    size = sum(held_by(path) if path.is_dir() else path.stat().st_size for path in taken)
    return Leftover(kind, place.name, taken, size, max(0.0, (time.time() - used) / DAY))
