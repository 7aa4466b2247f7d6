"""Per-FedAvg: the meta-gradient (I − α ∇²f) ∇f(w − α ∇f(w)), first-order and Hessian-free."""

from __future__ import annotations

from typing import Any

import pytest

from consilium.errors import StudyError
from consilium.learning.gradients import GradientNetwork
from consilium.methods.per_fedavg import PerFedAvg, meta_adapted, meta_gradient, meta_round
from consilium.site import Round
from tests.learning.small import FIRST, batch, line, site, value

ADAPT = Round(4, "adapt", 0, 1)


def gradient(how: PerFedAvg, *batches: Any) -> float:
    here = site(*batches)
    found, _ = meta_gradient(GradientNetwork(here, line(2.0)), list(batches), how)
    return float(found["weight"])


def test_the_first_order_gradient_by_hand() -> None:
    """w = 2, α = .1. D: x = 1, t = 0, so ∇f = 2 and w̃ = 1.8. D': x = 2, t = 1, so ∇f(w̃) = 2·(3.6 − 1) = 5.2."""
    how = PerFedAvg(inner_lr=0.1)
    assert gradient(how, batch([1.0], [0.0]), batch([2.0], [1.0])) == pytest.approx(5.2)


def test_the_hessian_free_gradient_by_hand() -> None:
    """The second-order term: D'' has x = 3, so ∇²f = 9 and the meta-gradient is (1 − .1·9)·5.2 = .52."""
    how = PerFedAvg(inner_lr=0.1, hessian="free")
    found = gradient(how, batch([1.0], [0.0]), batch([2.0], [1.0]), batch([3.0], [0.0]))
    assert found == pytest.approx(0.52, abs=5e-3)


def test_clipping_leaves_the_curvature_alone() -> None:
    """As above with clip = 1: ∇f(w̃) is clipped to 1, and ∇²f = 9 of D'' is not: (1 − .1·9) · 1 = .1.

    Of two gradients with the same length, the difference would be 0 and the meta-gradient 1.
    """
    batches = [batch([1.0], [0.0]), batch([2.0], [1.0]), batch([3.0], [0.0])]
    here = site(*batches, clip=1.0)
    how = PerFedAvg(inner_lr=0.1, hessian="free")
    found, _ = meta_gradient(GradientNetwork(here, line(2.0)), batches, how)
    assert float(found["weight"]) == pytest.approx(0.1, abs=5e-3)


def test_a_pass_makes_one_meta_step_per_two_or_three_batches() -> None:
    six = [batch([1.0 + i], [0.0]) for i in range(6)]
    assert meta_round(site(*six), line(1.0), PerFedAvg(), FIRST)[2] == 3
    assert meta_round(site(*six), line(1.0), PerFedAvg(hessian="free"), FIRST)[2] == 2
    assert meta_round(site(six[0]), line(1.0), PerFedAvg(), FIRST)[2] == 1


def test_the_meta_gradient_goes_through_the_studys_optimiser() -> None:
    """β = [local] lr = .1: w = 2 − .1 · 5.2."""
    here = site(batch([1.0], [0.0]), batch([2.0], [1.0]))
    weights, loss, *_ = meta_round(here, line(2.0), PerFedAvg(inner_lr=0.1), FIRST)
    assert value(weights) == pytest.approx(1.48)
    assert loss == pytest.approx(2.6**2 / 2)


def test_adaptation_is_a_plain_step_on_training_cases_and_stays_at_the_site() -> None:
    here = site(batch([1.0], [0.0]), batch([1.0], [0.0]))
    assert value(meta_adapted(here, line(2.0), 0.1, 1, ADAPT)) == pytest.approx(1.8)
    assert value(meta_adapted(here, line(2.0), 0.1, 2, ADAPT)) == pytest.approx(1.62)
    uplink, memory = PerFedAvg(inner_lr=0.1).train(here, PerFedAvg.Memory(None), PerFedAvg.Downlink(line(2.0)), ADAPT)
    assert uplink.global_ is None
    assert value(memory.personal) == pytest.approx(1.8)


def test_the_server_averages_alike_and_keeps_its_model_in_the_adapt_phase() -> None:
    method, server = PerFedAvg(), PerFedAvg.Server(line(9.0))
    replies = {"ada": PerFedAvg.Uplink(line(2.0), 0.0, 1), "bea": PerFedAvg.Uplink(line(4.0), 0.0, 1)}
    assert value(method.merge(server, replies, FIRST).global_) == 3.0
    assert method.merge(server, {"ada": PerFedAvg.Uplink(None, 0.0, 1)}, ADAPT) is server


@pytest.mark.parametrize("fields", [{"hessian": "exact"}, {"inner_lr": 0.0}, {"adapt_steps": 0}])
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"\[method\]"):
        PerFedAvg(**fields)
