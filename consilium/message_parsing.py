"""Builds a message from its JSON shape: every value is checked against the field's type and declared range."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from consilium.errors import UserError
from consilium.ranges import Items, shortened
from consilium.weights import Weights

T = TypeVar("T")
HEADER_BYTES = 1 << 26  # the longest header that is parsed


class PacketError(UserError):
    """A packet is damaged or is not of the type its receiver expects."""

    def __init__(self, why: str) -> None:
        super().__init__(why if len(why) <= 1500 else f"{why[:1500]}…")  # limits what a sender can write into our log


class Parts(Protocol):
    """The source of a message's tensors: a packet, or a store."""

    @property
    def whole(self) -> bool:
        """Whether no field may be missing, because both sides have the same version; a file may be older."""
        ...

    def weights(self, path: str, names: list[str]) -> Weights: ...
    def tensor(self, path: str) -> Tensor: ...


def checked_length(text: str) -> str:
    """A JSON text; PacketError if it is too long to be parsed."""
    if len(text) > HEADER_BYTES:
        raise PacketError(f"a header of {len(text)} characters is too long")
    return text


def joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def field_path(path: str, name: str) -> str:
    """Paths are names joined by "/"; the field `global_` is written `global`, which Python does not allow as a name."""
    return joined(path, name.removesuffix("_"))


def assemble(shape: str, kind: type[T], parts: Parts) -> T:
    """The message of a JSON shape, with its tensors from `parts`."""
    try:
        head = json.loads(checked_length(shape))
        name, tree = head["type"], head["tree"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError("the message's shape is not valid") from error
    if name != kind.__qualname__:
        raise PacketError(f"here is a {str(name)[:60]}, where a {kind.__qualname__} is expected")
    return _build(tree, kind, "", parts)  # type: ignore[no-any-return]


def _build(tree: Any, hint: Any, path: str, reader: Parts) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _declared(tree, args[0], args[1:], path, reader)
    if origin in (Union, types.UnionType):
        if tree is None and type(None) in args:
            return None
        return _build(tree, next(a for a in args if a is not type(None)), path, reader)
    if hint is Weights:
        names = [_check(name, str, path) for name in _check(tree, list, path)]
        if len(set(names)) < len(names):
            raise PacketError(f"'{path}' names a tensor twice")
        return reader.weights(path, names)
    if hint is Tensor:
        if tree != "tensor":
            raise PacketError(f"'{path}' should be a tensor")
        return reader.tensor(path)
    if dataclasses.is_dataclass(hint):
        hints = hints_of(hint)  # type: ignore[arg-type]
        fields = {f.name: f for f in dataclasses.fields(hint)}
        given = _check(tree, dict, path)
        missing = [field for name, field in fields.items() if name not in given]
        lacking = [f for f in missing if reader.whole or f.default is f.default_factory is dataclasses.MISSING]
        if set(given) - set(fields) or lacking:
            found = shortened(sorted(tree))
            raise PacketError(f"'{path or 'message'}' should have the fields {sorted(fields)}, not {found}")
        # in a file of an older version, a field with a default may be missing
        values = {
            name: _build(given[name], hints[name], field_path(path, name), reader) for name in fields if name in given
        }
        return hint(**values)  # type: ignore[operator]
    if origin in (dict, Mapping):
        return {
            _build(key, args[0], path, reader): _build(part, args[1], joined(path, key), reader)
            for key, part in _check(tree, dict, path).items()
        }
    if origin is tuple and Ellipsis not in args:
        if len(_check(tree, list, path)) != len(args):
            raise PacketError(f"'{path}' has {len(tree)} values, where {len(args)} are expected")
        return tuple(_build(part, args[i], joined(path, str(i)), reader) for i, part in enumerate(tree))
    if origin is tuple:
        return tuple(
            _build(part, args[0], joined(path, str(i)), reader) for i, part in enumerate(_check(tree, list, path))
        )
    if hint is float and isinstance(tree, int) and not isinstance(tree, bool):
        return float(tree) if abs(tree) < 2**63 else math.inf
    if hint in (int, float, str, bool):
        return _check(tree, hint, path)
    raise TypeError(f"{path}: messages cannot have a field of type {hint}")


def _declared(tree: Any, hint: Any, rules: tuple[Any, ...], path: str, reader: Parts) -> Any:
    """A value with declared ranges; a list that is too long is rejected before its items are read."""
    for rule in rules:
        if isinstance(rule, Items) and isinstance(tree, (list, dict)) and (fault := rule.fault(tree)):
            raise PacketError(f"'{path}' {fault}")
    value = _build(tree, hint, path, reader)
    for rule in rules:
        if fault := rule.fault(value):
            raise PacketError(f"'{path}' {fault}")
    return value


hints_of = lru_cache(partial(get_type_hints, include_extras=True))  # the same few types are parsed very often


def bare(hint: Any) -> Any:
    """A field's type without its declared range."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _check(tree: Any, kind: type, path: str) -> Any:
    if not isinstance(tree, kind) or (kind is int and isinstance(tree, bool)):
        raise PacketError(f"'{path or 'message'}' should be {kind.__name__}, not {type(tree).__name__}")
    return tree
