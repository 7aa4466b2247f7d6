"""A site's cases.csv, as a table of texts: reading and rewriting it changes nothing but what was meant."""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from consilium.errors import DataError

COLUMNS = ("case", "patient", "split", "image", "label")


@dataclass(frozen=True)
class CaseTable:
    """A cases.csv as it is, so that rewriting it changes nothing but what was meant."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    encoding: str = "utf-8"  # "utf-8-sig" where a spreadsheet wrote a byte order mark
    newline: str = "\n"


def read_table(path: Path) -> CaseTable:
    """A cases.csv with every cell stripped; rows of empty cells are left out."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError('is not UTF-8 text; save it as "CSV UTF-8".') from None
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text, newline=""), strict=True)]
    except csv.Error as error:
        raise DataError(f"is not a readable table ({error}); save it as comma-separated text.") from None
    lines = [line for line in lines if any(line)]
    if not lines:
        raise DataError(f"is empty; its first line must be {','.join(COLUMNS)}.")
    columns = _trimmed(lines[0], 0)
    _refuse_columns(columns)
    rows = []
    for line in lines[1:]:
        cells = _trimmed(line, len(columns))
        row = dict(zip(columns, cells))
        if len(cells) > len(columns):
            row[""] = ",".join(cells[len(columns) :])  # _row_faults names it
        rows.append(row)
    encoding = "utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8"
    return CaseTable(tuple(columns), tuple(rows), encoding, "\r\n" if b"\r\n" in raw else "\n")


def _trimmed(cells: list[str], width: int) -> list[str]:
    """Without the empty cells a spreadsheet leaves at the end of a line, and filled up to `width`."""
    last = max((i for i, cell in enumerate(cells) if cell), default=-1)
    return cells[: last + 1] + [""] * (width - last - 1)


def _refuse_columns(columns: Sequence[str]) -> None:
    missing = [column for column in COLUMNS if column not in columns]
    if missing and len(columns) == 1 and re.search("[;\t]", columns[0]):
        raise DataError("has its cells separated by ';' or tabs; save it with commas between them.")
    if missing:
        others = [column for column in columns if column not in COLUMNS]
        close = [near for column in missing for near in difflib.get_close_matches(column, others, n=1)]
        hint = f" (rename {close[0]!r}?)" if close else ""
        raise DataError(f"has no column {', '.join(missing)}{hint}; its first line must be {','.join(COLUMNS)}.")
    if len(set(columns)) < len(columns):
        raise DataError("has a column twice; keep one of them.")
