"""Running a suite: what is done is skipped, what was interrupted goes on, what fails does not stop the rest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from consilium import simulation
from consilium.errors import StudyError, UserError, WorkError
from consilium.fields import nearest
from consilium.files import write_json, write_text
from consilium.inputs import place_of
from consilium.machine import default_workers
from consilium.methods import ALIASES
from consilium.reports.reading import read_run
from consilium.suites.choosing import Choice, choose_all, write_choices
from consilium.suites.drawing import federation, missing
from consilium.suites.federations import FederationTable, federation_tables
from consilium.suites.planning import Planned, Row, check, finished, folder_of, rows, study_of, trials
from consilium.suites.reading import FEDERATION, STATE, Suite, load_suite
from consilium.suites.settings import names
from consilium.suites.tables import Standing, SuiteTable, suite_tables
from consilium.suites.unseen import SelectionTable, selection_tables
from consilium.wires.processes import Pool

State = Literal["done", "interrupted", "to do", "after choosing"]


class Watcher(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...


class Nobody:
    """Watches nothing."""

    def say(self, text: str) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A run that did not finish."""

    title: str
    run: str  # the name of its folder
    why: str


@dataclass(frozen=True)
class Prospect:
    """A run of the suite and where it stands."""

    planned: Planned
    folder: Path | None  # None: it depends on a choice that is not made, or on data that are not drawn
    state: State

    @property
    def title(self) -> str:
        return self.planned.title + (" with what is chosen" if self.state == "after choosing" else "")


@dataclass(frozen=True)
class SuiteResult:
    """What a suite found."""

    suite: Suite
    folder: Path  # of choices.json, table.md and table.json
    choices: tuple[Choice, ...]
    tables: tuple[SuiteTable, ...]  # one per label; none before the first run is finished
    selections: tuple[SelectionTable, ...]  # where sites are left out in turn: whom the selector asks there
    federations: tuple[FederationTable, ...]  # in place of `tables` where the grid is over federations
    failed: tuple[Failure, ...]

    @property
    def shown(self) -> tuple[SuiteTable | SelectionTable | FederationTable, ...]:
        """All tables in the order of a page."""
        return (*self.tables, *self.selections, *self.federations)

    def to_markdown(self) -> str:
        parts = [table.to_markdown() for table in self.shown] or ["No run is finished.\n"]
        return "\n".join([f"# {self.suite.name}\n", *parts])

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": self.suite.name,
            "folder": str(self.folder),
            "choices": [choice.to_json() for choice in self.choices if choice.tried],
            "tables": [table.to_json() for table in self.tables],
            "selections": [table.to_json() for table in self.selections],
            "federations": [table.to_json() for table in self.federations],
            "failed": [{"title": f.title, "run": f.run, "why": f.why} for f in self.failed],
        }


def run_suite(
    path: Path | str,
    runs: Path | str = "runs",
    workers: int | None = None,
    watch: Watcher | None = None,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> SuiteResult:
    """Run what is left of a suite and make its table.

    `workers` as in `consilium.run`; `only` names the methods to run, and the table shows whatever is finished;
    `seeds` replace the suite's own.
    """
    suite, runs, watcher = load_suite(path, seeds), Path(runs), watch or Nobody()
    mine = _rows_of(suite, only)
    for drawing in missing(suite):
        watcher.say(f"drawing the {drawing.phantom.kind} phantom in {drawing.place}")
        drawing.draw()
    check(suite)
    home = runs / suite.name
    home.mkdir(parents=True, exist_ok=True)
    with _pool(workers) as pool:
        session = _Session(suite, runs, workers, pool, watcher, _count(suite, mine))
        for row in mine:
            for planned in trials(suite, row):
                session.run(planned)
        choices = choose_all(suite, rows(suite), runs, session.gone)
        write_choices(suite, choices, home / "choices.json", session.gone)
        if STATE in names(suite.choose) and any(choice.chosen is None for choice in choices):
            watcher.say(f"'{STATE}' is chosen for all methods at once: that waits until every method has been tried")
        for planned in _finals(suite, [c for c in choices if c.row in mine]):
            session.run(planned)
    standings = _standings(suite, choices, runs)
    tables = () if FEDERATION in suite.grid else suite_tables(suite, standings)
    asked, side_by_side = selection_tables(suite, standings, watcher.say), federation_tables(suite, standings)
    result = SuiteResult(suite, home, tuple(choices), tables, asked, side_by_side, tuple(session.failed))
    write_text(result.to_markdown(), home / "table.md")
    write_json(result.to_json(), home / "table.json")
    return result


def outlook(
    path: Path | str, runs: Path | str = "runs", only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Prospect]:
    """Every run of a suite in its order, and where it stands; nothing is drawn, run or written."""
    suite, runs = load_suite(path, seeds), Path(runs)
    mine = _rows_of(suite, only)
    absent = {drawing.place for drawing in missing(suite)}
    found = [_prospect(suite, planned, runs, absent) for row in mine for planned in trials(suite, row)]
    tried = {prospect.folder for prospect in found}
    every = rows(suite) if STATE in names(suite.choose) else mine
    blind = [
        row
        for row in every
        if federation(suite, row.settings, suite.heading.chosen_on) in absent and trials(suite, row)
    ]
    if blind and every is not mine:  # one choice for all, and not all can be looked at
        blind = [row for row in every if trials(suite, row)]
    seen = choose_all(suite, [row for row in every if row not in blind], runs)
    chosen = [choice for choice in (*(Choice(row, (), None) for row in blind), *seen) if choice.row in mine]
    chosen.sort(key=lambda choice: mine.index(choice.row))
    for planned in _finals(suite, chosen):
        prospect = _prospect(suite, planned, runs, absent)
        if prospect.folder is None or prospect.folder not in tried:
            found.append(prospect)
    unknown = [c.row for c in chosen if c.chosen is None]
    waiting = [Prospect(Planned(row, {}, seed), None, "after choosing") for row, seed in _unchosen(suite, unknown)]
    return found + waiting


def _rows_of(suite: Suite, only: Sequence[str]) -> list[Row]:
    wanted = [ALIASES.get(name, name) for name in only]
    for name in wanted:
        if name not in suite.kinds:
            raise StudyError(f"--only {name}: the suite has no such method; {nearest(name, suite.kinds)}")
    return [row for row in rows(suite) if not wanted or row.method in wanted]


def _finals(suite: Suite, choices: Sequence[Choice]) -> Iterator[Planned]:
    """Seed by seed, so that an interrupted suite has whole tables of fewer seeds."""
    for seed in suite.heading.seeds:
        for choice in choices:
            if choice.chosen is not None:
                yield Planned(choice.row, choice.chosen, seed)


def _unchosen(suite: Suite, mine: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Runs that wait for a choice; that of the choosing seed is one of the trials."""
    for seed in suite.heading.seeds:
        yield from ((row, seed) for row in mine if seed != suite.heading.chosen_on)


def _count(suite: Suite, mine: Sequence[Row]) -> int:
    """All runs of some rows, a trial that becomes a row's run counted once."""
    chosen = [row for row in mine if trials(suite, row)]
    tried = sum(len(trials(suite, row)) for row in chosen)
    return tried + len(list(_unchosen(suite, chosen))) + (len(mine) - len(chosen)) * len(suite.heading.seeds)


def _prospect(suite: Suite, planned: Planned, runs: Path, absent: set[Path]) -> Prospect:
    if federation(suite, planned.row.settings, planned.seed) in absent:
        return Prospect(planned, None, "to do")
    folder = folder_of(study_of(suite, planned), runs)
    begun: State = "interrupted" if (folder / "journal.jsonl").exists() else "to do"
    return Prospect(planned, folder, "done" if finished(folder) else begun)


def _standings(suite: Suite, choices: Sequence[Choice], runs: Path) -> list[Standing]:
    standings = []
    for choice in choices:
        found = {}
        for planned in _finals(suite, [choice]):
            folder = folder_of(study_of(suite, planned), runs)
            if finished(folder):
                found[planned.seed] = read_run(folder)
        standings.append(Standing(choice, found))
    return standings


def _pool(workers: int | None) -> AbstractContextManager[Pool | None]:
    count = default_workers() if workers is None else workers
    return Pool(count) if count else nullcontext()


@dataclass
class _Session:
    """One call of `run_suite`: what was run, and what went wrong."""

    suite: Suite
    runs: Path
    workers: int | None
    pool: Pool | None
    watcher: Watcher
    total: int
    seen: set[str] = field(default_factory=set)  # names of run folders
    failed: list[Failure] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the runs made now

    @property
    def gone(self) -> set[str]:
        return {failure.run for failure in self.failed}

    def run(self, planned: Planned) -> None:
        """Run what is not finished; an exception is this run's, not the suite's."""
        study = study_of(self.suite, planned)
        place = place_of(study, self.runs)
        folder = place.path
        if folder.name in self.seen:
            return
        self.seen.add(folder.name)
        if finished(folder):
            return
        begun = (folder / "journal.jsonl").exists()
        if place.changed:
            self.watcher.say(f"{place.last} is not used, and trained anew in {folder}: {'; '.join(place.changed)}")
        self.watcher.say(
            f"run {len(self.seen)} of {self.total}: {planned.title}{' (going on)' if begun else ''}{self._left()}"
        )
        start = time.monotonic()
        how: dict[str, Any] = {"workers": self.workers, "pool": self.pool, "watch": self.watcher.show}
        try:
            if begun:
                simulation.resume(folder, **how)
            else:
                simulation.run(study, self.runs, again=bool(place.changed), **how)
        except Exception as error:
            known = isinstance(error, (UserError, WorkError))
            self.failed.append(
                Failure(planned.title, folder.name, f"{error}" if known else f"{type(error).__name__}: {error}")
            )
            self.watcher.say(f"{planned.title} failed: {self.failed[-1].why}")
        else:
            self.seconds.append(time.monotonic() - start)

    def _left(self) -> str:
        if not self.seconds:
            return ""
        left = statistics.median(self.seconds) * (self.total - len(self.seen) + 1)
        return f", about {left:.0f} s left" if left < 100 else f", about {left / 60:.0f} min left"
