"""Scores as rows, the range of every metric, and the table of rows in a file."""

from __future__ import annotations

import csv
import io
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from consilium.errors import RunError

EMPTY = "empty"  # value 1: the truth has nothing of this label, so the case has no other score for it
OWN = "own_"  # own_<function>: a score that the study names
CHOSEN = "chosen:"  # chosen:<model>, value 1 if the selector sent the case there
_SHARES = (
    "dice",
    "jaccard",
    "sensitivity",
    "specificity",
    "accuracy",
    "auc",
    "confidence",
    "routed",
    "empty",
    "missed",
)
_DISTANCES = ("hd", "hd95", "hd_mm", "hd95_mm")  # a distance to nothing is not finite
RANGES = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys((*_DISTANCES, "false_positive_volume", "volume_error_abs"), (0.0, math.inf)),
    "volume_error": (-1.0, math.inf),
}


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One number: what `model` scored on one case."""

    round: int
    phase: str
    model: str  # global, personal, super, local, pooled, ensemble, teacher
    of: str  # the site the model belongs to, or empty
    when: str  # merged, trained, adapted
    site: str  # where the case lies
    outside: bool  # the site takes no part in the federation
    split: str
    case: str
    label: str
    metric: str
    value: float


COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(ScoreRow))
_cells = attrgetter(*COLUMNS[:-1])  # all but the value


def range_of(metric: str) -> tuple[float, float, bool] | None:
    """The lowest and highest value a metric can have, and whether NaN is one; None: there is no such metric."""
    if metric.startswith(CHOSEN):
        return 0.0, 1.0, False
    name = metric.removeprefix("slice_").removeprefix("clean_")
    if name.startswith(OWN):
        return -1e9, 1e9, False
    return (*RANGES[name], name in _DISTANCES) if name in RANGES else None


def bounds_of(metric: str) -> tuple[float, float]:
    """The lowest and highest value a metric can have; without end of a metric that nobody knows."""
    return (range_of(metric) or (-math.inf, math.inf))[:2]


def write_rows(rows: Iterable[ScoreRow]) -> str:
    """CSV lines without the header; floats by repr, so that they come back exactly."""
    rows = list(rows)
    text = _csv(rows, csv.QUOTE_MINIMAL)
    # the writer does not quote a carriage return, which would end the line for the reader
    return _csv(rows, csv.QUOTE_ALL) if "\r" in text else text


def _csv(rows: Iterable[ScoreRow], quoting: Literal[0, 1]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    for row in rows:
        cells = [int(cell) if isinstance(cell, bool) else cell for cell in _cells(row)]
        writer.writerow([*cells, repr(float(row.value))])
    return text.getvalue()


def rows_check(rows: Iterable[ScoreRow]) -> str:
    """A checksum of scores, which the journal records when they are complete."""
    return f"{zlib.crc32(write_rows(rows).encode()):08x}"


def check_rows(rows: Iterable[ScoreRow], events: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Reject a table whose scores differ from the journal's checksum (RunError); version 0.1 has none."""
    noted = {(e["round"], e["phase"]): e["check"] for e in events if e["event"] == "score" and "check" in e}
    if not noted:
        return
    by_place: dict[tuple[int, str], list[ScoreRow]] = {place: [] for place in noted}
    for row in rows:
        if (row.round, row.phase) in by_place:
            by_place[row.round, row.phase].append(row)
    for place, found in by_place.items():
        if rows_check(found) != noted[place]:
            raise RunError(
                f"{path} is damaged: scores of round {place[0]} ({place[1]}) are not what was written; restore it, or "
                "start the study again."
            )


def read_rows(path: Path) -> list[ScoreRow]:
    """The rows of a scores.csv; a last line that a crash cut short is dropped."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        records = list(csv.reader(io.StringIO(whole.decode() + "\n", newline="")))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; is it a run folder's scores.csv?") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"{path} is damaged ({error}); restore it, or repeat the run.") from None
    if not whole:
        return []
    if tuple(records[0]) != COLUMNS:
        raise RunError(f"{path} does not start with the line {','.join(COLUMNS)}; it is not a table of scores.")
    if len(records[-1]) < len(COLUMNS):  # cut inside a quoted name that holds a line break
        records.pop()
    return [_parse(record, number, path) for number, record in enumerate(records[1:], start=2)]


def _parse(record: list[str], number: int, path: Path) -> ScoreRow:
    try:
        round_, phase, model, of, when, site, outside, split, case, label, metric, value = record
        flag = {"0": False, "1": True}[outside]
        return ScoreRow(int(round_), phase, model, of, when, site, flag, split, case, label, metric, float(value))
    except (ValueError, KeyError):
        raise RunError(f"{path}: record {number} is not a score: {','.join(record)!r}; restore the file.") from None
