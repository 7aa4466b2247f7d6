"""FedSM's options: personal models by other methods (table 6), and the three ways to train the selector."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files, simulation
from consilium.errors import StudyError
from consilium.method import OptimizerState
from consilium.methods.fedavg_finetune import FedAvgFinetune
from consilium.methods.fedsm import FedSM
from consilium.methods.pfedme import PFedMe
from consilium.run_folder import RunFolder
from consilium.site import Round
from tests.learning.small import FIRST, batch, line, site, value
from tests.toy import toy_study

PFEDME = {"strength": 1.0, "inner_lr": 0.3, "lr": 0.5}


@pytest.mark.parametrize(
    ("personal", "fields"),
    [
        ("finetune", {}),
        pytest.param("apfl", {"mix": 0.3}, marks=pytest.mark.slow),
        ("perfedavg", {}),
        pytest.param("pfedme", PFEDME, marks=pytest.mark.slow),
    ],
)
def test_a_super_model_with_personal_models_by_another_method(
    personal: str, fields: dict[str, Any], federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, "fedsm", method__personal=personal, method__personal_fields=fields)
    result = simulation.run(study, tmp_path, workers=0)
    server = packet_files.load(result.folder / "best.safetensors", FedSM.Server)
    digests = {server.global_.digest, *(weights.digest for weights in server.personal.values())}
    assert len(digests) == 4, "three personal models and the global one differ"
    assert {"super", "global", "personal"} <= set(result.summary["best"]["scores"])
    phases = {event["phase"] for event in RunFolder.open(result.folder).events() if event["event"] == "train"}
    assert ("adapt" in phases) == (personal in ("finetune", "perfedavg"))


def test_the_personal_model_is_the_other_methods_own() -> None:
    """pFedMe inside FedSM makes the same step as pFedMe alone; fine-tuning the same as FedAvg-FT."""
    here = site(batch([1.0], [0.0]), roster=("ada", "bea"))
    alone = PFedMe(**PFEDME)
    _, memory = alone.train(here, alone.remember(here), PFedMe.Downlink(line(4.0)), FIRST)
    inside = FedSM(personal="pfedme", personal_fields=PFEDME)
    selector = here.task.initial("selector", labels=["ada", "bea"])
    got = FedSM.Downlink(line(4.0), None, selector, None, line(4.0), None)
    uplink, _ = inside.train(here, inside.remember(here), got, FIRST)
    assert value(uplink.personal) == value(memory.personal)
    adapt = Round(4, "adapt", 0, 1)
    tuned = FedSM(personal="finetune", personal_fields={"finetune_epochs": 2})
    uplink, _ = tuned.train(here, tuned.remember(here), FedSM.Downlink(line(4.0), None, None, None, None, None), adapt)
    other = FedAvgFinetune(finetune_epochs=2)
    _, kept = other.train(here, other.remember(here), FedAvgFinetune.Downlink(line(4.0)), adapt)
    assert value(uplink.personal) == value(kept.personal)


def test_the_loss_of_the_model_and_of_the_selector_are_both_told(federation: Path, tmp_path: Path) -> None:
    """In the first round the selector meets the same batches whoever makes the personal models."""
    told = {}
    for personal in ("softpull", "apfl"):
        fields = {"study__rounds": 1, "method__confidence": 0.5, "method__selector_training": "synchronised"}
        study = toy_study(federation, "fedsm", method__personal=personal, local__batch_size=2, **fields)
        events = RunFolder.open(simulation.run(study, tmp_path, workers=0).folder).events()
        told[personal] = [event for event in events if event["event"] == "train"]
        assert all(0 < event["loss"] < 1 and event["steps"] >= 4 for event in told[personal])  # a Dice loss
    softpull, apfl = ([event["selector_loss"] for event in events] for events in told.values())
    assert softpull == apfl and min(softpull) > 0
    assert all(event["loss"] != event["selector_loss"] for events in told.values() for event in events)


@pytest.mark.parametrize(
    ("personal", "fields", "sentence"),
    [
        ("apfl", {"mx": 0.1}, "[method] personal_fields of apfl: has no key 'mx'; did you mean 'mix'?"),
        ("apfl", {"mix": "half"}, "[method] personal_fields of apfl: mix = 'half': it must be a number."),
        ("apfl", {"adaptive": 1}, "[method] personal_fields of apfl: adaptive = 1: it must be true or false."),
        ("apfl", {"mix": 2.0}, "[method] personal_fields of apfl: mix = 2.0: α must be in [0, 1]."),
        ("pfedme", {"inner_steps": 2.5}, "personal_fields of pfedme: inner_steps = 2.5: it must be a whole number."),
        ("pfedme", {"strength": [1]}, "personal_fields of pfedme: strength = [1]: it must be a number."),
        (
            "finetune",
            {"finetune_epochs": 0},
            "of finetune: finetune_epochs = 0: it must be at least 1.",
        ),
        ("perfedavg", {"hessian": 3}, "personal_fields of perfedavg: hessian = 3: it must be text."),
        ("softpull", {"mix": 0.5}, "[method] personal_fields are not for personal = 'softpull'; remove them."),
    ],
)
def test_fields_of_the_other_method_are_checked(personal: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StudyError, match=re.escape(sentence)):
        FedSM(personal=personal, personal_fields=fields)


def test_whole_numbers_of_the_other_method_may_stand_for_numbers() -> None:
    assert FedSM(personal="pfedme", personal_fields={"strength": 15}).personaliser.how.strength == 15.0


def selector_step(training: str, state: OptimizerState | None = None) -> tuple[Any, Any]:
    """One round of a two-class selector y = w x at a site with two cases."""
    method = FedSM(selector_training=training, selector_lr=0.1)
    here = site(batch([1.0], [0.0]), batch([2.0], [0.0]), roster=("ada", "bea"), optimizer="adam")
    selector = here.task.initial("selector", labels=["ada", "bea"])
    got = FedSM.Downlink(line(1.0), line(1.0), selector, state, None, None)
    uplink, _ = method.train(here, method.remember(here), got, FIRST)
    return uplink, selector


def test_synchronised_sends_a_gradient_and_no_moments() -> None:
    uplink, selector = selector_step("synchronised")
    assert uplink.selector_state is None
    images = torch.tensor([[1.0], [2.0]])
    weight = selector["weight"].clone().requires_grad_()
    torch.nn.functional.cross_entropy(images @ weight.T, torch.tensor([0, 0])).backward()
    torch.testing.assert_close(uplink.selector["weight"], weight.grad)


def test_paper_steps_on_every_batch() -> None:
    """Adam's first two steps of 0.1 in one direction: the weights have moved by about 0.2."""
    uplink, selector = selector_step("paper")
    moved = (uplink.selector["weight"] - selector["weight"]).abs()
    assert moved.max().item() == pytest.approx(0.2, abs=0.02)


def test_moments_takes_one_step_on_the_summed_gradient_and_averages_moments() -> None:
    uplink, selector = selector_step("moments")
    moved = (uplink.selector["weight"] - selector["weight"]).abs()
    assert moved.max().item() == pytest.approx(0.1, abs=1e-3)
    gradient, _ = selector_step("synchronised")
    summed = 2 * gradient.selector["weight"]
    torch.testing.assert_close(uplink.selector_state.slots["exp_avg"]["weight"], 0.1 * summed)
    method = FedSM(selector_training="moments")
    state = method.start(site(batch([1.0], [0.0])).task, site(batch([1.0], [0.0]), roster=("ada", "bea")).roster)
    halves = {
        name: FedSM.Uplink(
            line(1.0), line(1.0), uplink.selector * s, scaled(uplink.selector_state, s), None, (), 0, 0.0, 0.0, 1
        )
        for name, s in (("ada", 1.0), ("bea", 3.0))
    }
    merged = method.merge(state, halves, FIRST)
    torch.testing.assert_close(merged.selector["weight"], 2 * uplink.selector["weight"])
    torch.testing.assert_close(
        merged.selector_state.slots["exp_avg"]["weight"], 2 * uplink.selector_state.slots["exp_avg"]["weight"]
    )
    assert merged.selector_state.step == 1


def scaled(state: OptimizerState, factor: float) -> OptimizerState:
    return OptimizerState(state.step, {slot: weights * factor for slot, weights in state.slots.items()})


@pytest.mark.parametrize("training", ["moments", "paper"])
def test_the_other_trainings_run_end_to_end(training: str, federation: Path, tmp_path: Path) -> None:
    result = simulation.run(toy_study(federation, "fedsm", method__selector_training=training), tmp_path, workers=0)
    refused = [e for e in RunFolder.open(result.folder).events() if e["event"] in ("lost", "refused")]
    assert refused == []
    assert "site_mean" in result.summary["headline"]


def test_each_models_best_round_and_the_joint_one_can_both_be_had(federation: Path, tmp_path: Path) -> None:
    """The same training kept two ways: what "each" reports as jointly best is what "joint" keeps."""
    fields: dict[str, Any] = {"study__rounds": 4, "study__score_every": 1, "method__confidence": 0.0}
    fields["method__selector_training"] = "synchronised"
    each, joint = (
        simulation.run(toy_study(federation, "fedsm", method__best=best, **fields), tmp_path, workers=0)
        for best in ("each", "joint")
    )
    together = each.summary["joint"]
    assert together["round"] == joint.summary["best"]["round"]
    assert together["test"] == joint.summary["headline"]
    assert together["valid"] == joint.summary["best"]["valid"]
    assert "joint" not in joint.summary
    assert set(each.summary["best"]["rounds"]) == {
        "global:pooled", "super:routed", *(f"personal/{site}" for site in ("ada", "bea", "cid")),
    }  # fmt: skip
