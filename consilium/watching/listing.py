"""The runs of a folder at a glance."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from consilium.errors import RunError, UserError
from consilium.run_files import UNDER_RULES
from consilium.run_files.lock import LOCK
from consilium.watching.sources import RunSource
from consilium.wording import command

AGES = (("day", 86400), ("hour", 3600), ("min", 60))


@dataclass(frozen=True)
class RunLine:
    """One run of a list."""

    run: str
    method: str
    state: str  # "starting", "running", "finished", "interrupted", "not begun", "damaged"
    round: int
    rounds: int
    metric: str
    validation: float | None  # the last site mean
    updated: str  # ISO 8601; empty before the first event

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(place: Path) -> list[RunLine]:
    """Every run of a folder, also one folder further down, by name; those under hospitals' rules have one more."""
    near = [file.parent for file in place.glob("*/study.toml")]
    far = [file.parent for further in ("*/*", f"*/{UNDER_RULES}*/*") for file in place.glob(f"{further}/study.toml")]
    found = sorted({*near, *filter(_started, far)})
    if not found:
        raise _no_runs(place)
    return [_line(path, str(path.relative_to(place))) for path in found]


def _started(folder: Path) -> bool:
    """Whether a process has worked on a run here; exported packages and hospitals' memories hold only its study."""
    return any((folder / name).exists() for name in (LOCK, "journal.jsonl"))


def _no_runs(place: Path) -> RunError:
    """The error for a folder that holds no runs; it says which one does."""
    if not place.is_dir():
        return RunError(f"there is no folder {place}; `consilium run STUDY.toml --runs DIR` makes runs.")
    if (place / "study.toml").is_file():
        above = place.parent if place.name else place / ".."
        return RunError(f"{place} is one run; name the folder that holds it: {command('runs', above)}.")
    below = sorted({file.parent.parent for file in place.glob("*/*/*/journal.jsonl")})
    remedy = f"{below[0]} does" if below else f"{command('run', 'STUDY.toml', '--runs', place)} makes one"
    return RunError(f"{place} holds no run folders; {remedy}.")


def _line(path: Path, name: str) -> RunLine:
    try:
        tomllib.loads((path / "study.toml").read_text(encoding="utf-8"))
        status = RunSource(path).status()
    except (UserError, ValueError):
        return RunLine(name, "", "damaged", 0, 0, "", None, "")
    last = status.curve.site_mean[-1] if status.curve.site_mean else None
    facts = (status.method, status.state, status.round, status.rounds, status.curve.metric, last, status.updated)
    return RunLine(name, *facts)


def as_table(lines: Sequence[RunLine], now: datetime.datetime | None = None) -> list[str]:
    """Lines of text, in columns."""
    moment = now or datetime.datetime.now(datetime.UTC)
    head = ("run", "method", "state", "round", "validation", "last event")
    rows = [head, *(_cells(line, moment) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _cells(line: RunLine, now: datetime.datetime) -> tuple[str, ...]:
    score = f"{line.metric} {line.validation:.3f}" if line.validation is not None else "-"
    round = f"{line.round}/{line.rounds}" if line.rounds else "-"
    return line.run, line.method or "-", line.state, round, score, _age(line.updated, now)


def _age(time: str, now: datetime.datetime) -> str:
    if not time:
        return "-"
    seconds = max(0.0, (now - datetime.datetime.fromisoformat(time)).total_seconds())
    for name, length in AGES:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {name}{'s' if count > 1 and name != 'min' else ''} ago"
    return "just now"
