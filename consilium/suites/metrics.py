"""Tables of other scores than the one that decides, and means that count sites outside the federation too."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from consilium.errors import RunError
from consilium.reports.table_formats import about_metric
from consilium.scores.means import ScoreEntry
from consilium.suites.sections import PaperTable, Suite

if TYPE_CHECKING:
    from consilium.reports.reading import RunView
    from consilium.suites.entries import RowRuns


def by_metric(suite: Suite, standings: Sequence[RowRuns]) -> Iterator[tuple[str, list[RowRuns]]]:
    """Every score of `[suite] metrics` and the rows, whose runs are then about it; without any: the deciding score."""
    for metric in suite.heading.metrics or ("",):
        yield metric, [_about(standing, metric) if metric else standing for standing in standings]


def _about(standing: RowRuns, metric: str) -> RowRuns:
    """The row's runs that have the score: where nothing was predicted there is no distance."""
    runs: dict[int, RunView] = {}
    for seed, run in standing.runs.items():
        try:
            runs[seed] = about_metric(run, metric)
        except RunError:
            continue
    return replace(standing, runs=runs, lacking=tuple(seed for seed in standing.runs if seed not in runs))


def lacking_notes(standings: Sequence[RowRuns]) -> tuple[str, ...]:
    """One sentence on the finished runs that do not have a table's score; none where all have it."""
    names = [
        f"{s.name} (seed{'s' * (len(s.lacking) > 1)} {', '.join(map(str, s.lacking))})" for s in standings if s.lacking
    ]
    return (f"No such score, and so left out: {', '.join(names)}.",) if names else ()


def fewer_notes(standings: Sequence[RowRuns], seeds: int) -> tuple[str, ...]:
    """One sentence on the rows whose seeds are not all finished yet."""
    done = [(s.name, len(s.runs) + len(s.lacking)) for s in standings]
    fewer = [f"{name} {count}" for name, count in done if 0 < count < seeds]
    return (f"Fewer than {seeds} seeds so far: {', '.join(fewer)}.",) if fewer else ()


def papers_of(suite: Suite, label: str, metric: str) -> tuple[PaperTable, ...]:
    """The paper's tables that stand beside this one; a table that names no score stands beside the first."""
    first = metric in ("", *suite.heading.metrics[:1])
    return tuple(
        paper
        for paper in suite.papers
        if (paper.label, paper.about) == (label, "scores") and (paper.metric == metric or (first and not paper.metric))
    )


def everywhere(entry: ScoreEntry) -> float | None:
    """The mean over all sites, those outside the federation among them; None where none is outside."""
    if not entry.get("outside") or not entry.get("sites"):
        return None
    return statistics.fmean([*entry["sites"].values(), *entry["outside"].values()])
