"""Where things are in a kit, and the variables that tell a participant's processes about them."""

from __future__ import annotations

from pathlib import Path

ALLOWED = "CONSILIUM_SERVER_CODE"  # the variable that carries the names of allowed code to a job's process
EVENTS = "events.jsonl"  # what happened to a participant, one JSON object per line
OUTPUT = "process.log"  # what its process prints
STANDING = "consilium_standing"  # the table about sites in the server's answer to `status`
CONNECTED = "connections.json"  # whom it is connected with now
OVER = ("FINISHED", "FAILED", "ABANDONED")  # how the states of jobs that have ended begin


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
