"""When a returned site is let in again: at once the first time, then with growing pauses."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from consilium.wires.returns import PAUSE, STEADY, may_return

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(seconds: float) -> str:
    return (START + datetime.timedelta(seconds=seconds)).isoformat()


def back(seconds: float, site: str = "bea") -> dict[str, Any]:
    return {"event": "going on", "sites": [site], "time": at(seconds)}


def rounds(count: int, *sites: str) -> list[dict[str, Any]]:
    each = [{"event": "train", "site": site} for site in sites]
    return [*each, {"event": "round"}] * count


@pytest.mark.parametrize(
    ("events", "seconds", "allowed"),
    [
        ([], 0, True),  # the first time, at once
        (rounds(3, "ada"), 1, True),
        ([back(0), *rounds(1, "ada")], 1000, False),  # it did not stay: two rounds and a pause
        ([back(0), *rounds(2, "ada")], PAUSE - 1, False),
        ([back(0), *rounds(2, "ada")], PAUSE, True),
        ([back(0), *rounds(2, "ada"), back(30), *rounds(3, "ada")], 1000, False),
        ([back(0), *rounds(2, "ada"), back(30), *rounds(4, "ada")], 30 + 2 * PAUSE, True),
        ([back(0), *rounds(STEADY, "ada", "bea")], 1, True),  # it stayed: a new return is a first one
        ([back(0, "ada"), *rounds(1, "ada")], 1, True),  # another's pauses are not its own
    ],
)
def test_pauses_grow_with_every_return_that_did_not_last(
    events: list[dict[str, Any]], seconds: float, allowed: bool
) -> None:
    assert may_return(events, "bea", START + datetime.timedelta(seconds=seconds)) is allowed
