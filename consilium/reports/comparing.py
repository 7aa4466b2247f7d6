"""Runs side by side, in the layout of the FedSM paper's tables 3 and 4."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from consilium.errors import RunError
from consilium.reports.grouping import Group, groups, once, repeated
from consilium.reports.reading import Headline, RunView
from consilium.reports.tables import _ORDER, POOLED, SITE_MEAN, Cell, Column, Comparison, LineKind, TableLine, in_order
from consilium.run_files.lock import way_on
from consilium.scores.means import ByCase, ScoreEntry, summarise
from consilium.scores.rows import bounds_of
from consilium.scores.statistics import interval, paired
from consilium.scores.views import by_case, matrix


def compare(runs: Sequence[RunView]) -> Comparison:
    """One table over runs; repeats with other seeds become mean ± standard deviation."""
    if not runs:
        raise RunError("there is no run to compare; name at least one run folder.")
    one_task(runs)
    finished = [run for run in once(runs) if run.summary]
    if not finished:
        raise RunError(f"{runs[0].folder} is not finished; {way_on(runs[0].folder)}.")
    metric, label = _common_score(finished)
    # named among all runs, finished or not, so that a page calls a group by one name everywhere
    every = [replace(group, runs=tuple(run for run in group.runs if run.summary)) for group in groups(runs)]
    found = tuple(group for group in every if group.runs)
    lines = [line for group in found for line in _lines(group)]
    return Comparison(
        metric=metric,
        label=label,
        columns=_columns(finished),
        lines=tuple(sorted(lines, key=lambda line: _ORDER[line.kind])),
        groups=found,
        unfinished=tuple(run.name for run in once(runs) if not run.summary),
        rows=tuple(_row(run, finished[0]) for run in finished),
        unlike=_unlike(finished),
        unscored={run.name: run.unscored for run in finished if run.unscored},
        repeated=tuple(_called(folder, kept.folder) for folder, kept in repeated(finished).items()),
    )


def _called(again: Path, kept: Path) -> tuple[str, str]:
    """Two folders by name; of the same name, with the folders that they are in."""
    ends = zip(reversed(again.parts), reversed(kept.parts), strict=False)
    parts = 1 + sum(1 for _ in takewhile(lambda both: both[0] == both[1], ends))
    return "/".join(again.parts[-parts:]), "/".join(kept.parts[-parts:])


def one_task(runs: Sequence[RunView]) -> None:
    """Refuse runs of different tasks: their scores are of different things."""
    known = [run for run in runs if run.task]
    for run in known:
        if run.task != known[0].task:
            raise RunError(
                f"{known[0].name} is a {known[0].task}, {run.name} a {run.task}; name runs of one task at a time."
            )


def _unlike(runs: Sequence[RunView]) -> tuple[str, ...]:
    """Sites whose table of cases and splits was not the same in all runs.

    A rehearsed hospital tells its table by a name that changes with the seed, so only the number of its cases is known.
    """
    told: dict[str, tuple[set[str], set[int | None]]] = defaultdict(lambda: (set(), set()))
    for run in runs:
        for site, facts in run.origin.get("sites", {}).items():
            tables, counts = told[site]
            counts.add(facts.get("cases"))
            if not run.rehearsed(site):
                tables.add(str(facts.get("table")))
    return tuple(sorted(site for site, found in told.items() if any(len(facts) > 1 for facts in found)))


def cells(entries: Iterable[ScoreEntry]) -> dict[Column, Cell]:
    """One entry per seed to columns."""
    values: dict[Column, list[float]] = defaultdict(list)
    for entry in entries:
        for site, value in entry.get("sites", {}).items():
            values[Column("site", site)].append(value)
        for site, value in entry.get("outside", {}).items():
            values[Column("outside", site)].append(value)
        for column, key in ((SITE_MEAN, entry.get("site_mean")), (POOLED, entry.get("pooled"))):
            if key is not None:
                values[column].append(key)
    return {column: cell(found) for column, found in values.items()}


def cell(values: Sequence[float]) -> Cell:
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def site_mean_interval(run: RunView, about: Headline) -> tuple[float, float] | None:
    """95 % interval of a test site mean; None if the table of scores does not hold the cases it was made of."""
    cases = _cases(run, about)
    site_mean = run.entry(about.model, about.metric, about.label).get("site_mean")
    if not cases or site_mean is None:
        return None
    again = statistics.fmean(statistics.fmean(found.values()) for found in cases.values())
    if abs(again - site_mean) > 1e-6:
        return None
    return interval(cases, within=bounds_of(about.metric))


def difference(run: RunView, other: RunView) -> dict[str, Any] | None:
    """How much better `run`'s headline is than `other`'s on the cases both were tested on."""
    if run.headline is None or other.headline is None:
        return None
    found = paired(_cases(run, run.headline), _cases(other, other.headline))
    return asdict(found) if found else None


def elsewhere(group: Group) -> dict[str, dict[str, float]]:
    """Owner → site → test score of the owner's local model, from the group's first run."""
    run = group.runs[0]
    about = run.headline
    if about is None:
        return {}
    found = matrix(run.best_rows, about.model, about.metric, about.label, "test")
    return found if any(set(means) - {of} for of, means in found.items()) else {}


def _lines(group: Group) -> list[TableLine]:
    about = group.runs[0].headline
    assert about is not None  # finished runs have one
    name = {"bound": f"{group.name} (bound)", "local": f"{group.name} (own site)"}.get(group.kind, group.name)
    parts = [
        _of_model(group, replace(about, model=model), part_name(name, model), "part") for model in group.runs[0].parts
    ]
    own = _of_model(group, about, name, group.kind)
    return [*(_elsewhere_lines(group, about) if group.kind == "local" else []), *parts, own]


def part_name(method: str, model: str) -> str:
    """What tables call a model that is part of a method's."""
    return f"{method}: its {model} model"


def _of_model(group: Group, about: Headline, name: str, kind: LineKind) -> TableLine:
    runs = group.runs
    alone = site_mean_interval(runs[0], about) if len(runs) == 1 else None
    found = cells(run.entry(about.model, about.metric, about.label) for run in runs)
    return TableLine(name, kind, len(runs), found, alone, runs[0].optimizer_state, runs[0].fixes_state)


def _elsewhere_lines(group: Group, about: Headline) -> list[TableLine]:
    """'drishti local': one site's own model at every site, a row each."""
    suffix = group.name.removeprefix("Local")
    return [
        TableLine(
            f"{of} local{suffix}",
            "elsewhere",
            len(group.runs),
            cells(_owned(run, about, of) for run in group.runs),
            state=group.runs[0].optimizer_state,
        )
        for of in elsewhere(group)
    ]


def _owned(run: RunView, about: Headline, of: str) -> ScoreEntry:
    rows = [replace(row, of="") for row in run.best_rows if row.of == of and row.model == about.model]
    return summarise(rows, "test").get(about.model, {}).get(about.metric, {}).get(about.label, ScoreEntry())


def _cases(run: RunView, about: Headline) -> ByCase:
    return by_case(run.best_rows, about.model, about.metric, about.label, "test")


def _row(run: RunView, first: RunView) -> dict[str, Any]:
    assert run.summary is not None
    assert run.headline is not None
    row = {"run": run.name, "method": run.method, "seed": run.seed, "headline": run.summary["headline"]}
    row["interval"] = site_mean_interval(run, run.headline)
    if run is not first and (found := difference(run, first)):
        row["against_first"] = {"run": first.name, **found}
    return row


def _columns(runs: Sequence[RunView]) -> tuple[Column, ...]:
    """The study's order of sites where it gives one, else that of the summaries; of many sites the means come first."""
    inside: dict[str, None] = dict.fromkeys(
        site for run in runs for site in run.study.get("study", {}).get("sites", [])
    )
    outside: dict[str, None] = {}
    for run in runs:
        headline = run.summary["headline"] if run.summary else {}
        inside |= dict.fromkeys(headline.get("sites", {}))
        outside |= dict.fromkeys(headline.get("outside", {}))
    sites = [Column("site", site) for site in inside]
    return (*in_order(sites, (SITE_MEAN, POOLED)), *(Column("outside", site) for site in outside))


def _common_score(runs: Sequence[RunView]) -> tuple[str, str]:
    first = runs[0].headline
    assert first is not None
    for run in runs:
        about = run.headline
        if about is None or (about.metric, about.label) != (first.metric, first.label):
            raise RunError(
                f"{runs[0].name} is about {first.metric} of {first.label or 'all'}, {run.name} about "
                f"{about.metric if about else 'nothing'} of {about.label if about else 'all'}; "
                "compare runs of one task at a time."
            )
    return first.metric, first.label
