"""Fine-tuning: E local epochs from the best w_g with a fresh optimiser; nothing of it leaves the site."""

from __future__ import annotations

import pytest

from consilium.errors import StudyError
from consilium.methods.fedavg_finetune import FedAvgFinetune
from consilium.methods.fedavg_local import FedAvgLocal
from consilium.methods.fedprox_finetune import FedProxFinetune
from consilium.site import Round, SiteCard
from tests.learning.small import FIRST, batch, line, site, value

ADAPT = Round(4, "adapt", 0, 1)
CARD = SiteCard("ada", 0, 1, ("y",))


def test_the_adapt_phase_follows_the_papers_rounds_and_starts_from_the_best() -> None:
    train, adapt = FedAvgFinetune().phases(7)
    assert (train.name, train.rounds, train.counts) == ("train", 7, True)
    assert (adapt.name, adapt.rounds, adapt.counts, adapt.from_best) == ("adapt", 1, False, True)


def test_two_epochs_of_adaptation_by_hand() -> None:
    """w = 4, x = 1, t = 0, rate .5 of the method's own: 4 → 2 → 1."""
    method = FedAvgFinetune(finetune_epochs=2, finetune_lr=0.5)
    here = site(batch([1.0], [0.0]))
    uplink, memory = method.train(here, method.remember(here), FedAvgFinetune.Downlink(line(4.0)), ADAPT)
    assert value(memory.personal) == pytest.approx(1.0)
    assert uplink.global_ is None


def test_training_rounds_are_fedavg_and_leave_no_memory() -> None:
    method, here = FedAvgFinetune(), site(batch([1.0], [0.0]))
    uplink, memory = method.train(here, method.remember(here), FedAvgFinetune.Downlink(line(4.0)), FIRST)
    assert value(uplink.global_) == pytest.approx(3.6)
    assert memory.personal is None


def test_before_adaptation_the_personal_model_is_the_shared_one_and_says_so() -> None:
    method, here = FedAvgFinetune(), site(batch([1.0], [0.0]))
    released = method.release(FedAvgFinetune.Server(line(4.0), {"ada": 1}), CARD)
    before = method.deploy(here.task, FedAvgFinetune.Memory(None), released)
    after = method.deploy(here.task, FedAvgFinetune.Memory(line(1.0)), released)
    assert [(p.model, p.when) for p in (before, after)] == [("personal", "merged"), ("personal", "adapted")]
    assert [float(p.answer(batch([1.0], [0.0]).images).output) for p in (before, after)] == [4.0, 1.0]


def test_the_proximal_term_is_not_part_of_the_adaptation() -> None:
    """Round: w = 4 − .1·(4 + μ·0) on the first step. Adaptation: as without μ."""
    here = site(batch([1.0], [0.0]))
    tuned = [
        value(m.train(here, m.remember(here), m.Downlink(line(4.0)), ADAPT)[1].personal)
        for m in (FedProxFinetune(mu=5.0), FedAvgFinetune())
    ]
    assert tuned[0] == tuned[1]


def test_fedprox_rounds_are_held_to_the_shared_model() -> None:
    """Second step from 3.6: the penalty's gradient is μ (3.6 − 4) = −2, so w = 3.6 − .1·(3.6 − 2)."""
    here = site(batch([1.0], [0.0]), batch([1.0], [0.0]))
    method = FedProxFinetune(mu=5.0)
    uplink, _ = method.train(here, method.remember(here), method.Downlink(line(4.0)), FIRST)
    assert value(uplink.global_) == pytest.approx(3.44)


def test_fedavg_local_uses_the_copy_it_trained() -> None:
    method, here = FedAvgLocal(), site(batch([1.0], [0.0]))
    uplink, memory = method.train(here, method.remember(here), FedAvgLocal.Downlink(line(4.0)), FIRST)
    released = method.release(FedAvgLocal.Server(line(9.0), {"ada": 1}), CARD)
    predictor = method.deploy(here.task, memory, released)
    assert value(uplink.global_) == value(memory.personal) == pytest.approx(3.6)
    assert (predictor.model, predictor.of, predictor.when) == ("personal", "ada", "trained")
    assert float(predictor.answer(batch([1.0], [0.0]).images).output) == pytest.approx(3.6)


def test_bad_fields_are_refused() -> None:
    for wrong in ({"finetune_epochs": 0}, {"finetune_lr": -1.0}):
        with pytest.raises(StudyError, match=r"\[method\]"):
            FedAvgFinetune(**wrong)
    with pytest.raises(StudyError, match="mu"):
        FedProxFinetune(mu=-1.0)
