"""Reading a suite file; every mistake raises StudyError with a remedy."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilium.errors import StudyError
from consilium.fields import fill, nearest
from consilium.method import Method
from consilium.methods import ALIASES, METHODS
from consilium.study_reading import find_method
from consilium.suites.sections import (
    COLUMNS,
    FEDERATION,
    LEAVE_OUT,
    STATE,
    ChooseWhereSection,
    MethodPart,
    PaperTable,
    Phantom,
    RowSection,
    Suite,
    SuiteSection,
)
from consilium.suites.settings import (
    STUDY,
    names,
    read_choices,
    read_lists,
    read_settings,
    refuse_twice,
)

SECTIONS = ("suite", "base", "grid", "row", "choose", "choose_where", "methods", "phantom", "paper")
_ARRAYS = ("row", "choose_where")  # written with two brackets


def load_suite(path: Path | str, seeds: Sequence[int] = ()) -> Suite:
    """Read a suite file; no data are read. Other `seeds` use the choices made on the suite's own."""
    path = Path(path)
    tables = _toml(path, "suite")
    for name, table in tables.items():
        if name == "study":
            raise StudyError(f"{path} is a study, not a suite; give it to `consilium run`.")
        if name not in SECTIONS:
            raise StudyError(f"{path}: there is no section [{name}]; {nearest(name, SECTIONS)}")
        if not isinstance(table, Mapping) and name not in _ARRAYS:
            raise StudyError(f"{path}: '{name}' must be a section: write [{name}] and its keys below it.")
    heading = fill(SuiteSection, tables.get("suite", {}), "suite")
    if seeds:
        heading = replace(heading, seeds=tuple(seeds), choose_seed=heading.chosen_on)
    kinds = _kinds(heading.methods, path.parent)
    base, beside = _base(heading, tables.get("base", {}), path)
    phantom = fill(Phantom, tables["phantom"], "phantom") if "phantom" in tables else None
    if phantom and "federation" in base.get("data", {}):
        raise StudyError(f"{path}: the base names [data] federation and the suite draws one in [phantom]; take one.")
    grid = read_lists(tables.get("grid", {}), "grid", kinds.values())
    if phantom and FEDERATION in grid:
        raise StudyError(f"{path}: [grid] names federations and the suite draws them in [phantom]; take one.")
    suite = Suite(
        path,
        heading,
        kinds,
        base,
        beside,
        grid={FEDERATION: tuple(phantom.federations), **grid} if phantom and phantom.partitions else grid,
        listed=_listed(tables.get("row", []), kinds),
        choose=read_choices(tables.get("choose", {}), "choose", kinds.values()),
        where=_where(tables.get("choose_where", []), kinds),
        parts=_parts(tables.get("methods", {}), kinds),
        phantom=phantom,
        papers=_papers(tables.get("paper", {}), path.parent),
    )
    _check(suite)
    return suite


def _check(suite: Suite) -> None:
    if suite.listed and (combined := [key for key in suite.grid if key not in COLUMNS]):
        raise StudyError(
            f"{suite.path} has [[row]] and '{combined[0]}' in [grid]: either rows are combined or they are written "
            f"out. Beside [[row]] a [grid] may have {', '.join(COLUMNS)}."
        )
    for row in suite.listed:
        for key in sorted(names(row.choose) & {*row.settings, *suite.grid}):
            raise StudyError(f"[[row]] '{row.name}' both has and chooses '{key}': either it is shown or it is chosen.")
    for_all = [suite.choose, *(where.choose for where in suite.where)]
    shown = {("[grid]", key): [*for_all, *(part.choose for part in suite.parts.values())] for key in suite.grid}
    for row in suite.listed:
        own = suite.parts.get(row.method, MethodPart()).choose
        shown |= {("[[row]]", key): [*shown.get(("[[row]]", key), for_all), own] for key in row.settings}
    for (where, key), chosen in shown.items():
        if any(key in names(lists) for lists in chosen):
            raise StudyError(f"'{key}' is in both {where} and [choose]: either it is shown or it is chosen.")
    for lists in (*(part.choose for part in suite.parts.values()), *(where.choose for where in suite.where)):
        if STATE in names(lists):
            raise StudyError(
                f"'{STATE}' is chosen once for all methods, because no table mixes them: write it in [choose]."
            )
    if FEDERATION in suite.grid and LEAVE_OUT in suite.grid:
        raise StudyError("[grid] has both federations and sites left out in turn; make a suite for each federation.")
    for part in suite.where:
        for key, value in part.rows.items():
            listed = [row.settings[key] for row in suite.listed if key in row.settings]
            if value not in (*suite.grid.get(key, ()), *listed):
                raise StudyError(
                    f"[[choose_where]] rows: no row has {key} = {value!r}; take one of [grid]'s or of a [[row]]'s."
                )
    for paper in suite.papers:
        if paper.label not in suite.heading.labels:
            raise StudyError(
                f"[paper] '{paper.caption}' is about label '{paper.label}', which is not in [suite] labels; "
                f"write labels = {[*suite.heading.labels, paper.label]}."
            )
        if paper.metric and paper.metric not in suite.heading.metrics:
            raise StudyError(
                f"[paper] '{paper.caption}' is about score '{paper.metric}', which is not in [suite] metrics; "
                f"write metrics = {[*suite.heading.metrics, paper.metric]}."
            )


# -------------------------------------------------------------------------------------------------- parts


def _toml(path: Path, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not valid TOML: {error}.") from error
    except OSError as error:
        remedy = "`consilium studies` lists ready ones to copy"
        raise StudyError(f"cannot read the {what} {path}: {error.strerror}; {remedy}.") from error
    except UnicodeDecodeError as error:
        raise StudyError(f"cannot read the {what} {path}: it is not text in UTF-8.") from error


def _kinds(names: Sequence[str], beside: Path) -> dict[str, type[Method]]:
    kinds: dict[str, type[Method]] = {}
    for given in names:
        name = ALIASES.get(given, given)
        kind = find_method(name, beside)
        if kind is None:
            raise StudyError(f"[suite] methods: there is no method '{name}'; {nearest(name, METHODS)}")
        if name in kinds:
            raise StudyError(f"[suite] methods: '{given}' is '{name}', which is there already; name it once.")
        kinds[name] = kind
    return kinds


def _base(heading: SuiteSection, inline: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], Path]:
    if heading.base and inline:
        raise StudyError(f"{path}: [suite] base names a file and there are [base] tables too; take one.")
    if not heading.base and not inline:
        raise StudyError(
            f"{path}: [suite] base is required: a study file beside the suite, or write its tables below [base], "
            "for instance [base.local]."
        )
    file = path.parent / heading.base
    tables = _toml(file, "base study") if heading.base else inline
    where = str(file) if heading.base else f"{path}: [base]"
    for name, table in tables.items():
        if name not in STUDY:
            raise StudyError(f"{where} has no section '{name}'; {nearest(name, STUDY)}")
        if not isinstance(table, Mapping):
            raise StudyError(f"{where}: '{name}' must be a section of a study, with keys below it.")
    return tables, file.parent if heading.base else path.parent


def _parts(tables: Mapping[str, Any], kinds: Mapping[str, type[Method]]) -> dict[str, MethodPart]:
    parts = {}
    for given, table in tables.items():
        name = ALIASES.get(given, given)
        if name not in kinds:
            raise StudyError(f"[methods.{given}]: '{given}' is not in [suite] methods; {nearest(given, kinds)}")
        if not isinstance(table, Mapping):
            raise StudyError(
                f'[methods] {given}: write a section [methods.{given}] with keys like "local.lr" below it.'
            )
        rest = {key: value for key, value in table.items() if key != "choose"}
        kind = [kinds[name]]
        parts[name] = MethodPart(
            read_settings(rest, f"methods.{given}", kind),
            read_choices(table.get("choose", {}), f"methods.{given}.choose", kind),
        )
    return parts


def _listed(tables: Any, kinds: Mapping[str, type[Method]]) -> tuple[RowSection, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise StudyError("write [[row]], with two brackets: there may be several.")
    found = []
    for table in tables:
        title, method = table.get("name"), table.get("method")
        if not isinstance(title, str) or not title or not isinstance(method, str):
            raise StudyError('[[row]] needs a `name` for the table and a `method`, for instance "ufps".')
        name = ALIASES.get(method, method)
        if name not in kinds:
            raise StudyError(f"[[row]] '{title}': '{method}' is not in [suite] methods; {nearest(method, kinds)}")
        rest = {key: value for key, value in table.items() if key not in ("name", "method", "choose")}
        settings = read_settings(rest, f"row '{title}'", [kinds[name]])
        choose = read_choices(table.get("choose", {}), f"row '{title}'.choose", [kinds[name]])
        for key in (FEDERATION, LEAVE_OUT):
            if key in settings:
                raise StudyError(f"[[row]] '{title}': '{key}' makes columns; write it in [grid].")
        found.append(RowSection(title, name, settings, choose))
    refuse_twice([row.name for row in found], "[[row]] name")
    return tuple(found)


def _where(tables: Any, kinds: Mapping[str, type[Method]]) -> tuple[ChooseWhereSection, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise StudyError("write [[choose_where]], with two brackets: there may be several.")
    found = []
    for table in tables:
        rest = {key: value for key, value in table.items() if key != "rows"}
        rows = read_settings(table.get("rows", {}), "choose_where.rows", list(kinds.values()))
        if not rows or not rest:
            raise StudyError(
                '[[choose_where]] needs `rows`, for instance {"method.personal" = "apfl"}, and below it what to choose.'
            )
        found.append(ChooseWhereSection(rows, read_choices(rest, "choose_where", kinds.values())))
    return tuple(found)


def _papers(table: Mapping[str, Any], folder: Path) -> tuple[PaperTable, ...]:
    """`[paper]` written out, or the tables it names in a file."""
    if not table:
        return ()
    if "file" not in table:
        return (fill(PaperTable, table, "paper"),)
    named = fill(_PaperFile, table, "paper")
    file = folder / named.file
    tables = _toml(file, "file of the paper's tables")
    for name in named.tables:
        if name not in tables:
            raise StudyError(f"[paper] tables: {file} has no table '{name}'; {nearest(name, tables)}")
        if not isinstance(tables[name], Mapping):
            raise StudyError(f"{file}: '{name}' must be a section: write [{name}] and its keys below it.")
    return tuple(fill(PaperTable, tables[name], f"paper {name}") for name in named.tables)


@dataclass(frozen=True)
class _PaperFile:
    """`[paper]` by reference, so that the quick form and the paper's form share the numbers."""

    file: str
    tables: tuple[str, ...]
