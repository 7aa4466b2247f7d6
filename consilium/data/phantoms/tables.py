"""What every phantom writes besides images: the federation's card, each site's card and its table of cases."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

SPLITS = ("train", "valid", "test")
LICENCE = "Apache-2.0"


@dataclass(frozen=True)
class Federation:
    """The facts of federation.toml."""

    task: str
    labels: tuple[str, ...]
    dimensions: int
    channels: int
    contains: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """A row of cases.csv; the field names are the column names."""

    case: str
    patient: str
    split: str
    image: str
    label: str


def write_federation(folder: Path, federation: Federation) -> None:
    """Writes federation.toml."""
    contains = ", ".join(f"{outer} = {_list(inner)}" for outer, inner in federation.contains.items())
    lines = [
        f'task = "{federation.task}"',
        f"labels = {_list(federation.labels)}",
        f"dimensions = {federation.dimensions}",
        f"channels = {federation.channels}",
        f"contains = {{{contains}}}",
    ]
    (folder / "federation.toml").write_text("\n".join(lines) + "\n")


def write_site(folder: Path, source: str, rows: Sequence[Case], annotated: Sequence[str] = ()) -> None:
    """Writes site.toml and cases.csv; the site is named as its folder. No `annotated` means all labels."""
    card: dict[str, object] = {"name": folder.name, "source": source, "licence": LICENCE}
    if annotated:
        card["annotated"] = list(annotated)
    (folder / "site.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in card.items()))
    with (folder / "cases.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([field.name for field in fields(Case)])
        table.writerows(astuple(row) for row in rows)


def _list(names: Sequence[str]) -> str:
    return json.dumps(list(names))
