"""FedProx: (μ/2)‖w − w_g‖² is added to the loss of a site; its gradient is μ (w − w_g)."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.contract import state
from consilium.methods.fedavg import FedAvg
from consilium.methods.fedprox import FedProx
from consilium.simulation import run
from tests.learning.small import FIRST, batch, line, site, value
from tests.toy import toy_study

STEP = batch([1.0], [0.0])  # gradient w


def test_two_steps_by_hand() -> None:
    """w_g = 1, lr .1, μ = 2. At w_g the term has no slope: w = .9. Then .9 − .1·(.9 + 2·(.9 − 1)) = .83."""
    here = site(STEP, STEP)
    uplink, memory = FedProx(mu=2.0).train(here, FedProx.Memory(), FedProx.Downlink(line(1.0)), FIRST)
    assert value(uplink.global_) == pytest.approx(0.83)
    assert memory == FedProx.Memory()


def test_it_is_the_sum_of_squares_not_their_mean() -> None:
    """With three weights the pull on each is still μ (w − w_g), not a third of it."""
    here = site(batch([[1.0, 1.0, 1.0]], [0.0]), batch([[0.0, 0.0, 0.0]], [0.0]), inputs=3)
    uplink, _ = FedProx(mu=2.0).train(here, FedProx.Memory(), FedProx.Downlink(line(1.0, 1.0, 1.0)), FIRST)
    moved = 1 - 0.1 * 3  # the gradient of the first batch is 3 for each weight
    expected = moved - 0.1 * 2 * (moved - 1)
    assert uplink.global_["weight"].tolist() == [pytest.approx([expected] * 3)]


def test_a_strong_pull_keeps_the_site_near() -> None:
    def gone(mu: float) -> float:
        here = site(*[STEP] * 5)
        uplink, _ = FedProx(mu=mu).train(here, FedProx.Memory(), FedProx.Downlink(line(1.0)), FIRST)
        return 1 - value(uplink.global_)

    assert gone(0.0) > gone(1.0) > gone(5.0) > 0


def test_the_loss_told_is_without_the_term() -> None:
    here = site(STEP, STEP)
    told = [
        method.train(here, method.Memory(), method.Downlink(line(1.0)), FIRST)[0].loss
        for method in (FedProx(mu=2.0), FedAvg())
    ]
    assert told[0] == pytest.approx(told[1])  # the second step starts from .9 for both


def test_without_pull_it_is_fedavg_bit_by_bit(federation: Path, tmp_path: Path) -> None:
    changes = {"study__rounds": 2, "local__batch_size": 4}
    prox = run(toy_study(federation, "fedprox", method__mu=0.0, **changes), tmp_path, workers=0)
    plain = run(toy_study(federation, "fedavg", **changes), tmp_path, workers=0)
    assert state(prox) == state(plain)
