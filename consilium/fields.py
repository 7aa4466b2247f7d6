"""Reads TOML tables into frozen dataclasses with checks of every key and type, and writes them as TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from consilium.errors import StudyError
from consilium.wording import are

T = TypeVar("T")
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of studies, sites and runs: it becomes a folder, a tensor's path, a certificate


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint with the valid word nearest to an unknown one."""
    valid = list(valid)
    written = {each.lower(): each for each in valid}
    close = difflib.get_close_matches(word.lower(), written, n=1)
    return f"did you mean {written[close[0]]!r}?" if close else f"use one of {', '.join(valid)}."


@cache  # evaluating the annotations took half of the time to read a study
def hints(kind: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of a dataclass's fields."""
    return get_type_hints(kind)


def fill(kind: Callable[..., T], table: Mapping[str, Any], section: str, about: str = "") -> T:
    """A dataclass from a TOML table, with every key and type checked."""
    types_of = hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            choices = sorted([*known, "name"] if about else known)
            raise StudyError(f"[{section}]{about} has no key '{key}'; {nearest(key, choices)}")
        values[key] = _typed(value, types_of[key], f"[{section}] {key}")
    missing = [
        f.name for f in fields(kind)  # type: ignore[arg-type]
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise StudyError(f"[{section}] {', '.join(missing)} {are(len(missing))} required.")
    return kind(**values)


def check_choices(item: Any, section: str, /, **choices: Collection[str]) -> None:
    """Reject a field whose value is not one of its choices (StudyError)."""
    for name, allowed in choices.items():
        if (value := getattr(item, name)) not in allowed:
            raise StudyError(f"[{section}] {name} = {value!r}: it must be one of {', '.join(allowed)}.")


def check_from_zero(item: Any, section: str, *names: str) -> None:
    """Reject fields that are negative, infinite or no numbers (StudyError)."""
    for name in names:
        if not 0 <= (value := getattr(item, name)) < math.inf:
            raise StudyError(f"[{section}] {name} = {value}: it must be a number from 0 up.")


def check_below_one(item: Any, section: str, *names: str) -> None:
    """Reject fields outside [0, 1) (StudyError)."""
    for name in names:
        if not 0 <= (value := getattr(item, name)) < 1:
            raise StudyError(f"[{section}] {name} = {value}: it must be in [0, 1).")


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list",
    dict: "a table",
}


def _typed(value: Any, hint: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return tuple(value) if isinstance(value, list) else value
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _typed(value, option, where)
            except StudyError:
                continue
        raise StudyError(f"{where} = {value!r}: it must be {' or '.join(_WORDS[a] for a in args if a in _WORDS)}.")
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise StudyError(f"{where} = {value!r}: it must be a list, for instance [{to_toml(value)}].")
        if Ellipsis not in args and len(value) != len(args):
            raise StudyError(f"{where} = {value!r}: it must have {len(args)} values.")
        return tuple(_typed(v, args[0] if Ellipsis in args else args[i], where) for i, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise StudyError(f"{where} = {value!r}: it must be a table.")
        return fill(hint, value, where.removeprefix("[").replace("] ", "."))  # type: ignore[arg-type]
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise StudyError(f"{where} = {value!r}: it must be a table.")
        return {str(k): _typed(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise StudyError(f"{where} = {value!r}: it must be {_WORDS.get(hint, hint)}.")
    return value


def plain(item: Any) -> dict[str, Any]:
    """A dataclass's fields as TOML and JSON can hold them."""

    def thawed(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return plain(value)
        if isinstance(value, Mapping):
            return {key: thawed(part) for key, part in value.items()}
        return [thawed(part) for part in value] if isinstance(value, (list, tuple)) else value

    return {f.name: thawed(getattr(item, f.name)) for f in fields(item)}


def to_toml(value: Any) -> str:
    """A value as it is written in a study."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(to_toml(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)
