"""What a site sends to the server declares its range, field by field, in every method of the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin

import pytest
from torch import Tensor

from consilium.message_parsing import hints_of
from consilium.method import message
from consilium.methods import METHODS
from consilium.weights import Weights

CHECKED_BY_SHAPE = (Weights, Tensor)  # `blank` says names, shapes and types, and the intake that all values are finite


def undeclared(hint: Any, path: str) -> Iterator[str]:
    """The paths of numbers and texts that take any value at all; a Boolean has no others."""
    if get_origin(hint) is Annotated:
        for part in get_args(get_args(hint)[0]):
            if part is not Ellipsis:
                yield from undeclared(part, path)
    elif get_args(hint):
        for part in get_args(hint):
            if part is not Ellipsis:
                yield from undeclared(part, path)
    elif is_dataclass(hint) and hint not in CHECKED_BY_SHAPE:
        for name, inner in hints_of(hint).items():
            yield from undeclared(inner, f"{path}.{name}")
    elif hint not in (*CHECKED_BY_SHAPE, bool, type(None)) and not path.endswith(".slots"):  # keys: `blank` names them
        yield path


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_an_uplink_declares_its_range(name: str) -> None:
    assert list(undeclared(METHODS[name].Uplink, name)) == []


def test_a_field_without_a_range_is_found() -> None:
    @message
    class Inner:
        share: float

    @message
    class Uplink:
        inner: Inner
        cases: tuple[int, ...]

    Uplink.__annotations__.update(inner=Inner, cases=tuple[int, ...])
    Inner.__annotations__.update(share=float)
    assert list(undeclared(Uplink, "new")) == ["new.inner.share", "new.cases"]
