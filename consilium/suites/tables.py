"""The table of a suite: mean ± standard deviation over seeds, paired differences, and the paper's figures beside it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from consilium.reports.comparing import cells, elsewhere
from consilium.reports.grouping import Group
from consilium.reports.reading import RunView
from consilium.reports.tables import POOLED, SITE_MEAN, Cell, Column, Comparison, TableLine, TextCell, in_order
from consilium.scores.means import ScoreEntry
from consilium.scores.views import by_case
from consilium.suites.choosing import end_notes
from consilium.suites.entries import Difference, RowRuns, TableEntry, difference, headline_of, single_notes
from consilium.suites.metrics import by_metric, everywhere, fewer_notes, lacking_notes, papers_of
from consilium.suites.planning import reference, settings_text, without
from consilium.suites.rendering import json_papers, markdown_text, rich_tables
from consilium.suites.sections import LEAVE_OUT, STATE, PaperTable, Suite

if TYPE_CHECKING:
    from rich.console import RenderableType

UNSEEN = (
    "Sites are left out in turn: a column is the score at a site nobody trained on, of models trained at the others, "
    "at the round best on the others' validation cases."
)


@dataclass(frozen=True)
class SuiteTable:
    """Our table of one label, and the paper's."""

    comparison: Comparison
    entrants: Mapping[str, TableEntry]  # by the name of their line
    differences: Mapping[str, Difference]
    reference: str  # the name of the row the others are compared with
    seeds: int  # asked for
    papers: tuple[PaperTable, ...]
    last_rounds: int = 0
    late: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of each line, the seeds' last rounds
    wide: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of each line, the seeds' means over all sites
    lacking: tuple[str, ...] = ()  # a sentence on the runs that do not have the score

    def grid(self) -> list[list[TextCell]]:
        """Heads and lines, differences last."""
        head, *body = self.comparison.grid()
        if any(self.wide.values()):
            head = [*head, TextCell("mean with outside")]
            wide = [self.wide.get(line.name, ()) for line in self.comparison.lines]
            body = [[*texts, TextCell(_mean_text(values))] for texts, values in zip(body, wide, strict=True)]
        if self.last_rounds:
            head = [*head, TextCell(f"last {self.last_rounds} scored rounds")]
            late = [self.late.get(line.name, ()) for line in self.comparison.lines]
            body = [[*texts, TextCell(_mean_text(values))] for texts, values in zip(body, late, strict=True)]
        if not self.differences:
            return [head, *body]
        found = [[*head, TextCell(f"against {self.reference}"), TextCell("95 % interval")]]
        for line, texts in zip(self.comparison.lines, body, strict=True):
            gap = self.differences.get(line.name)
            found.append(
                [
                    *texts,
                    TextCell(gap.text() if gap else ""),
                    TextCell(f"{gap.low:+.4f} to {gap.high:+.4f}" if gap else ""),
                ]
            )
        return found

    def notes(self) -> list[str]:
        standings = [s for entrant in self.entrants.values() if not entrant.model for s in entrant.standings]
        unseen = any(entrant.unseen for entrant in self.entrants.values())
        notes = [UNSEEN] * unseen + [self.comparison.caption]
        if self.differences:
            notes.append(
                f"Against {self.reference}: the difference of the site means, paired seed by seed and case by case; "
                "its interval is over cases (bootstrap within each site), its ± over seeds."
            )
        notes += single_notes(sorted({site for gap in self.differences.values() for site in gap.single}))
        if any(self.wide.values()):
            notes.append("Mean with outside: over all sites, also those that did not train; each weighs the same.")
        if self.last_rounds:
            notes.append(
                f"Last {self.last_rounds} scored rounds: the site mean over them, so that the choice of one round adds "
                "nothing; ± is over seeds."
            )
        chosen = [
            f"{s.name}: {settings_text(s.choice.chosen)}" for s in standings if s.choice.tried and s.choice.chosen
        ]
        if chosen:
            notes.append(f"Chosen on validation cases: {'; '.join(chosen)}.")
        notes += end_notes(standing.choice for standing in standings)
        return [*notes, *fewer_notes(standings, self.seeds), *self.lacking]

    def to_rich(self) -> list[RenderableType]:
        """For the terminal: our table, the notes, the paper's tables."""
        body = [[TextCell(_stacked(text.text), text.bold) for text in texts] for texts in self.grid()]
        return rich_tables(self.comparison.title, body, self.notes(), self.papers)

    def to_markdown(self) -> str:
        return markdown_text(self.comparison.title, self.grid(), self.notes(), self.papers)

    def to_json(self) -> dict[str, Any]:
        lines = []
        for line in self.comparison.to_json()["lines"]:
            entrant, gap = self.entrants.get(line["name"]), self.differences.get(line["name"])
            turns = [_facts(standing) for standing in entrant.standings] if entrant else []
            facts = {"turns": turns} if entrant and entrant.unseen else next(iter(turns), {})
            gone = {k: v for k, v in line.items() if k != "interval"}
            late = {"last_rounds": list(self.late.get(line["name"], ()))} if self.last_rounds else {}
            if wide := self.wide.get(line["name"]):
                late |= {"mean_with_outside": list(wide)}
            lines.append({**gone, **facts, **late, "difference": asdict(gap) if gap else None})
        papers = json_papers(self.papers)
        facts = {"label": self.comparison.label, "metric": self.comparison.metric, "reference": self.reference}
        return {**facts, "lines": lines, "papers": papers}


def suite_tables(suite: Suite, standings: Sequence[RowRuns]) -> tuple[SuiteTable, ...]:
    """One table per score, optimiser state of the grid and label, of the rows that have a finished run."""
    found = []
    for metric, about_it in by_metric(suite, standings):
        for state, here in by_state(suite, about_it):
            entrants = _entrants(here)
            left_out = tuple(standing.name for standing in here if not standing.runs and not standing.lacking)
            lacking = lacking_notes(here)
            if entrants or lacking:
                tables = [_table(suite, entrants, left_out, label, state, metric) for label in suite.heading.labels]
                found += [replace(table, lacking=lacking) for table in tables]
    return tuple(found)


def by_state(suite: Suite, standings: Sequence[RowRuns]) -> Iterator[tuple[str, list[RowRuns]]]:
    """An optimiser state of the grid and its rows, which have tables of their own; without one: empty, and all rows.

    A method that fixes its state is in all tables: the grid does not vary it there.
    """
    for state in suite.grid.get(STATE, ("",)):
        yield state, [s for s in standings if not state or s.choice.row.settings.get(STATE, state) == state]


def _table(
    suite: Suite, entrants: Sequence[TableEntry], left_out: tuple[str, ...], label: str, state: str, metric: str
) -> SuiteTable:
    columns = _columns(entrants, label)
    lines: list[TableLine] = []
    named: dict[str, TableEntry] = {}
    for entrant in entrants:
        lines += _elsewhere_lines(entrant, label, columns)
        for one in (*entrant.parts, entrant):
            line = _line(one, label)
            named[line.name] = one
            lines.append(line)
    against = without(without(reference(suite), LEAVE_OUT), STATE).name
    base = next((entrant for entrant in entrants if entrant.name == against), None)
    gaps = {name: difference(e, base, label) for name, e in named.items() if base and e is not base}
    lines.sort(key=lambda line: line.section)
    shown = metric or headline_of(entrants[0].runs[0]).metric
    comparison = Comparison(shown, label, columns, tuple(lines), (), left_out, (), state=state)
    papers = papers_of(suite, label, metric)
    found = {name: gap for name, gap in gaps.items() if gap}
    count = suite.heading.last_rounds
    late = {name: e.late_of_seeds(label, count) for name, e in named.items()} if count else {}
    wide = {} if any(e.unseen for e in entrants) else {name: _everywhere(e, label) for name, e in named.items()}
    return SuiteTable(comparison, named, found, against, len(suite.heading.seeds), papers, count, late, wide)


def _everywhere(entrant: TableEntry, label: str) -> tuple[float, ...]:
    """Of each seed the mean over all sites, inside and outside; nothing where no site is outside."""
    found = (everywhere(entrant.entry(seed, label)) for seed in entrant.seeds)
    return tuple(value for value in found if value is not None)


def _entrants(standings: Sequence[RowRuns]) -> list[TableEntry]:
    """Rows that differ only in who is left out are one line; a line without a finished run is not there."""
    turns: dict[str, list[RowRuns]] = defaultdict(list)
    for standing in standings:
        turns[without(without(standing.choice.row, LEAVE_OUT), STATE).name].append(standing)
    found = [TableEntry(name, tuple(s), LEAVE_OUT in s[0].choice.row.settings) for name, s in turns.items()]
    return [entrant for entrant in found if entrant.runs]


def _facts(standing: RowRuns) -> dict[str, Any]:
    row = standing.choice.row
    runs = {str(seed): run.name for seed, run in standing.runs.items()}
    facts = {"method": row.method, "settings": dict(row.settings), "runs": runs}
    return {**facts, "chosen": dict(standing.choice.chosen or {})}


# -------------------------------------------------------------------------------------------------- numbers


def _entry(run: RunView, label: str) -> ScoreEntry:
    return run.entry(headline_of(run).model, headline_of(run).metric, label)


def _line(entrant: TableEntry, label: str) -> TableLine:
    run = entrant.runs[0]
    kind = run.kind
    name = {"bound": f"{entrant.name} (bound)", "local": f"{entrant.name} (own site)"}.get(kind, entrant.name)
    seeds = entrant.seeds
    found = cells(entrant.entry(seed, label) for seed in seeds)
    if not seeds:  # no seed has all turns: show the finished sites
        found = _single_turns(entrant, label)
    return TableLine(
        name,
        "part" if entrant.model else kind,
        len(seeds),
        found,
        state=run.optimizer_state,
        fixed=run.fixes_state,
    )


def _single_turns(entrant: TableEntry, label: str) -> dict[Column, Cell]:
    each = [replace(entrant, standings=(standing,)) for standing in entrant.standings]
    found = [cells(one.entry(seed, label) for seed in one.seeds) for one in each]
    return {column: cell for part in found for column, cell in part.items() if column.kind == "outside"}


def _elsewhere_lines(entrant: TableEntry, label: str, columns: Sequence[Column]) -> Iterator[TableLine]:
    """One site's own model at every site, a row each, as in the paper's table 3."""
    runs = entrant.runs
    if runs[0].kind != "local" or entrant.unseen:
        return
    title = entrant.name.replace("Local", "local", 1)
    owners = elsewhere(Group(entrant.name, "local", tuple(runs)))
    for of in [column.site for column in columns if column.site in owners]:
        found = cells(_owned(run, label, of) for run in runs)
        yield TableLine(f"{of} {title}", "elsewhere", len(runs), found, state=runs[0].optimizer_state)


def _owned(run: RunView, label: str, of: str) -> ScoreEntry:
    found = by_case(run.best_rows, headline_of(run).model, headline_of(run).metric, label, "test", of)
    sites = {site: statistics.fmean(cases.values()) for site, cases in found.items()}
    if not sites:
        return ScoreEntry()
    every = [value for cases in found.values() for value in cases.values()]
    return ScoreEntry(sites=sites, site_mean=statistics.fmean(sites.values()), pooled=statistics.fmean(every))


def _columns(entrants: Sequence[TableEntry], label: str) -> tuple[Column, ...]:
    """The study's order of sites where it gives one; of sites left out in turn, the grid's."""
    turns = [standing.choice.row.settings[LEAVE_OUT] for e in entrants if e.unseen for standing in e.standings]
    if turns:
        left_out = dict.fromkeys(site for turn in turns for site in turn)
        return in_order([Column("outside", site) for site in left_out], (SITE_MEAN, POOLED))
    runs = [run for entrant in entrants for run in entrant.runs]
    inside = dict.fromkeys(site for run in runs for site in run.study.get("study", {}).get("sites", []))
    inside |= dict.fromkeys(site for run in runs for site in _entry(run, label).get("sites", {}))
    outside = dict.fromkeys(site for run in runs for site in _entry(run, label).get("outside", {}))
    sites = [Column("site", site) for site in inside]
    return (*in_order(sites, (SITE_MEAN, POOLED)), *(Column("outside", site) for site in outside))


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def _stacked(text: str) -> str:
    """On two lines, so that a table of eight columns fits a terminal."""
    return text.replace(" ± ", "\n± ").replace(" to ", " to\n")
