"""A study from its TOML file; unknown keys are refused with the nearest valid name."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from consilium.data.preprocess import Preprocess
from consilium.data.site_folder import read_federation
from consilium.errors import StudyError
from consilium.extensions import is_code, load, located
from consilium.fields import fill, nearest
from consilium.legacy import current_study, without_gone
from consilium.local_training import Local
from consilium.method import Method
from consilium.methods import ALIASES, METHODS
from consilium.methods.averaged import Averaged, Release
from consilium.methods.shares import with_aggregation
from consilium.networks import NETWORKS, Network
from consilium.networks.own import own_network
from consilium.plan import Plan, Source
from consilium.privacy.dp import Privacy
from consilium.study import Study, seen_by_network
from consilium.tasks import Facts, TaskFields, default_network
from consilium.validation import check_settings


def load_study(path: Path | str, changes: Sequence[str] = ()) -> Study:
    """Read and check a study file.

    Args:
        path: the TOML file.
        changes: texts such as `"local.lr=0.01"`, as for `consilium run --set`; the value is TOML, else text.

    Returns:
        The study with every default filled in.

    Raises:
        StudyError: the file cannot be read, or a key or value is wrong.
        DataError: the tables of the federation have faults.

    >>> from consilium import load_study
    >>> study = load_study("study.toml", ["study.rounds=1", "method.name=fedsm"])
    >>> study.plan.rounds, study.method_name
    (1, 'fedsm')
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "`consilium studies` lists ready ones to copy, `consilium init` writes a first one"
        raise StudyError(f"cannot read the study {path}: {error.strerror}; {remedy}.") from error
    except UnicodeDecodeError as error:
        raise StudyError(f"cannot read the study {path}: it is not text in UTF-8.") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not valid TOML: {error}.") from error
    for change in changes:
        _apply(tables, change)
    return make_study(tables, path.parent)


def make_study(tables: Mapping[str, Any], beside: Path | None = None) -> Study:
    """A study from TOML tables; a relative federation is looked for here, then beside the study file."""
    sections = ("study", "data", "preprocess", "task", "local", "method", "privacy", "facts", "release", "code")
    for section, table in tables.items():
        if section == "suite":
            raise StudyError("this is a suite, not a study; give it to `consilium suite`.")
        if section not in sections:
            raise StudyError(f"there is no section [{section}]{_hint(section, sections)}")
        if not isinstance(table, Mapping):
            raise StudyError(f"'{section}' must be a section: write [{section}] and its keys below it.")
    written = current_study(tables)
    tables, code = located(written, beside)
    if "facts" in tables:  # a run's own study, and an administrator's, can be read where the data are not
        data = fill(Source, {"federation": "", **tables.get("data", {})}, "data")
    else:
        data = _located(fill(Source, tables.get("data", {}), "data"), beside)
    facts = fill(Facts, tables["facts"], "facts") if "facts" in tables else _facts(data)
    name, method = _method(tables.get("method", {}))
    name = written["method"]["name"] if is_code(name) else name
    preprocess = fill(Preprocess, _oriented(tables, facts), "preprocess")
    task_fields, network = _task(tables.get("task", {}), seen_by_network(facts, preprocess))
    if task_fields.initial and "facts" not in tables:
        task_fields = replace(task_fields, initial=_found(task_fields.initial, beside))
    local = _local(tables.get("local", {}), name, method)
    plan = fill(Plan, _spelled_out(tables.get("study", {})), "study")
    privacy = fill(Privacy, tables.get("privacy", {}), "privacy")
    release = fill(Release, tables.get("release", {}), "release")
    study = Study(plan, data, preprocess, task_fields, network, local, name, method, facts, release, privacy, code)
    check_settings(study)
    method = with_aggregation(name, method, plan.aggregation)
    return replace(study, method=Averaged(method, release) if release.swa_from else method)


def _spelled_out(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """`firewall = "refuse"` is `firewall = {mode = "refuse"}`, and `aggregation = "krum"` is `{rule = "krum"}`."""
    short = {"firewall": "mode", "aggregation": "rule"}
    words = {key: {first: table[key]} for key, first in short.items() if isinstance(table.get(key), str)}
    return without_gone({**table, **words})


def _oriented(tables: Mapping[str, Any], facts: Facts) -> Mapping[str, Any]:
    """[preprocess] with the orientation that a missing key means.

    Pictures are used as they are stored. So are the volumes of a run of 0.1, which had no such key: a run's own study
    (it has [facts]) is complete, so only those lack it.
    """
    table = tables.get("preprocess", {})
    if facts.dimensions == 2 and table.get("orientation"):
        raise StudyError(
            f"[preprocess] orientation = {table['orientation']!r} is for volumes; leave it out for pictures."
        )
    as_stored = facts.dimensions == 2 or "facts" in tables
    return {"orientation": "", **table} if as_stored else table


def _located(data: Source, beside: Path | None) -> Source:
    for folder in (Path.cwd(), beside):
        if folder is not None and (folder / data.federation).is_dir():
            return replace(data, federation=str((folder / data.federation).resolve()))
    raise StudyError(
        f"[data] federation = {data.federation!r}: there is no such folder here"
        f"{f' or beside the study in {beside}' if beside and beside.name else ''}. Name yours, or make one: "
        f"`consilium import` takes published data, `consilium phantom retina --to {data.federation}` draws "
        "photographs; without data, write [facts]."
    )


def _found(initial: str, beside: Path | None) -> str:
    """The whole path of the weights to start from, looked for here, then beside the study."""
    for folder in (Path.cwd(), beside):
        if folder is not None and (folder / initial).exists():
            return str((folder / initial).resolve())
    raise StudyError(f"[task] initial = {initial!r}: there is no such run or file here or beside the study.")


def _facts(data: Source) -> Facts:
    federation = read_federation(Path(data.federation))
    return Facts(**{f.name: getattr(federation, f.name) for f in fields(Facts)})


def _method(table: Mapping[str, Any]) -> tuple[str, Method]:
    table = dict(table)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise StudyError(f"[method] name is required; choose from {', '.join(METHODS)}.")
    name = ALIASES.get(name, name)
    kind: Any = _own_method(name) if is_code(name) else METHODS.get(name)
    if kind is None:
        raise StudyError(f"[method] name = '{name}': there is no such method{_hint(name, METHODS)}")
    return name, fill(kind, table, "method", about=f" of {name}")


def _local(table: Mapping[str, Any], name: str, method: Method) -> Local:
    """`[local]`; a method that fixes the optimiser's state has it its way, unless the study asks for the other."""
    local = fill(Local, table, "local")
    fixed = method.optimizer_state
    if not fixed or local.optimizer_state == fixed:
        return local
    if "optimizer_state" in table:
        raise StudyError(
            f"[local] optimizer_state = '{local.optimizer_state}': method '{name}' fixes it to '{fixed}', as its paper "
            f"does; write '{fixed}', or leave the key out."
        )
    return replace(local, optimizer_state=fixed)


def _task(table: Mapping[str, Any], facts: Facts) -> tuple[TaskFields, Network]:
    own = {f.name for f in fields(TaskFields)}
    name = table.get("network") or default_network(facts)
    kind: Any = own_network(load(name, "task"), name) if is_code(name) else NETWORKS.get(name)
    if kind is None:
        raise StudyError(f"[task] network = '{name}': there is no such network{_hint(str(name), NETWORKS)}")
    rest = {key: value for key, value in table.items() if key not in own}
    known = [*own, *(f.name for f in fields(kind))]
    for key in rest:
        if key not in known:
            raise StudyError(f"[task] has no key '{key}'{_hint(key, known)}")
    task = fill(
        TaskFields, {"network": name, **{k: v for k, v in table.items() if k in own and k != "network"}}, "task"
    )
    return task, fill(kind, rest, "task")


def find_method(name: str, beside: Path | None = None) -> type[Method] | None:
    """The class of a method: the project's own, or a user's `file.py:Name` (here or in `beside`), or None."""
    full = located({"method": {"name": name}}, beside)[0]["method"]["name"]
    return _own_method(full) if is_code(full) else METHODS.get(name)


def _own_method(name: str) -> Any:
    found = load(name, "method")
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise StudyError(f"{name} is not a method: it must be a dataclass derived from consilium.method.Method.")
    for own in fields(found):
        if callable(getattr(Method, own.name, None)):
            raise StudyError(f"{name}: the field '{own.name}' hides the function of that name; rename it.")
    return found


def _hint(word: str, valid: Iterable[str]) -> str:
    return f"; {nearest(word, sorted(valid))}"


def _apply(tables: dict[str, Any], change: str) -> None:
    """One `--set section.key=value`; values are TOML, else text."""
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise StudyError(f"--set {change}: write it as section.key=value, for instance --set local.lr=0.01.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
        if value.startswith(("[", "{")):
            raise StudyError(f'--set {change}: texts inside need quotes, for instance \'{key}=["a", "b"]\'.') from None
    table = tables
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise StudyError(f"--set {change}: '{part}' is not a section.")
    table[path[-1]] = value
