"""UFPS's loss weights by uncertainty, as drawn: the shapes of figure S1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from consilium.analysis import schedules
from consilium.analysis.analyse import analyse
from consilium.errors import RunError
from consilium.learning.uncertainty import SCHEDULERS
from consilium.methods.ufps import UFPS


def test_the_curves_are_those_of_the_note() -> None:
    """An even bank from 0 to 1 has μ = .5 and norm(U) = U − .5."""
    found = schedules.of_method(UFPS())
    assert list(found) == list(SCHEDULERS)
    shift, base = found["tail-shift"], found["base-decrement"]
    assert (shift[0.0][0], shift[0.0][-1]) == pytest.approx((2 - math.exp(-0.5), 2 - math.exp(0.5)))
    assert shift[1.0][-1] == pytest.approx(2 - math.exp(0.5 - 1))  # the tail is lifted
    assert shift[1.0][:70] == shift[0.0][:70]  # and nothing else
    assert base[1.0] == pytest.approx([1.0] * schedules.POINTS)  # in the end all count alike
    trip = found["round-trip"]
    assert trip[0.0] == pytest.approx(trip[1.0])  # out and back
    assert max(range(101), key=trip[0.5].__getitem__) > max(range(101), key=trip[0.0].__getitem__)


def test_every_kind_has_a_panel_and_the_runs_own_is_named() -> None:
    drawn = schedules.draw(schedules.of_method(UFPS()), "round-trip")
    assert [axes.get_title(loc="left") or axes.get_title() for axes in drawn.axes] == [
        "tail-shift", "base-decrement", "round-trip (this run)",
    ]  # fmt: skip


def test_other_runs_say_that_they_have_none(finished: Mapping[str, Path]) -> None:
    with pytest.raises(RunError, match="give a run of ufps"):
        analyse([finished["fedavg"]], ["schedules"])
