"""Means of score rows by model, metric, label and site."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypedDict

from consilium.scores.rows import COLUMNS, EMPTY, ScoreRow

MEAN = "mean"  # the label of a case's mean over its labels
_case_of = attrgetter(*COLUMNS[:9], "metric")
ByCase = dict[str, dict[str, float]]  # site → case → value


class ScoreEntry(TypedDict, total=False):
    """The means of one model, metric and label. A key without data is left out, so JSON never holds NaN."""

    sites: dict[str, float]  # mean over the site's cases
    site_mean: float  # unweighted mean over the sites inside the federation
    pooled: float  # mean over all cases of those sites
    outside: dict[str, float]
    cases: dict[str, int]
    empty: dict[str, int]  # cases left out because the truth has nothing of this label
    undefined: dict[str, int]  # cases left out because the value is not finite (a distance to an empty prediction)


Summary = dict[str, dict[str, dict[str, ScoreEntry]]]  # model → metric → label


def with_label_mean(rows: Iterable[ScoreRow]) -> list[ScoreRow]:
    """The rows and, for every metric with labels, one more per case: the mean over the labels it has.

    A label that is empty in the truth has no row and does not count. A value that is not finite makes the mean
    undefined.
    """
    rows = list(rows)
    cases: dict[tuple[Any, ...], dict[str, ScoreRow]] = defaultdict(dict)
    for row in rows:
        if row.label and row.metric != EMPTY:
            cases[_case_of(row)][row.label] = row
    without = ((case, found.values()) for case, found in cases.items() if MEAN not in found)
    means = ((case, exact_mean(row.value for row in found)) for case, found in without)
    return rows + [ScoreRow(*(*place, MEAN, metric, value)) for (*place, metric), value in means]


def summarise(rows: Sequence[ScoreRow], split: str) -> Summary:
    """Means by model, metric and label of one split; a model with owners counts only at its own site."""
    values: dict[tuple[str, str, str], ByCase] = defaultdict(lambda: defaultdict(dict))
    empty: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    outside: set[str] = set()
    for row in rows:
        if row.split != split or not at_home(row):
            continue
        if row.outside:
            outside.add(row.site)
        if row.metric != EMPTY:
            values[row.model, row.metric, row.label][row.site][row.case] = row.value
        elif row.value:
            empty[row.model, row.label][row.site].add(row.case)
    summary: Summary = {}
    for (model, metric, label), sites in sorted(values.items()):
        missing = {site: len(cases) for site, cases in sorted(empty[model, label].items())}
        summary.setdefault(model, {}).setdefault(metric, {})[label] = _entry(sites, outside, missing)
    return summary


def at_home(row: ScoreRow) -> bool:
    return row.of in ("", row.site)


def exact_mean(values: Iterable[float]) -> float:
    """The exactly rounded mean, independent of the order of answers."""
    found = [float(value) for value in values]
    return math.fsum(found) / len(found) if all(map(math.isfinite, found)) else math.nan


def site_means(sites: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    finite = {site: [v for v in sites[site].values() if math.isfinite(v)] for site in sorted(sites)}
    return {site: exact_mean(values) for site, values in finite.items() if values}


def _entry(sites: ByCase, outside: set[str], empty: dict[str, int]) -> ScoreEntry:
    means = site_means(sites)
    inside = [site for site in means if site not in outside]
    finite = {site: [v for v in sites[site].values() if math.isfinite(v)] for site in sorted(sites)}
    entry = ScoreEntry(sites={site: means[site] for site in inside})
    if inside:
        entry["site_mean"] = exact_mean(means[site] for site in inside)
        entry["pooled"] = exact_mean(value for site in inside for value in finite[site])
    if guests := {site: means[site] for site in means if site in outside}:
        entry["outside"] = guests
    entry["cases"] = {site: len(values) for site, values in finite.items() if values}
    if empty:
        entry["empty"] = empty
    if undefined := {site: n for site, cases in sorted(sites.items()) if (n := len(cases) - len(finite[site]))}:
        entry["undefined"] = undefined
    return entry
