"""Several federations in one suite, as in the APPLE paper's tables: a line per method, a column per federation.

Each number is a site mean. There are separate tables for the best round on validation, the last round, and `bmcta`,
whose round was chosen on the test cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilium.reports.comparing import cell
from consilium.reports.reading import Headline, RunView
from consilium.reports.tables import STATES, Cell, TextCell, called
from consilium.scores.means import MEAN
from consilium.suites.choosing import end_notes
from consilium.suites.entries import Difference, RowRuns, TableEntry, difference, single_notes
from consilium.suites.metrics import by_metric, fewer_notes, lacking_notes, papers_of
from consilium.suites.planning import reference, without
from consilium.suites.rendering import json_papers, markdown_text, rich_tables
from consilium.suites.sections import FEDERATION, STATE, PaperTable, Suite
from consilium.suites.tables import by_state

if TYPE_CHECKING:
    from rich.console import RenderableType

FIGURES = {
    "best": "at the round best on validation",
    "bmcta": "`bmcta`: the best of all rounds scored, chosen on the test cases themselves, as the APPLE paper reports",
    "last": "at the last round",
}

Column = Mapping[str, Cell | Difference | str]  # federation → cell


@dataclass(frozen=True)
class FederationTable:
    """One figure of all methods on all federations, and the paper's."""

    figure: str  # "best", "bmcta", "last", "difference" or "chosen"
    title: str
    federations: tuple[str, ...]
    lines: Mapping[str, Column]
    notes: tuple[str, ...] = ()
    papers: tuple[PaperTable, ...] = ()

    def grid(self) -> list[list[TextCell]]:
        first = "setting" if self.figure == "chosen" else "method"
        head = [first, *short_names(self.federations).values()]
        body = [[name, *(_text(found.get(place)) for place in self.federations)] for name, found in self.lines.items()]
        return [[TextCell(text) for text in texts] for texts in (head, *body)]

    def to_rich(self) -> list[RenderableType]:
        return rich_tables(self.title, self.grid(), self.notes, self.papers)

    def to_markdown(self) -> str:
        return markdown_text(self.title, self.grid(), self.notes, self.papers)

    def to_json(self) -> dict[str, Any]:
        lines = [
            {
                "name": name,
                "federations": {
                    place: (value if isinstance(value, str) else asdict(value)) for place, value in found.items()
                },
            }
            for name, found in self.lines.items()
        ]
        return {"figure": self.figure, "title": self.title, "lines": lines, "papers": json_papers(self.papers)}


def federation_tables(suite: Suite, standings: Sequence[RowRuns]) -> tuple[FederationTable, ...]:
    """The tables of a suite with federations in its grid; empty for others and before the first run is finished."""
    if FEDERATION not in suite.grid or not any(standing.runs for standing in standings):
        return ()
    found = []
    for metric, about_it in by_metric(suite, standings):
        for state, here in by_state(suite, about_it):
            if any(standing.runs or standing.lacking for standing in here):
                labels = suite.heading.labels
                found += [table for label in labels for table in _figures(suite, here, label, state, metric)]
    return (*found, *_choices(suite, standings))


def short_names(federations: Sequence[str]) -> dict[str, str]:
    """The last part of each path, or the whole where two would be called the same."""
    names = {place: Path(place).name for place in federations}
    return names if len(set(names.values())) == len(names) else {place: place for place in federations}


def _figures(
    suite: Suite, standings: Sequence[RowRuns], label: str, state: str, metric: str
) -> Iterator[FederationTable]:
    places = suite.grid[FEDERATION]
    shown = metric or next(run.headline for s in standings for run in s.runs.values() if run.headline).metric
    what = f"Test {called(shown)}" + ("" if label == MEAN else f" of {label}") + ", mean over sites, "
    only = f", optimiser state {state}" if state else ""
    for figure, which in FIGURES.items():
        lines = _lines({(one.name, _place(s)): _cell(one, figure, label) for s in standings for one in _shown(s)})
        if lines or (figure == "best" and lacking_notes(standings)):
            yield FederationTable(figure, what + which + only, places, lines, _notes(suite, standings, figure))
    against = without(without(reference(suite), FEDERATION), STATE).name
    bases = {_place(s): s for s in standings if _name(s) == against}
    gaps = {
        (one.name, _place(s)): difference(one, _entrant(bases[_place(s)]), label)
        for s in standings
        for one in _shown(s)
        if one.name != against
    }
    title = f"Against {against}{f', {called(shown)}' if metric else ''}, at the rounds best on validation{only}"
    note = (
        "The difference of the site means on the same cases, and its 95 % interval over cases (bootstrap in each site)."
    )
    papers = papers_of(suite, label, metric)
    lines = _lines(gaps)
    if lines or papers:  # one row, or one that has run, has nothing to compare
        names = short_names(places)
        single = {(place, site) for (_, place), gap in gaps.items() if gap for site in gap.single}
        few = single_notes([f"{site} ({names[place]})" for place, site in sorted(single)])
        yield FederationTable("difference", title, places, lines, (note, *few), papers)


def _choices(suite: Suite, standings: Sequence[RowRuns]) -> Iterator[FederationTable]:
    chosen = {
        (f"{without(s.choice.row, FEDERATION).name}: {key.partition('.')[2]}", _place(s)): str(value)
        for s in standings
        if s.choice.tried
        for key, value in (s.choice.chosen or {}).items()
    }
    papers = tuple(paper for paper in suite.papers if paper.about == "choices")
    if chosen or papers:
        notes = tuple(end_notes(standing.choice for standing in standings))
        yield FederationTable(
            "chosen", "Chosen on validation cases", suite.grid[FEDERATION], _lines(chosen), notes, papers
        )


def _lines(found: Mapping[tuple[str, str], Cell | Difference | str | None]) -> dict[str, Column]:
    names = dict.fromkeys(name for (name, _), value in found.items() if value is not None)
    return {
        name: {place: value for (whose, place), value in found.items() if whose == name and value is not None}
        for name in names
    }


def _name(standing: RowRuns) -> str:
    return without(without(standing.choice.row, FEDERATION), STATE).name


def _place(standing: RowRuns) -> str:
    return str(standing.choice.row.settings[FEDERATION])


def _entrant(standing: RowRuns) -> TableEntry:
    return TableEntry(_name(standing), (standing,), unseen=False)


def _shown(standing: RowRuns) -> list[TableEntry]:
    """A method's line, after those of the parts of its model."""
    own = _entrant(standing)
    return [*(own.parts if standing.runs else []), own]


def _cell(entrant: TableEntry, figure: str, label: str) -> Cell | None:
    values = [_value(run, entrant.about(run), figure, label) for run in entrant.runs]
    known = [value for value in values if value is not None]
    return cell(known) if known else None


def _value(run: RunView, about: Headline, figure: str, label: str) -> float | None:
    assert run.summary is not None  # finished runs have one
    if figure == "bmcta":  # of the headline model only
        entry = run.summary.get("bmcta", {}) if label == MEAN and about == run.headline else {}
    else:
        entry = run.summary[figure]["scores"].get(about.model, {}).get(about.metric, {}).get(label, {})
    found: float | None = entry.get("site_mean")
    return found


def _notes(suite: Suite, standings: Sequence[RowRuns], figure: str) -> tuple[str, ...]:
    if figure != "best":
        return ()
    missing = [s.name for s in standings if not s.runs and not s.lacking]
    notes = ["Every site of a federation weighs the same."]
    notes += [f"Not finished and left out: {', '.join(missing)}."] * bool(missing)
    notes += [*fewer_notes(standings, len(suite.heading.seeds)), *lacking_notes(standings)]
    return (*notes, *_states(standings))


def _states(standings: Sequence[RowRuns]) -> Iterator[str]:
    """The optimiser state of the table, and the methods that fix another one."""
    runs = [(_name(s), run) for s in standings for run in s.runs.values() if run.optimizer_state]
    for state in dict.fromkeys(run.optimizer_state for _, run in runs if not run.fixes_state):
        yield STATES[state]
        others = dict.fromkeys(name for name, run in runs if run.fixes_state and run.optimizer_state != state)
        if others:
            yield f"Otherwise, as their papers fix it: {', '.join(others)}."


def _text(value: Cell | Difference | str | None) -> str:
    if isinstance(value, Difference):
        return f"{value.text()} ({value.low:+.4f} to {value.high:+.4f})"
    return value.text() if isinstance(value, Cell) else value or "–"
