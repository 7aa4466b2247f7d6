"""Where things are in a server's kit."""

from __future__ import annotations

from pathlib import Path


def runs_of(kit: Path) -> Path:
    """The run folders, as `consilium run` makes them."""
    return kit / "runs"


def outcome_path(kit: Path, job: str) -> Path:
    """How a job ended, in words."""
    return _made(kit / "outcomes") / f"{job}.json"


def again_mark(kit: Path, job: str) -> Path:
    """There if a job ended so that the run can go on as a new one."""
    return _made(kit / "again") / job


def returned_folder(kit: Path, job: str) -> Path:
    """One empty file per site that started again while this job ran without it."""
    return _made(kit / "returned" / job)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
