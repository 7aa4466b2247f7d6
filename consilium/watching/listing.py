"""The runs of a folder at a glance."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from consilium.errors import RunError, UserError
from consilium.watching.sources import RunSource

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
    """Every run folder directly below a folder, by name."""
    paths = sorted(path.parent for path in place.glob("*/study.toml"))
    if not paths:
        raise RunError(f"{place} holds no run folders; `consilium run STUDY.toml --runs {place}` makes one.")
    return [_line(path) for path in paths]


def _line(path: Path) -> RunLine:
    try:
        status = RunSource(path).status()
    except UserError:
        return RunLine(path.name, "", "damaged", 0, 0, "", None, "")
    last = status.curve.site_mean[-1] if status.curve.site_mean else None
    facts = (status.method, status.state, status.round, status.rounds, status.curve.metric, last, status.updated)
    return RunLine(path.name, *facts)


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
