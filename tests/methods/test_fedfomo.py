"""FedFomo: w_n ∝ max(0, (L(θ) − L(θ_n)) / ‖θ_n − θ‖) on validation cases, θ ← θ + Σ w_n (θ_n − θ), then training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from consilium.errors import NotForOutsiders, StudyError
from consilium.methods.fedfomo import FedFomo, favourites, helpfulness
from consilium.randomness import torch_generator
from tests.learning.small import FIRST, batch, line, site, value

FOUR = ("ada", "bea", "cid", "dan")
BATCH = batch([1.0], [0.0])  # loss w²/2


def memory(before: float, personal: float, **affinity: float) -> FedFomo.Memory:
    return FedFomo.Memory(line(before), line(personal), dict.fromkeys(FOUR[1:], 0.0) | affinity)


def got(**models: float) -> FedFomo.Downlink:
    return FedFomo.Downlink({name: line(w) for name, w in models.items()})


def test_helpfulness_by_hand() -> None:
    """L(4) = 8: to 3 it is (8 − 4.5)/1, to 2 (8 − 2)/2, to 6 (8 − 18)/2; to 4 itself nothing."""
    here = site(BATCH, roster=FOUR)
    found = helpfulness(here, line(4.0), {n: line(w) for n, w in zip(FOUR, (3.0, 2.0, 6.0, 4.0))})
    assert found == pytest.approx({"ada": 3.5, "bea": 3.0, "cid": -5.0, "dan": 0.0})


def test_one_round_by_hand() -> None:
    """θ = (3.5·3 + 3·2)/6.5, from which one step at η = .1 takes a tenth; cid is left out, but remembered."""
    method, here = FedFomo(), site(BATCH, roster=FOUR)
    uplink, kept = method.train(here, memory(4.0, 3.0, cid=1.0), got(bea=2.0, cid=6.0), FIRST)
    theta = (3.5 * 3 + 3 * 2) / 6.5
    assert value(kept.before) == pytest.approx(theta)
    assert value(uplink.personal) == value(kept.personal) == pytest.approx(0.9 * theta)
    assert kept.affinity == pytest.approx({"bea": 3.0, "cid": -4.0, "dan": 0.0})
    assert uplink.wants == ("bea", "cid", "dan")


def test_without_a_model_that_helps_the_site_goes_back_to_where_it_started() -> None:
    _, kept = FedFomo().train(site(BATCH, roster=FOUR), memory(1.0, 2.0), got(bea=3.0), FIRST)
    assert value(kept.before) == 1.0
    assert value(kept.personal) == pytest.approx(0.9)


def test_the_first_round_is_plain_training_and_downloads_nothing() -> None:
    method, here = FedFomo(), site(BATCH, roster=FOUR)
    server = method.start(here.task, here.roster)
    order = method.send(server, here.card, FIRST)
    assert order.personal == {}
    start = method.remember(here)
    uplink, _ = method.train(here, start, order, FIRST)
    assert value(uplink.personal) == pytest.approx(0.9 * value(start.personal))


def test_the_most_helpful_are_asked_for_and_sometimes_any() -> None:
    affinity = {"bea": 0.1, "cid": 3.0, "dan": -1.0}
    draws = [favourites(affinity, 1, 0.3, torch_generator(0, i)) for i in range(400)]
    assert draws.count(("cid",)) / 400 == pytest.approx(0.7 + 0.3 / 3, abs=0.06)
    assert draws.count(("dan",)) / 400 == pytest.approx(0.1, abs=0.05)
    assert {favourites(affinity, 2, 0.0, torch_generator(0, i)) for i in range(20)} == {("bea", "cid")}
    ties = {favourites(dict.fromkeys(affinity, 0.0), 1, 0.0, torch_generator(0, i)) for i in range(40)}
    assert len(ties) == 3


def test_the_server_sends_what_was_asked_for_and_keeps_the_absent() -> None:
    method, here = FedFomo(budget=1), site(BATCH, roster=FOUR)
    server = method.start(here.task, here.roster)
    later = method.merge(server, {"bea": FedFomo.Uplink(line(7.0), ("cid",), 0.0, 1)}, FIRST)
    later = method.merge(later, {"ada": FedFomo.Uplink(line(5.0), ("bea",), 0.0, 1)}, FIRST)
    order = method.send(later, here.card, replace(FIRST, index=1, step=1))
    assert {name: value(w) for name, w in order.personal.items()} == {"bea": 7.0}
    assert value(later.personal["dan"]) == value(server.personal["dan"])


def test_the_trained_model_is_scored_and_outsiders_have_none() -> None:
    method, here = FedFomo(), site(BATCH, roster=FOUR)
    server = method.start(here.task, here.roster)
    predictor = method.deploy(here.task, memory(1.0, 2.0), method.release(server, here.card))
    assert (predictor.model, predictor.of, predictor.when) == ("personal", "ada", "trained")
    assert float(predictor.answer(BATCH.images).output) == 2.0
    assert method.deploy(here.task, None, method.release(server, here.card)).when == "merged"
    with pytest.raises(NotForOutsiders, match="--site"):
        method.deploy(here.task, None, method.release(server, None))


@pytest.mark.parametrize("fields", [{"budget": -1}, {"explore": 1.5}])
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"\[method\]"):
        FedFomo(**fields)


def test_a_federation_that_cannot_work_is_refused() -> None:
    here = site(BATCH, roster=FOUR)
    with pytest.raises(StudyError, match="a site has 3 peers"):
        FedFomo(budget=4).check(here.task, here.roster, here.local)
    with pytest.raises(StudyError, match="use 'average'"):
        FedFomo().check(here.task, here.roster, replace(here.local, batchnorm="local"))
    with pytest.raises(StudyError, match="no valid cases"):
        FedFomo().train(replace(here, data=_Untried()), memory(1.0, 2.0), got(), FIRST)


class _Untried:
    """Training cases only."""

    def batches(self, batch_size: int, epoch: int, seed: int) -> Any:
        return iter([BATCH])

    def whole(self, split: str, batch_size: int) -> Any:
        return iter([BATCH] if split == "train" else [])

    def cases(self, split: str) -> list[str]:
        return list(BATCH.cases) if split == "train" else []

    def __len__(self) -> int:
        return 1


def test_budgets_take_generators_that_repeat() -> None:
    first, second = (favourites(dict.fromkeys(FOUR, 0.0), 2, 1.0, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first == second
