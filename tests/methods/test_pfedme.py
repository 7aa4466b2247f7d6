"""pFedMe: θ ← θ − δ (∇f(θ) + λ (θ − w)), K times; then w ← w − η λ (w − θ). θ is kept and scored."""

from __future__ import annotations

from typing import Any

import pytest

from consilium.errors import StudyError
from consilium.methods.pfedme import PFedMe, moreau_round
from consilium.site import SiteCard
from tests.learning.small import FIRST, batch, line, site, value

HOW = PFedMe(strength=2.0, inner_steps=2, inner_lr=0.1, lr=0.25)


def test_one_batch_by_hand() -> None:
    """w = 4, x = 1, t = 0: θ = 4 − .1·4 = 3.6, then 3.6 − .1·(3.6 − .8) = 3.32; w = 4 − .25·2·.68 = 3.66."""
    shared, personal, loss, steps = moreau_round(site(batch([1.0], [0.0])), line(4.0), HOW, FIRST)
    assert value(personal) == pytest.approx(3.32)
    assert value(shared) == pytest.approx(3.66)
    assert loss == pytest.approx(3.6**2 / 2)
    assert steps == 1


def test_theta_goes_on_from_batch_to_batch() -> None:
    """The second batch starts from θ = 3.32 and w = 3.66: θ = 3.32 − .1·(3.32 − .68) = 3.056, …"""
    two = site(batch([1.0], [0.0]), batch([1.0], [0.0]))
    _, personal, _, steps = moreau_round(two, line(4.0), HOW, FIRST)
    first = 3.32 - 0.1 * (3.32 + 2 * (3.32 - 3.66))
    assert value(personal) == pytest.approx(first - 0.1 * (first + 2 * (first - 3.66)))
    assert steps == 2


def test_many_inner_steps_reach_the_moreau_minimum() -> None:
    """min ½θ² + (λ/2)(θ − w)² is at θ = λ w / (1 + λ) = 8/3."""
    how = PFedMe(strength=2.0, inner_steps=200, inner_lr=0.1, lr=0.25)
    assert value(moreau_round(site(batch([1.0], [0.0])), line(4.0), how, FIRST)[1]) == pytest.approx(8 / 3, abs=1e-4)


def test_theta_is_what_is_kept_and_scored_and_does_not_leave() -> None:
    here = site(batch([1.0], [0.0]))
    uplink, memory = HOW.train(here, HOW.remember(here), PFedMe.Downlink(line(4.0)), FIRST)
    assert value(uplink.global_) == pytest.approx(3.66)
    assert value(memory.personal) == pytest.approx(3.32)
    predictor = HOW.deploy(here.task, memory, HOW.release(PFedMe.Server(line(0.0)), SiteCard("ada", 0, 1, ("y",))))
    assert predictor.model == "personal"
    assert float(predictor.answer(batch([1.0], [0.0]).images).output) == pytest.approx(3.32)


def test_the_server_mixes_by_beta() -> None:
    """β = .5: w = .5·9 + .5·mean(2, 4)."""
    replies = {"ada": PFedMe.Uplink(line(2.0), 0.0, 1), "bea": PFedMe.Uplink(line(4.0), 0.0, 1)}
    assert value(PFedMe(server_mix=0.5).merge(PFedMe.Server(line(9.0)), replies, FIRST).global_) == 6.0


@pytest.mark.parametrize("fields", [{"strength": 0.0}, {"server_mix": 0.0}, {"lr": 0.1, "strength": 15.0}])
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"\[method\]"):
        PFedMe(**fields)
