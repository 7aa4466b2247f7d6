"""What every phantom does besides drawing: how many cases a site has, their names, and the tables beside them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from consilium.data.apportion import apportion
from consilium.errors import StudyError

SPLITS = ("train", "valid", "test")
FIRST_INDEX = {"train": 0, "valid": 100_000, "test": 200_000}  # a case stays in its split whatever their number
LICENCE = "Apache-2.0"


@dataclass(frozen=True)
class PhantomFederation:
    """The facts of federation.toml."""

    task: str
    labels: tuple[str, ...]
    dimensions: int
    channels: int
    contains: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class PhantomCase:
    """A row of cases.csv; the field names are the column names."""

    case: str
    patient: str
    split: str
    image: str
    label: str


def checked(size: int, smallest: int, largest: int, unit: str, seed: int) -> int:
    """The size, if it and the seed are possible."""
    if not smallest <= size <= largest:
        raise StudyError(f"size {size} is not possible; choose {smallest} to {largest} {unit}.")
    if seed < 0:
        raise StudyError(f"seed {seed} is negative; choose 0 or more.")
    return size


def scaled(sizes: Mapping[str, Sequence[int]], cases: int | None) -> dict[str, dict[str, int]]:
    """Cases by site and split: a paper's, in the order of `SPLITS`, or its proportions scaled to `cases` in all."""
    table = {(site, split): n for site, each in sizes.items() for split, n in zip(SPLITS, each) if n}
    found = apportion(table, sum(table.values()) if cases is None else cases)
    return {site: {split: found.get((site, split), 0) for split in SPLITS} for site in sizes}


def numbered(
    site: str, split: str, first: int, count: int, suffix: str, patient: Callable[[int], int] = int
) -> Iterator[tuple[int, PhantomCase]]:
    """`count` cases from the index `first` on; `patient` tells whose first case a case belongs to."""
    for index in range(first, first + count):
        name = f"{site}-{index:06d}"
        who = f"{site}-p{patient(index):06d}"
        yield index, PhantomCase(name, who, split, f"images/{name}{suffix}", f"labels/{name}{suffix}")


def all_splits(
    site: str, counts: Mapping[str, int], suffix: str, patient: Callable[[int], int] = int
) -> list[tuple[int, PhantomCase]]:
    return [
        case for split in SPLITS for case in numbered(site, split, FIRST_INDEX[split], counts[split], suffix, patient)
    ]


def write_federation(folder: Path, federation: PhantomFederation) -> None:
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


def write_home(
    folder: Path,
    rows: Sequence[tuple[int, PhantomCase]],
    save: Callable[[int, Path, Path | None], None],
    source: str,
    annotated: Sequence[str] = (),
) -> None:
    """Writes a site's folder; `save` draws a case into its files, None where it has no mask."""
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for index, row in rows:
        save(index, folder / row.image, folder / row.label if row.label else None)
    manner = f"synthetic phantom in the manner of {source}"
    write_site(folder, manner, [row for _, row in rows], annotated)


def write_site(folder: Path, source: str, rows: Sequence[PhantomCase], annotated: Sequence[str] = ()) -> None:
    """Writes site.toml and cases.csv; the site is named as its folder. No `annotated` means all labels."""
    card: dict[str, object] = {"name": folder.name, "source": source, "licence": LICENCE}
    if annotated:
        card["annotated"] = list(annotated)
    (folder / "site.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in card.items()))
    with (folder / "cases.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([field.name for field in fields(PhantomCase)])
        table.writerows(astuple(row) for row in rows)


def _list(names: Sequence[str]) -> str:
    return json.dumps(list(names))
