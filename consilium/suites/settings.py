"""Settings of a suite: `section.key` of a study with one value, or with a list of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from consilium.data.preprocess import Preprocess
from consilium.errors import StudyError
from consilium.fields import hints, nearest
from consilium.legacy import current_key
from consilium.local_training import Local
from consilium.method import Method
from consilium.methods import METHODS
from consilium.plan import Plan, Source
from consilium.privacy.dp import Privacy

Settings = Mapping[str, Any]  # "local.lr" → value
Lists = Mapping[str, tuple[Any, ...]]  # "local.lr" → the values to take

TOGETHER = "together"  # in [choose]: sets of settings that vary together

STUDY = ("study", "data", "preprocess", "task", "local", "method", "privacy", "release")
_KINDS: dict[str, Any] = {"study": Plan, "data": Source, "preprocess": Preprocess, "local": Local, "privacy": Privacy}
_MADE = {
    "study.seed": "seeds are in [suite] seeds",
    "study.name": "a run is named by its base study and its method",
    "method.name": "methods are in [suite] methods",
    "method.optimizer_state": 'it is "local.optimizer_state" now, of all methods alike',
}


def read_lists(table: Any, where: str, kinds: Iterable[type[Method]]) -> dict[str, tuple[Any, ...]]:
    found = read_settings(table, where, list(kinds))
    for key, values in found.items():
        if not isinstance(values, (list, tuple)) or not values:
            raise StudyError(f'[{where}] "{key}" = {values!r}: it must be a list of the values to take.')
        refuse_twice(values, f'[{where}] "{key}"')
    return {key: tuple(values) for key, values in found.items()}


def read_choices(table: Any, where: str, kinds: Iterable[type[Method]]) -> dict[str, tuple[Any, ...]]:
    """Lists of values, and below `together` sets of settings that vary together."""
    kinds = list(kinds)
    if not isinstance(table, Mapping) or TOGETHER not in table:
        return read_lists(table, where, kinds)
    sets = table[TOGETHER]
    if not isinstance(sets, list) or not sets or not all(isinstance(one, Mapping) and one for one in sets):
        raise StudyError(
            f"[{where}] {TOGETHER} must be a list of sets of settings, "
            'for instance [{"local.epochs" = 1, "study.rounds" = 40}, {"local.epochs" = 2, "study.rounds" = 20}].'
        )
    found = [read_settings(one, f"{where}.{TOGETHER}", kinds) for one in sets]
    refuse_twice(found, f"[{where}] {TOGETHER}")
    for one in found:
        for key in sorted(found[0].keys() ^ one.keys()):
            raise StudyError(
                f"[{where}] {TOGETHER}: '{key}' is in some of the sets and not in others; write it in all."
            )
    lists = read_lists({key: values for key, values in table.items() if key != TOGETHER}, where, kinds)
    for key in sorted(lists.keys() & found[0].keys()):
        raise StudyError(f"[{where}] '{key}' has a list of its own and is in {TOGETHER}; keep one.")
    return {**lists, TOGETHER: tuple(found)}


def names(lists: Lists) -> set[str]:
    """Every chosen setting, also those in `together`."""
    return {name for key, values in lists.items() for name in (values[0] if key == TOGETHER else (key,))}


def read_settings(table: Any, where: str, kinds: Sequence[type[Method]]) -> dict[str, Any]:
    """`section.key` → value, whether it is written "local.lr" = 1 or local.lr = 1."""
    if not isinstance(table, Mapping):
        raise StudyError(f'[{where}]: write it as a section, with keys like "local.lr" below it.')
    found: dict[str, Any] = {}
    for key, value in table.items():
        section, dot, rest = key.partition(".")
        parts = {rest: value} if dot else value
        if section not in STUDY:
            raise StudyError(f"[{where}] '{key}': a study has no section '{section}'; {nearest(section, STUDY)}")
        if not isinstance(parts, Mapping):
            raise StudyError(f"[{where}] '{key}': write section and key, for instance \"local.lr\".")
        for full, part in _leaves(section, parts, kinds):
            _check_key(full, where, kinds)
            if full in found:
                raise StudyError(f"[{where}] '{full}' is written twice; keep one.")
            found[full] = part
    return found


def _leaves(section: str, parts: Mapping[str, Any], kinds: Sequence[type[Method]]) -> Iterator[tuple[str, Any]]:
    """Full names and values; a table of a method's module is taken apart, a field of 0.1 has its name of today."""
    for name, value in parts.items():
        if section == "method" and name not in _names_of(kinds, value):
            name = current_key([method for method, kind in METHODS.items() if kind in kinds], name, value)
        if isinstance(value, Mapping) and section == "method" and _module(kinds, name) is not None:
            yield from ((f"{section}.{name}.{key}", part) for key, part in value.items())
        else:
            yield f"{section}.{name}", value


def _names_of(kinds: Sequence[type[Method]], value: Any) -> set[str]:
    """Fields of the methods that can have such a value: a module is a table."""
    return {
        f.name for kind in kinds for f in fields(kind) if isinstance(value, Mapping) or _module([kind], f.name) is None
    }


def _module(kinds: Sequence[type[Method]], name: str) -> Any:
    """The dataclass of a method's module of that name, or None."""
    found = (hints(kind).get(name) for kind in kinds)
    return next((hint for hint in found if is_dataclass(hint)), None)


def _check_key(key: str, where: str, kinds: Sequence[type[Method]]) -> None:
    """Keys of `[task]` depend on the network and are checked with the studies."""
    if key in _MADE:
        raise StudyError(f"[{where}] '{key}' cannot be set here: {_MADE[key]}.")
    section, _, name = key.partition(".")
    name, _, inner = name.partition(".")
    known: set[str] | None = None
    if section == "method":
        known = {f.name for kind in kinds for f in fields(kind)}
        if not known:
            raise StudyError(f"[{where}] '{key}': no method here has settings of its own.")
        module = _module(kinds, name)
        if inner and module is not None:
            section, name, known = f"method.{name}", inner, {f.name for f in fields(module)}
    elif section in _KINDS:
        known = {f.name for f in fields(_KINDS[section])}
    if known is not None and name not in known:
        owner = "no method here has" if section == "method" and len(kinds) > 1 else f"[{section}] has no"
        raise StudyError(f"[{where}] '{key}': {owner} key '{name}'; {nearest(name, sorted(known))}")


def refuse_twice(values: Iterable[Any], where: str) -> None:
    seen: list[Any] = []
    for value in values:
        if value in seen:
            raise StudyError(f"{where}: {value!r} is there twice; keep one.")
        seen.append(value)
