"""Writing a federation: its facts, and the folder of a site."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from consilium.data.case_files import ROOT
from consilium.data.case_table import COLUMNS, CaseTable
from consilium.data.site_folder import Case
from consilium.fields import to_toml
from consilium.files import write_text


def write_federation_toml(
    folder: Path,
    task: str,
    labels: Sequence[str],
    dimensions: int,
    channels: int,
    contains: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Writes federation.toml; the folder is made if needed."""
    lines = [
        f"task = {to_toml(task)}",
        f"labels = {to_toml(list(labels))}",
        f"dimensions = {dimensions}",
        f"channels = {channels}",
    ]
    if contains:
        inside = ", ".join(f"{to_toml(outer)} = {to_toml(list(inner))}" for outer, inner in contains.items())
        lines.append(f"contains = {{{inside}}}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text("\n".join(lines) + "\n", folder / "federation.toml")
    return folder / "federation.toml"


def write_site(
    folder: Path,
    name: str,
    cases: Iterable[Case],
    annotated: Sequence[str] = (),
    source: str = "",
    licence: str = "",
    root: Path | None = None,
) -> Path:
    """Writes site.toml and cases.csv of site `name` into the federation's folder, and returns the site's folder.

    Paths of the cases are relative to the site's folder, or inside it or `root`. No `annotated` means all labels.
    """
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    lines = [f"name = {to_toml(name)}"]
    if annotated:
        lines.append(f"annotated = {to_toml(list(annotated))}")
    lines += [f"source = {to_toml(source)}", f"licence = {to_toml(licence)}"]
    if root is not None:
        lines.append(f"root = {to_toml(str(root))}")
    rows = []
    for case in cases:
        label = _inside(case.label, place, root) if isinstance(case.label, Path) else case.label or ""
        values = (case.name, case.patient, case.split, _inside(case.image, place, root), label)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    write_table(place / "cases.csv", CaseTable(COLUMNS, tuple(rows)))
    write_text("\n".join(lines) + "\n", place / "site.toml")
    return place


def _inside(path: Path, place: Path, root: Path | None) -> str:
    if root is not None and path.is_relative_to(root) and ".." not in path.parts:
        return f"{ROOT}{path.relative_to(root).as_posix()}"
    relative = path.relative_to(place) if path.is_relative_to(place) else path
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{path} is not inside {place}")
    return relative.as_posix()


def write_table(path: Path, table: CaseTable) -> None:
    """Writes a cases.csv in one step: a reader sees the old table or the new one."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, table.columns, lineterminator=table.newline)
    writer.writeheader()
    writer.writerows(table.rows)
    write_text(text.getvalue(), path, table.encoding)
