"""FedAMP and HeurFedAMP: u_i = Σ_j ξ_ij w_j at the server, loss + (strength/2) ‖w − u_i‖² at the site."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from consilium.errors import NotForOutsiders, StudyError
from consilium.methods.attentive import Attentive, products
from consilium.methods.fedamp import FedAMP
from consilium.methods.heurfedamp import HeurFedAMP
from consilium.weights import Weights
from tests.learning.small import FIRST, batch, line, site, value

THREE = ("ada", "bea", "cid")
BATCH = batch([1.0], [0.0])  # loss w²/2, so its slope is w


def served(method: Attentive, *models: Weights) -> Any:
    """The server after all three sites have sent these models."""
    here = site(BATCH, roster=THREE, inputs=models[0]["weight"].numel())
    replies = {name: method.Uplink(w, 0.0, 1) for name, w in zip(THREE, models)}
    return method.merge(method.start(here.task, here.roster), replies, FIRST)


def test_near_models_attract_each_other() -> None:
    """Weights 1, 2, 6, σ = 2, α = σ/N: ξ_12 = e^(−1/2)/3, ξ_13 = e^(−25/2)/3, ξ_23 = e^(−16/2)/3."""
    server = served(FedAMP(sigma=2.0), line(1.0), line(2.0), line(6.0))
    near, far = math.exp(-0.5) / 3, math.exp(-12.5) / 3
    assert server.attention["ada"] == pytest.approx({"ada": 1 - near - far, "bea": near, "cid": far})
    assert server.attention["cid"]["bea"] == pytest.approx(math.exp(-8) / 3)
    card = site(BATCH, roster=THREE).card
    u = value(FedAMP(sigma=2.0).send(server, card, FIRST).personal)
    assert u == pytest.approx((1 - near - far) * 1 + near * 2 + far * 6)


def test_equal_models_are_averaged_evenly_and_a_smaller_step_less() -> None:
    for step, share in ((1.0, 1 / 3), (0.5, 1 / 6)):
        server = served(FedAMP(step=step), *[line(4.0)] * 3)
        assert server.attention["bea"] == pytest.approx({"ada": share, "bea": 1 - 2 * share, "cid": share})


def test_models_that_point_the_same_way_attract_each_other() -> None:
    """cos = 1 and 0 at σ = ln 3: ¾ and ¼ of what ξ_ii = 0.2 leaves."""
    method = HeurFedAMP(sigma=math.log(3), self_share=0.2)
    server = served(method, line(1.0, 0.0), line(2.0, 0.0), line(0.0, 5.0))
    assert server.attention["ada"] == pytest.approx({"ada": 0.2, "bea": 0.6, "cid": 0.2})
    assert server.attention["cid"] == pytest.approx({"ada": 0.4, "bea": 0.4, "cid": 0.2})
    even = served(HeurFedAMP(), *[line(4.0)] * 3).attention
    assert even["ada"] == pytest.approx(dict.fromkeys(THREE, 1 / 3))


@pytest.mark.parametrize("method", [FedAMP(strength=2.0), HeurFedAMP(strength=2.0)])
def test_the_site_is_held_near_its_mixture_by_a_term_with_a_slope(method: Attentive) -> None:
    """From u = 4 at η = .1: 4 − .1·4 = 3.6, where the pull is 2·(3.6 − 4): 3.6 − .1·(3.6 − .8) = 3.32."""
    here = site(BATCH, BATCH, roster=THREE)
    uplink, _ = method.train(here, method.Memory(), method.Downlink(line(4.0)), FIRST)
    assert value(uplink.personal) == pytest.approx(3.32)
    assert (uplink.loss, uplink.steps) == (pytest.approx((8 + 3.6**2 / 2) / 2), 2)


def test_a_site_that_is_away_still_counts_with_its_last_model() -> None:
    method = FedAMP()
    server = served(method, line(1.0), line(2.0), line(6.0))
    later = method.merge(server, {"ada": method.Uplink(line(3.0), 0.0, 1)}, FIRST)
    assert {name: value(w) for name, w in later.personal.items()} == {"ada": 3.0, "bea": 2.0, "cid": 6.0}
    assert later.attention != server.attention


def test_statistics_do_not_count_in_likeness() -> None:
    models = [Weights({"w": torch.tensor([a]), "running_var": torch.tensor([b])}) for a, b in ((1.0, 9.0), (2.0, 7.0))]
    assert products(models, ["w"]).tolist() == [[1.0, 2.0], [2.0, 4.0]]


def test_each_site_uses_its_own_model_and_outsiders_have_none() -> None:
    method, here = FedAMP(), site(BATCH, roster=THREE)
    server = served(method, line(1.0), line(2.0), line(6.0))
    predictor = method.deploy(here.task, None, method.release(server, here.roster["cid"]))
    assert (predictor.model, predictor.of, predictor.when) == ("personal", "cid", "trained")
    assert float(predictor.answer(BATCH.images).output) == 6.0
    with pytest.raises(NotForOutsiders, match="--site"):
        method.deploy(here.task, None, method.release(server, None))


@pytest.mark.parametrize("method", [FedAMP, HeurFedAMP])
@pytest.mark.parametrize("fields", [{"strength": -1.0}, {"sigma": -1.0}])
def test_bad_fields_are_refused(method: type[Attentive], fields: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"\[method\]"):
        method(**fields)


def test_more_bad_fields_are_refused() -> None:
    with pytest.raises(StudyError, match="step in"):
        FedAMP(step=1.5)
    with pytest.raises(StudyError, match="self_share in"):
        HeurFedAMP(self_share=1.0)
    here = site(BATCH)
    with pytest.raises(StudyError, match="only one"):
        FedAMP().check(here.task, here.roster, here.local)
