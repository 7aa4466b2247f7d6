"""Allowed values of a message's field, declared beside its type; `fault` says why a value is not allowed."""

from __future__ import annotations

import dataclasses
import re
from typing import (
    Any,
)

import torch


@dataclasses.dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included; NaN is in no range."""

    low: float
    high: float

    def fault(self, value: Any) -> str:
        return (
            "" if self.low <= value <= self.high else f"is {shortened(value)}, not from {self.low:g} to {self.high:g}"
        )


@dataclasses.dataclass(frozen=True)
class Text:
    """Printable text of at most `most` characters that matches `pattern`, if there is one."""

    most: int
    pattern: str = ""

    def fault(self, value: Any) -> str:
        if len(value) > self.most:
            return f"has {len(value)} characters, more than {self.most}"
        if not value.isprintable() or (self.pattern and not re.fullmatch(self.pattern, value)):
            return f"cannot be {shortened(value)}"
        return ""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def fault(self, value: Any) -> str:
        return "" if value in self.words else f"cannot be {shortened(value)}"


@dataclasses.dataclass(frozen=True)
class Items:
    """A maximum number of items of a tuple or a mapping."""

    most: int

    def fault(self, value: Any) -> str:
        return f"has {len(value)} items, more than {self.most}" if len(value) > self.most else ""


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """A tensor of one type with at most `rows` rows of `columns` numbers; without columns, of single numbers."""

    dtype: torch.dtype
    rows: int
    columns: int | None = None

    def fault(self, value: Any) -> str:
        shape = () if self.columns is None else (self.columns,)
        if value.dtype != self.dtype or value.ndim < 1 or tuple(value.shape[1:]) != shape or len(value) > self.rows:
            return f"cannot be {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return ""


def shortened(value: Any) -> str:
    """A value for an error message, shortened so that its sender cannot choose the length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
