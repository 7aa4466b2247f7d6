"""The runs of a suite in a fixed order, and the study of each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from consilium.errors import StudyError
from consilium.fields import nearest
from consilium.inputs import place_of
from consilium.legacy import current_study
from consilium.methods import ALIASES
from consilium.reports.grouping import NAMES
from consilium.scores.means import MEAN
from consilium.study import Study
from consilium.study_reading import make_study
from consilium.suites.drawing import federation
from consilium.suites.sections import COLUMNS, LEAVE_OUT, STATE, MethodPart, Suite
from consilium.suites.settings import TOGETHER, Lists, Settings


@dataclass(frozen=True)
class SuiteRow:
    """A row of the table: a method with one combination of the grid, or with the settings of a `[[row]]`."""

    method: str
    settings: Settings
    title: str = ""  # of a `[[row]]`

    @property
    def name(self) -> str:
        title = self.title or NAMES.get(self.method, self.method)
        shown = {key: value for key, value in self.settings.items() if not self.title or key in COLUMNS}
        return f"{title} ({settings_text(shown)})" if shown else title


@dataclass(frozen=True)
class Planned:
    """One run: a row with one candidate of what is chosen, at one seed."""

    row: SuiteRow
    chosen: Settings
    seed: int
    trial: bool = False  # made in order to choose

    @property
    def title(self) -> str:
        what = (
            f", trying {settings_text(self.chosen)}"
            if self.trial
            else f" with {settings_text(self.chosen)}"
            if self.chosen
            else ""
        )
        return f"{self.row.name}, seed {self.seed}{what}"


def settings_text(settings: Settings) -> str:
    """`lr 0.01, pull 0.7`; the section too where a key alone would be ambiguous."""
    short = [key.partition(".")[2] for key in settings]
    names = [name if short.count(name) == 1 else key for name, key in zip(short, settings, strict=True)]
    return ", ".join(f"{name} {_value(value)}" for name, value in zip(names, settings.values(), strict=True))


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(_value(part) for part in value) or "none"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_value(part)}" for name, part in value.items()) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def without(row: SuiteRow, key: str) -> SuiteRow:
    """The row without one key, whose values are the columns of a table."""
    return replace(row, settings={name: value for name, value in row.settings.items() if name != key})


# -------------------------------------------------------------------------------------------------- what to run


def rows(suite: Suite) -> list[SuiteRow]:
    """Methods in the order of the file, each with its `[[row]]`s in every column, or its combinations of the grid."""
    found = []
    for name in suite.kinds:
        combined = _combinations(_axes(suite, name, suite.grid))
        own = [row for row in suite.listed if row.method == name]
        found += [SuiteRow(name, {**row.settings, **column}, row.name) for row in own for column in combined]
        found += [] if own else [SuiteRow(name, settings) for settings in combined]
    return found


def candidates(suite: Suite, row: SuiteRow) -> list[Settings]:
    """The candidates of a row; a single candidate needs no trial."""
    besides = [where.choose for where in suite.where if where.rows.items() <= dict(row.settings).items()]
    besides += [own.choose for own in suite.listed if own.name == row.title]
    axes = _axes(suite, row.method, suite.choose)
    for more in (_part(suite, row.method).choose, *besides):
        own = _axes(suite, row.method, more)
        named = {key for axis in own for key in axis[0]}
        axes = [axis for axis in axes if not axis[0].keys() & named] + own
    return _combinations(axes)


def trials(suite: Suite, row: SuiteRow) -> list[Planned]:
    found = candidates(suite, row)
    return [Planned(row, chosen, suite.heading.chosen_on, trial=True) for chosen in found] if len(found) > 1 else []


def reference(suite: Suite) -> SuiteRow:
    """The row the others are compared with: FedAvg if the suite names none."""
    wanted, found = suite.heading.reference, rows(suite)
    if not wanted:
        return next((row for row in found if row.method == "fedavg"), found[0])
    wanted = {"method": wanted} if isinstance(wanted, str) else wanted
    if not isinstance(wanted, Mapping) or not isinstance(wanted.get("method"), str):
        raise StudyError('[suite] reference: write a method, or {method = "fedsm", "method.pull" = 0.7}.')
    method = ALIASES.get(wanted["method"], wanted["method"])
    settings = {key: value for key, value in wanted.items() if key != "method"}
    for row in found:
        if row.method == method and settings.items() <= dict(row.settings).items():
            return row
    raise StudyError(
        f"[suite] reference = {wanted}: there is no such row; the rows are {', '.join(r.name for r in found)}."
    )


def _part(suite: Suite, method: str) -> MethodPart:
    return suite.parts.get(method, MethodPart())


Axis = list[dict[str, Any]]  # of which one is taken


def _axes(suite: Suite, method: str, lists: Lists) -> list[Axis]:
    """The varied settings of a method: keys that it has and that `[methods.<name>]` does not fix."""
    kind = suite.kinds[method]
    has = {f.name for f in fields(kind)}
    fixed = {**_part(suite, method).fixed, **({STATE: kind.optimizer_state} if kind.optimizer_state else {})}
    axes = []
    for key, values in lists.items():
        sets = list(values) if key == TOGETHER else [{key: value} for value in values]
        both = sorted(fixed.keys() & sets[0].keys())
        if both and key == TOGETHER:
            raise StudyError(
                f"[methods.{method}] fixes '{both[0]}', which is chosen `{TOGETHER}` with other settings; "
                f"take it out of one, or give the method a `{TOGETHER}` of its own in [methods.{method}.choose]."
            )
        axis = [{k: v for k, v in one.items() if _applies(k, has)} for one in sets]
        if axis[0] and not both:
            axes.append([one for number, one in enumerate(axis) if one not in axis[:number]])
    return axes


def _applies(key: str, has: Collection[str]) -> bool:
    """Whether a method with these fields has a setting: of [method] its own, of other sections all."""
    section, name, *_ = key.split(".")
    return section != "method" or name in has


def _combinations(axes: list[Axis]) -> list[Settings]:
    return [dict(itertools.chain(*(one.items() for one in chosen))) for chosen in itertools.product(*axes)]


# -------------------------------------------------------------------------------------------------- studies


def study_of(suite: Suite, planned: Planned) -> Study:
    """The study of a run; its name does not hold the suite's, so suites with the same base share runs."""
    tables = {section: dict(table) for section, table in current_study(suite.base).items()}
    method, row = planned.row.method, planned.row
    own = tables.get("method", {})  # [method] of the base counts for the method it names
    about = ALIASES.get(str(own.get("name")), own.get("name"))
    tables["method"] = {**(own if about == method else {}), "name": method}
    settings = {**_part(suite, method).fixed, **row.settings, **planned.chosen}
    for key, value in settings.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:  # copies: the base is every run's
            table[section] = dict(table.get(section, {}))
            table = table[section]
        table[name] = value
    if suite.kinds[method].optimizer_state and STATE not in settings:  # the base decides for methods that do not fix it
        tables["local"] = {key: value for key, value in tables.get("local", {}).items() if key != "optimizer_state"}
    if LEAVE_OUT in settings:  # the base names all sites, in the table's order
        named = tables["study"].get("sites", ())
        tables["study"]["sites"] = [site for site in named if site not in settings[LEAVE_OUT]]
    title = str(tables.get("study", {}).get("name", ""))
    name = f"{title}-{method.replace('.py:', '-').replace(':', '-')}" if title else ""
    tables["study"] = {**tables.get("study", {}), "name": name, "seed": planned.seed}
    place = federation(suite, row.settings, planned.seed)
    if place is not None:
        tables["data"] = {**tables.get("data", {}), "federation": str(place)}
    return make_study(tables, suite.beside)


def check(suite: Suite) -> None:
    """Build every study of the suite before the first runs, so that an error costs no training."""
    reference(suite)
    states: dict[
        frozenset[str], SuiteRow
    ] = {}  # optimiser states that rows may have; the grid's have tables of their own
    scores: dict[str, None] = {}  # that some row can have
    for row in rows(suite):
        tried = set()
        for chosen in candidates(suite, row):
            study = study_of(suite, Planned(row, chosen, suite.heading.chosen_on))
            tried.add(study.local.optimizer_state)
            scores |= dict.fromkeys(study.metrics)
            _check_tests(suite, study)
            known = (*study.facts.labels, MEAN)
            for label in suite.heading.labels:
                if label not in known:
                    raise StudyError(f"[suite] labels: the federation has no label '{label}'; {nearest(label, known)}")
        if not suite.kinds[row.method].optimizer_state:
            states.setdefault(frozenset() if STATE in row.settings else frozenset(tried), row)
    for metric in suite.heading.metrics:
        if metric not in scores:
            raise StudyError(f"[suite] metrics: the task has no score '{metric}'; {nearest(metric, scores)}")
    if len(states) > 1:
        names = " and ".join(f"'{row.name}'" for row in states.values())
        raise StudyError(
            f"{names} do not have the same {STATE}, and no table mixes them: write it in [base.local] for all methods, "
            "in [choose] to choose it once for all, or in [grid] for a table of each."
        )


def _check_tests(suite: Suite, study: Study) -> None:
    """Reject a study that scores test cases in fewer rounds than the suite's tables need."""
    tests, last = study.plan.test_rounds, (suite.heading.last_rounds - 1) * study.plan.score_every + 1
    if tests and suite.heading.oscillation:
        raise StudyError(
            f"[study] test_rounds = {tests}: [suite] oscillation needs test scores of all rounds; write 0."
        )
    if tests and suite.heading.last_rounds and tests < last:
        raise StudyError(
            f"[study] test_rounds = {tests}: [suite] last_rounds = {suite.heading.last_rounds} needs test scores of "
            f"the last {last} rounds; write {last} or more, or 0 for all."
        )


def folder_of(study: Study, runs: Path) -> Path:
    """The run folder of a study; a run with other data or plug-in files than the current ones does not count."""
    return place_of(study, runs).path


def finished(folder: Path) -> bool:
    return (folder / "summary.json").exists()
