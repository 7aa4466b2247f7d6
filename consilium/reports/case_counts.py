"""How many cases every site has, from the run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from consilium.reports.reading import RunView
from consilium.reports.tables import TextCell

HEAD = ("site", "training", "validation", "test", "in all")
SLICED = ("site", "training slices", "validation volumes", "test volumes", "volumes in all")


def case_grid(runs: Sequence[RunView]) -> list[list[TextCell]]:
    """A line per site and one for all; [] where the runs do not say. Runs of unlike data have a line for each.

    Volumes trained as slices are counted as slices in training, as volumes elsewhere; slices and cases have no sum.
    """
    runs = [run for run in runs if _sites(run)]
    units = {_sliced(run) for run in runs}
    found: dict[str, list[tuple[str, ...]]] = {}
    for run in runs:
        for site, facts in _sites(run).items():
            outside = " (outside)" if site in run.study.get("study", {}).get("leave_out", ()) else ""
            first, *rest = ("–" if n is None else str(n) for n in _counts(facts))
            line = (f"{first} slices" if _sliced(run) and len(units) > 1 else first, *rest)
            known = found.setdefault(f"{site}{outside}", [])
            if line not in known:
                known.append(line)
    if not found:
        return []
    rows = [(site, *line) for site in sorted(found) for line in found[site]]
    grid = [SLICED if units == {True} else HEAD, *rows]
    if len(units) == 1 and all(len(lines) == 1 for lines in found.values()) and not any("–" in row for row in rows):
        grid.append(("all sites", *(str(sum(int(row[i]) for row in rows)) for i in range(1, len(HEAD)))))
    return [[TextCell(text) for text in row] for row in grid]


def _sites(run: RunView) -> Mapping[str, Mapping[str, Any]]:
    told: Mapping[str, Mapping[str, Any]] = run.origin.get("sites", {})
    return {site: facts for site, facts in told.items() if "n" in facts}


def _sliced(run: RunView) -> bool:
    return bool(run.study.get("preprocess", {}).get("slices"))


def _counts(facts: Mapping[str, Any]) -> tuple[int | None, ...]:
    scored = facts.get("scored", {})
    return facts["n"], scored.get("valid"), scored.get("test"), facts.get("cases")
