"""A CSV that says which images and masks belong together.

Columns: `image`; for masks `mask`, or `mask:LABEL` for each label, with `@RATER` at the end for several raters; for a
classification `class`. `case`, `patient`, `split` and `site` may be there. Paths are relative to the source folder.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from consilium.data.dicom import series_of
from consilium.data.formats import suffix_of
from consilium.data.importers.found import Layer, RawCase
from consilium.data.importers.patterns import split_of
from consilium.data.importers.rules import Rule
from consilium.errors import DataError


@dataclass
class TableCases:
    """The cases of a table, and the rows that are in doubt."""

    cases: list[RawCase] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    classes: tuple[str, ...] = ()


def cases_of_table(table: Path, root: Path, site: str, rule: Callable[[str], Rule]) -> TableCases:
    """One case per row."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = [{key.strip(): (value or "").strip() for key, value in row.items() if key} for row in
                    csv.DictReader(file)]  # fmt: skip
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f'{table} cannot be read as a CSV ({error}); save it as "CSV UTF-8" with commas.') from None
    columns = list(rows[0]) if rows else []
    masks = [column for column in columns if column.split(":")[0].split("@")[0] == "mask"]
    if "image" not in columns or not (masks or "class" in columns):
        raise DataError(
            f"{table} must have the columns image and mask (or class); it has {', '.join(columns) or 'none'}."
        )
    rules = {column: rule(column.partition("@")[0].partition(":")[2]) for column in masks}
    found = TableCases(classes=() if masks else tuple(sorted({row["class"] for row in rows} - {""})))
    for number, row in enumerate(rows, start=2):
        try:
            found.cases.append(_case(row, root, site, rules))
        except DataError as error:
            found.doubts.append(f"{table}, line {number}: {error}")
    return found


def _case(row: dict[str, str], root: Path, site: str, rules: dict[str, Rule]) -> RawCase:
    image = _inside(row["image"], root)
    raters: dict[str, list[Layer]] = {}
    for column, how in rules.items():
        if row[column]:
            raters.setdefault(column.partition("@")[2], []).append(Layer(_inside(row[column], root), how))
    label = "" if rules else row["class"]
    if not raters and not label:
        raise DataError(f"{row['image']} has no {'mask' if rules else 'class'}.")
    stem = image.name[: len(image.name) - len(suffix_of(image))]
    name = row.get("case") or stem
    if row.get("split") and not split_of(row["split"]):
        raise DataError(f"split {row['split']!r} is unknown; use train, valid or test.")
    drawn = {rater: tuple(layers) for rater, layers in raters.items()}
    split = split_of(row.get("split", ""))
    return RawCase(row.get("site") or site, name, row.get("patient") or name, (image,), drawn, label, split)


def _inside(text: str, root: Path) -> Path:
    """A file of the source folder, whatever links and dots say."""
    path = root / text
    real, home = os.path.realpath(series_of(path)[0]), os.path.realpath(root)
    if not text or not (real == home or real.startswith(home + os.sep)):
        raise DataError(f"the path {text!r} leaves the source folder; write a path inside it.")
    if not os.path.exists(real):
        raise DataError(f"the path {text!r} does not exist.")
    return path
