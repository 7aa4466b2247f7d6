"""Runs a suite: skips finished runs, resumes interrupted ones, and continues after a failed run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from consilium import simulation
from consilium.dry_run import time_text
from consilium.errors import StudyError, UserError, WorkError
from consilium.fields import nearest
from consilium.files import write_json, write_text
from consilium.inputs import place_of
from consilium.machine import default_workers
from consilium.methods import ALIASES
from consilium.reports.costs import CostTable, cost_of
from consilium.reports.reading import read_run
from consilium.reports.style import to_bytes
from consilium.suites.audits import AuditTable, audit_tables
from consilium.suites.choosing import SettingsChoice, choose_all, failed_before, write_choices
from consilium.suites.drawing import federation, missing
from consilium.suites.entries import RowRuns
from consilium.suites.estimating import SuiteClock, called, estimate
from consilium.suites.federations import FederationTable, federation_tables
from consilium.suites.oscillation import OscillationTable, oscillation_table
from consilium.suites.planning import Planned, SuiteRow, check, finished, folder_of, reference, rows, study_of, trials
from consilium.suites.reading import load_suite
from consilium.suites.sections import FEDERATION, STATE, Suite
from consilium.suites.settings import names
from consilium.suites.tables import SuiteTable, suite_tables
from consilium.suites.unseen import SelectionTable, selection_tables
from consilium.wires.processes import Pool

State = Literal["done", "interrupted", "to do", "after choosing"]


class SuiteWatcher(Protocol):
    def say(self, text: str) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...


class SilentWatcher:
    """A watcher that does nothing."""

    def say(self, text: str) -> None: ...
    def show(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Failure:
    """A run that did not finish."""

    title: str
    run: str  # the name of its folder
    why: str


@dataclass(frozen=True)
class SuiteRun:
    """A run of the suite and its state."""

    planned: Planned
    folder: Path | None  # None: it depends on an open choice, or on data that are not drawn yet
    state: State

    @property
    def title(self) -> str:
        return self.planned.title + (" with what is chosen" if self.state == "after choosing" else "")


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite."""

    suite: Suite
    folder: Path  # of choices.json, table.md and table.json
    choices: tuple[SettingsChoice, ...]
    tables: tuple[SuiteTable, ...]  # one per label; none before the first run is finished
    selections: tuple[SelectionTable, ...]  # the selector's choices, where sites are left out in turn
    federations: tuple[FederationTable, ...]  # in place of `tables` where the grid is over federations
    failed: tuple[Failure, ...]
    costs: CostTable = field(default_factory=lambda: CostTable(()))
    audits: tuple[AuditTable, ...] = ()  # where the suite asks for audits: one per row
    oscillation: OscillationTable | None = None

    @property
    def shown(
        self,
    ) -> tuple[SuiteTable | SelectionTable | FederationTable | AuditTable | OscillationTable | CostTable, ...]:
        """All tables in the order of a page."""
        waves = (self.oscillation,) if self.oscillation else ()
        costs = (self.costs,) if self.costs.costs else ()
        return (*self.tables, *self.selections, *self.federations, *self.audits, *waves, *costs)

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
            "costs": self.costs.to_json(),
            "audits": [table.to_json() for table in self.audits],
            **({"oscillation": self.oscillation.to_json()} if self.oscillation else {}),
            "failed": [{"title": f.title, "run": f.run, "why": f.why} for f in self.failed],
        }


def run_suite(
    path: Path | str,
    runs: Path | str = "runs",
    workers: int | None = None,
    watch: SuiteWatcher | None = None,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    estimated: bool = False,
) -> SuiteResult:
    """Run what is left of a suite and make its table.

    `workers` is that of `consilium.run`. `only` names the methods to run; the table shows all finished rows. `seeds`
    replace the suite's own. `estimated` times a few steps first and says how long all will take.
    """
    suite, runs, watcher = load_suite(path, seeds), Path(runs), watch or SilentWatcher()
    mine = _rows_of(suite, only)
    for drawing in missing(suite):
        watcher.say(f"drawing the {drawing.phantom.kind} phantom in {drawing.place}")
        drawing.draw()
    check(suite)
    home = runs / suite.name
    home.mkdir(parents=True, exist_ok=True)
    chosen = home / "choices.json"  # written at once, so that the folder is known as a suite's
    gone = failed_before(chosen)
    write_choices(suite, choose_all(suite, rows(suite), runs, gone), chosen, gone)
    clock = SuiteClock()
    if estimated:
        to_do = [found.planned for found in outlook(path, runs, only, seeds) if found.state != "done"]
        clock = estimate(suite, to_do, workers, watcher.say)
    with _pool(workers) as pool:
        session = _Session(suite, runs, workers, pool, watcher, _count(suite, mine), clock)
        for row in mine:
            for planned in trials(suite, row):
                session.run(planned)
        gone = session.gone | (failed_before(chosen) - session.seen)  # of rows that `only` leaves out
        choices = choose_all(suite, rows(suite), runs, gone)
        write_choices(suite, choices, chosen, gone)
        if STATE in names(suite.choose) and any(choice.chosen is None for choice in choices):
            watcher.say(f"'{STATE}' is chosen for all methods at once: that waits until every method has been tried")
        for planned in _finals(suite, [c for c in choices if c.row in mine]):
            session.run(planned)
    standings = _standings(suite, choices, runs)
    tables = () if FEDERATION in suite.grid else suite_tables(suite, standings)
    asked, side_by_side = selection_tables(suite, standings, watcher.say), federation_tables(suite, standings)
    costs = CostTable(
        tuple(cost_of(standing.name, list(standing.runs.values())) for standing in standings if standing.runs),
        reference(suite).name,
    )
    audits = audit_tables(suite, standings, home, watcher.say)
    waves = oscillation_table(standings) if suite.heading.oscillation else None
    failed = tuple(session.failed)
    result = SuiteResult(suite, home, tuple(choices), tables, asked, side_by_side, failed, costs, audits, waves)
    if waves and waves.rows:
        (home / "oscillation.svg").write_bytes(to_bytes(waves.figure(), "svg"))
        (home / "oscillation.png").write_bytes(to_bytes(waves.figure(), "png"))
    write_text(result.to_markdown(), home / "table.md")
    write_json(result.to_json(), home / "table.json")
    return result


def outlook(
    path: Path | str, runs: Path | str = "runs", only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[SuiteRun]:
    """Every run of a suite in its order, with its state; nothing is drawn, run or written."""
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
    if blind and every is not mine:  # one choice for all rows, and some runs cannot be read
        blind = [row for row in every if trials(suite, row)]
    seen = choose_all(suite, [row for row in every if row not in blind], runs)
    chosen = [choice for choice in (*(SettingsChoice(row, (), None) for row in blind), *seen) if choice.row in mine]
    chosen.sort(key=lambda choice: mine.index(choice.row))
    for planned in _finals(suite, chosen):
        prospect = _prospect(suite, planned, runs, absent)
        if prospect.folder is None or prospect.folder not in tried:
            found.append(prospect)
    unknown = [c.row for c in chosen if c.chosen is None]
    waiting = [SuiteRun(Planned(row, {}, seed), None, "after choosing") for row, seed in _unchosen(suite, unknown)]
    return found + waiting


def _rows_of(suite: Suite, only: Sequence[str]) -> list[SuiteRow]:
    wanted = [ALIASES.get(name, name) for name in only]
    for name in wanted:
        if name not in suite.kinds:
            raise StudyError(f"--only {name}: the suite has no such method; {nearest(name, suite.kinds)}")
    return [row for row in rows(suite) if not wanted or row.method in wanted]


def _finals(suite: Suite, choices: Sequence[SettingsChoice]) -> Iterator[Planned]:
    """The final runs by seed, so that an interrupted suite has complete tables of fewer seeds."""
    for seed in suite.heading.seeds:
        for choice in choices:
            if choice.chosen is not None:
                yield Planned(choice.row, choice.chosen, seed)


def _unchosen(suite: Suite, mine: Sequence[SuiteRow]) -> Iterator[tuple[SuiteRow, int]]:
    """Runs that wait for a choice; that of the choosing seed is one of the trials."""
    for seed in suite.heading.seeds:
        yield from ((row, seed) for row in mine if seed != suite.heading.chosen_on)


def _count(suite: Suite, mine: Sequence[SuiteRow]) -> int:
    """All runs of some rows, a trial that becomes a row's run counted once."""
    chosen = [row for row in mine if trials(suite, row)]
    tried = sum(len(trials(suite, row)) for row in chosen)
    return tried + len(list(_unchosen(suite, chosen))) + (len(mine) - len(chosen)) * len(suite.heading.seeds)


def _prospect(suite: Suite, planned: Planned, runs: Path, absent: set[Path]) -> SuiteRun:
    if federation(suite, planned.row.settings, planned.seed) in absent:
        return SuiteRun(planned, None, "to do")
    folder = folder_of(study_of(suite, planned), runs)
    begun: State = "interrupted" if (folder / "journal.jsonl").exists() else "to do"
    return SuiteRun(planned, folder, "done" if finished(folder) else begun)


def _standings(suite: Suite, choices: Sequence[SettingsChoice], runs: Path) -> list[RowRuns]:
    standings = []
    for choice in choices:
        found = {}
        for planned in _finals(suite, [choice]):
            folder = folder_of(study_of(suite, planned), runs)
            if finished(folder):
                found[planned.seed] = read_run(folder)
        standings.append(RowRuns(choice, found))
    return standings


def _pool(workers: int | None) -> AbstractContextManager[Pool | None]:
    count = default_workers() if workers is None else workers
    return Pool(count) if count else nullcontext()


@dataclass
class _Session:
    """One call of `run_suite`: its runs and failures."""

    suite: Suite
    runs: Path
    workers: int | None
    pool: Pool | None
    watcher: SuiteWatcher
    total: int
    clock: SuiteClock = field(default_factory=SuiteClock)
    seen: set[str] = field(default_factory=set)  # names of run folders
    failed: list[Failure] = field(default_factory=list)

    @property
    def gone(self) -> set[str]:
        return {failure.run for failure in self.failed}

    def run(self, planned: Planned) -> None:
        """Run a study that is not finished; an exception ends this run, not the suite."""
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
            self.clock.expected.pop(called(planned), None)  # it tells nothing of the others
        else:
            self.clock.made(called(planned), time.monotonic() - start)

    def _left(self) -> str:
        if self.clock.expected:
            left = self.clock.left()
        elif self.clock.over:
            left = statistics.median(self.clock.over.values()) * (self.total - len(self.seen) + 1)
        else:
            return ""
        return f", about {time_text(left)} left"
