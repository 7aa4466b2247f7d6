"""Views of scores for reports: by case, of each site's model at other sites, and the selector's choices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from consilium.scores.means import ByCase, at_home, site_means
from consilium.scores.rows import CHOSEN, ScoreRow


def by_case(
    rows: Iterable[ScoreRow],
    model: str,
    metric: str,
    label: str,
    split: str,
    of: str | None = None,
    outside: bool = False,
) -> ByCase:
    """Finite values by inside (or `outside`) site and case: of each site's own model, or of the one that is `of`'s.

    If a case was scored twice (after a resume, or merged and then trained), the last value counts.
    """
    found: ByCase = defaultdict(dict)
    for row in rows:
        if row.outside != outside or (row.model, row.metric, row.label, row.split) != (model, metric, label, split):
            continue
        if row.of == of if of is not None else at_home(row):
            found[row.site][row.case] = row.value
    finite = {s: {c: v for c, v in sorted(found[s].items()) if math.isfinite(v)} for s in sorted(found)}
    return {site: cases for site, cases in finite.items() if cases}


def matrix(rows: Iterable[ScoreRow], model: str, metric: str, label: str, split: str) -> dict[str, dict[str, float]]:
    """Owner → site → mean over the site's cases: each site's model at all sites, also outside ones."""
    values: dict[str, ByCase] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.of and (row.model, row.metric, row.label, row.split) == (model, metric, label, split):
            values[row.of][row.site][row.case] = row.value
    return {of: means for of in sorted(values) if (means := site_means(values[of]))}


def selection(rows: Iterable[ScoreRow], split: str) -> dict[str, dict[str, float]]:
    """Site → choice → share of the site's cases that the selector sent there ("global", "personal/hk")."""
    chosen: dict[str, ByCase] = defaultdict(lambda: defaultdict(dict))
    cases: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.metric.startswith(CHOSEN) and row.split == split:
            chosen[row.site][row.metric.removeprefix(CHOSEN)][row.case] = row.value
            cases[row.site].add(row.case)
    # divided by cases, not by rows, so that a table without zeros gives the same result
    return {
        site: {choice: math.fsum(hits.values()) / len(cases[site]) for choice, hits in sorted(chosen[site].items())}
        for site in sorted(chosen)
    }
