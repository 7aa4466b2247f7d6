"""What `consilium analyse` left in run folders, for the page: figures with their captions, and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import RunError
from consilium.reports.embedding import EmbeddedImage, data_uri
from consilium.reports.grouping import Group

ORDER = ("gallery", "features", "gamma", "lambda", "loss-surface")  # of the sections; others come last
# not about the one run whose folder holds them
_ABOUT_ALL = ("gallery", "lambda", "loss-surface", "labels", "ablation")


@dataclass(frozen=True)
class ShownFinding:
    """One analysis as it is shown."""

    title: str
    caption: str
    pictures: tuple[EmbeddedImage, ...]
    table: tuple[tuple[str, ...], ...]  # heads first; empty without one


def findings(every: Sequence[Group]) -> list[ShownFinding]:
    """Those of all runs in a fixed order; runs of one federation show its gallery once."""
    found: dict[tuple[str, ...], tuple[int, ShownFinding]] = {}
    for group in every:
        for run in group.runs:
            name = group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}"
            for file in sorted((run.folder / "analysis").glob("*.json")):
                kind, finding = _read(file, name)
                found.setdefault(_same(kind, finding), (_place(kind), finding))
    return [finding for _, finding in sorted(found.values(), key=lambda item: item[0])]


def _place(kind: str) -> int:
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _same(kind: str, finding: ShownFinding) -> tuple[str, ...]:
    return (kind, finding.title, finding.caption, *(cell for row in finding.table for cell in row))


def _read(file: Path, run: str) -> tuple[str, ShownFinding]:
    try:
        facts: dict[str, Any] = json.loads(file.read_bytes())
        kind, title, caption = str(facts["analysis"]), str(facts["title"]), str(facts["caption"])
        pictures = tuple(picture(file.parent / str(name), caption) for name in facts["figures"])
        beside = file.with_suffix(".md")
        table = tuple(_rows(beside.read_text(encoding="utf-8").splitlines())) if beside.exists() else ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is not a file of `consilium analyse` ({type(error).__name__}: {error}); make it again, or "
            "delete it."
        ) from None
    return kind, ShownFinding(title if kind in _ABOUT_ALL else f"{title}: {run}", caption, pictures, table)


def picture(file: Path, alt: str) -> EmbeddedImage:
    """Drawings stay drawings; one that is mostly photographs is smaller as a PNG."""
    data, media = file.read_bytes(), "image/svg+xml"
    size = re.search(rb'<svg [^>]*?width="([0-9.]+)pt"', data)
    width = round(float(size.group(1)) * 96 / 72) if size else 960
    other = file.with_suffix(".png")
    if b"<image" in data and other.exists():
        data, media = other.read_bytes(), "image/png"
    return EmbeddedImage(data_uri(data, media), alt, width)


def _rows(lines: Iterable[str]) -> Iterable[tuple[str, ...]]:
    """The cells of a Markdown table, without its rule."""
    for number, line in enumerate(line for line in lines if line.startswith("|")):
        if number != 1:
            yield tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
