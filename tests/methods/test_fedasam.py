"""FedASAM: the gradient at the steepest point nearby, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consilium.errors import StudyError
from consilium.methods.fedasam import FedASAM, sharp_round
from consilium.methods.fedavg import FedAvg
from tests.learning.small import FIRST, batch, line, site, value


def test_a_step_by_hand() -> None:
    """w = 2, x = 1, t = 0: g = 2, T = 2, ε = .5 · 4 · 2 / 4 = 1, so the gradient is taken at 3 and w = 2 − .1 · 3."""
    weights, loss, steps, _ = sharp_round(site(batch([1.0], [0.0])), line(2.0), 0.5, 0.0, FIRST)
    assert value(weights) == pytest.approx(1.7)
    assert (loss, steps) == (pytest.approx(2.0), 1)  # the loss at w: 2² / 2


def test_the_ascent_goes_uphill_on_either_side() -> None:
    """t = 5 lies above: g = −3, ε = −1 (away from 5), the gradient at 1 is −4."""
    assert value(sharp_round(site(batch([1.0], [5.0])), line(2.0), 0.5, 0.0, FIRST)[0]) == pytest.approx(2.4)


def test_the_length_is_over_all_parameters_together() -> None:
    """w = (1, 2), x = (1, 1), t = 0: g = (3, 3), T g = (3, 6), ‖T g‖ = √45; ε = ρ (3, 12) / √45 with ρ = √5 is (1, 4).

    At (2, 6) the slope is 8, so w = (1, 2) − .1 · (8, 8)."""
    here = site(batch([[1.0, 1.0]], [0.0]), inputs=2)
    weights, *_ = sharp_round(here, line(1.0, 2.0), 5**0.5, 0.0, FIRST)
    assert weights["weight"].flatten().tolist() == pytest.approx([0.2, 1.2])


def test_without_radius_it_is_fedavg_bit_by_bit() -> None:
    here = site(batch([1.0, 3.0], [0.5, 1.0]), batch([2.0], [1.0]), optimizer="adam", lr=0.01)
    got = FedAvg.Downlink(line(2.0))
    plain, _ = FedAvg().train(here, FedAvg.Memory(), got, FIRST)
    flat, _ = FedASAM(rho=0.0).train(here, FedASAM.Memory(), got, FIRST)
    assert torch.equal(plain.global_["weight"], flat.global_["weight"])
    assert (plain.loss, plain.steps) == (pytest.approx(flat.loss), flat.steps)


@pytest.mark.parametrize("fields", [{"rho": -0.1}, {"eta": float("nan")}])
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"\[method\]"):
        FedASAM(**fields)
