"""Reads the plain data in a pickle without unpickling it: no name in the file is ever looked up or called.

A pickle is a small program for a stack machine. Lists, texts, numbers and dictionaries are built as it says; where it
would call something, the name and the arguments are only written down, and an array of bytes is recognised in them.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_VALUES: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple},
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = {"PROTO", "FRAME", "STOP"}
_MARK = object()


class NotPlain(ValueError):
    """A pickle that holds more than plain data and arrays of bytes, or none at all."""


@dataclass
class Call:
    """What a pickle would have called."""

    name: str  # "numpy ndarray"
    arguments: Any = ()
    state: Any = None


def read_plain(raw: bytes) -> Any:
    """The data in a pickle, calls as `Call`; raises NotPlain for anything else."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            machine.step(opcode.name, argument)
        (result,) = machine.stack
    except (ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
        raise NotPlain(str(error) or type(error).__name__) from None
    return result


def bytes_array(value: Any) -> NDArray[np.uint8]:
    """The array of bytes that a Call would have made, in numpy's old and new ways to pickle one."""
    if isinstance(value, Call) and value.name.endswith("multiarray _reconstruct"):
        _, shape, kind, columns_first, content = value.state
    elif isinstance(value, Call) and value.name.endswith("numeric _frombuffer"):
        content, kind, shape, order = value.arguments
        columns_first = order == "F"
    else:
        raise NotPlain("there is no array")
    if not (isinstance(kind, Call) and kind.name == "numpy dtype" and kind.arguments[0] in ("u1", "|u1")):
        raise NotPlain("the array does not hold bytes")
    raw = _as_bytes(content)
    if columns_first or not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) != len(raw):
        raise NotPlain("the array is not as long as it says")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    raise NotPlain("there are no bytes in the array")


def _called(name: str, arguments: Any) -> Any:
    if name == "_codecs encode" and arguments[1:] == ("latin1",):  # how Python 3 writes bytes for Python 2
        return arguments[0].encode("latin-1")
    return Call(name, arguments)


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _PLAIN:
            stack.append(argument)
        elif name in _VALUES:
            stack.append(_VALUES[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name not in _NOTHING:
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("APPENDS", "APPEND"):
            items = self._since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(items)
        elif name in ("SETITEMS", "SETITEM"):
            items = self._since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(Call(argument))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [Call(f"{stack[-2]} {stack[-1]}")]
        elif name == "REDUCE":
            stack[-2:] = [_called(stack[-2].name, stack[-1])]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        else:
            raise NotPlain(f"it holds {name}")

    def _since_mark(self) -> list[Any]:
        start = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items
