"""FedBN and Multi-*: what stays, what travels, what is scored, and how several models become one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files
from consilium.batch import Batch
from consilium.contract import Stage, run_in_process
from consilium.errors import NotForOutsiders, StudyError
from consilium.federation.admin import for_federation
from consilium.methods.merged import merged_logits
from consilium.methods.partly_local import (
    FedBN,
    MultiDecoder,
    inverse_loss,
    names_of,
)
from consilium.methods.personal_part import whole
from consilium.methods.site_models import own_channels
from consilium.networks.plain_unet import Supervised
from consilium.networks.unet import UNet
from consilium.networks.vgg import SmallVGG
from consilium.run_folder import RunFolder
from consilium.tasks.segmentation import Segmentation
from consilium.weights import Weights
from tests.toy import toy_study

FAST = {"study__rounds": 2, "local__batch_size": 4}
TASK = Segmentation(("kidney", "liver", "spleen"), 2, 1, UNet((4, 8), 1), SmallVGG((4,)))


def last(result: Any) -> Any:
    method = RunFolder.open(result.folder).study.method
    return packet_files.load(result.folder / "last.safetensors", method.Server)


# ------------------------------------------------------------------------------------------- limits


def after(study: Any, place: Path, rounds: int = 2) -> Stage:
    stage = Stage(study, place)
    for index in range(rounds):
        stage.round(index)
    return stage


@pytest.mark.parametrize(
    ("name", "like"),
    [("fedbn", {}), ("fedbn", {"task__unannotated": "ignored"}), ("multi-decoder", {"task__unannotated": "ignored"})],
)
def test_without_a_local_part_it_is_fedavg_bit_by_bit(
    name: str, like: dict[str, Any], organs: Path, tmp_path: Path
) -> None:
    mine = after(toy_study(organs, name, method__local_part="none", **like, **FAST), tmp_path / "mine")
    plain = after(toy_study(organs, "fedavg", **like, **FAST), tmp_path / "plain")
    assert mine.server.global_.digest == plain.server.global_.digest


def test_without_a_local_part_scored_after_averaging_it_predicts_as_fedavg(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedbn", method__local_part="none", method__scored="merged", **FAST)
    stages = [after(study, tmp_path / "mine", 1), after(toy_study(federation, "fedavg", **FAST), tmp_path / "plain", 1)]
    images = torch.rand(1, 1, 16, 16)
    answers = []
    for stage in stages:
        release = stage.method.release(stage.server, stage.roster["ada"])
        answers.append(stage.method.deploy(stage.task, stage.workers["ada"].kept(0).memory, release).answer(images))
    assert torch.allclose(answers[0].output.softmax(1), answers[1].output.softmax(1), atol=1e-6)


# ------------------------------------------------------------------------------------------- what stays


@pytest.mark.parametrize("name", ["fedbn", "multi-head", "multi-encoder", "multi-decoder"])
def test_only_the_rest_is_averaged_and_sent_back(name: str, organs: Path, tmp_path: Path) -> None:
    """After a round the sites' local parts differ, the common part is their mean by cases, and nothing else is sent."""
    stage = Stage(toy_study(organs, name, local__batch_size=4), tmp_path)
    names = names_of(stage.task, stage.method.local_part)  # type: ignore[attr-defined]
    stage.round(0)
    server = stage.server
    assert names and not names & set(server.global_) and names | set(server.global_) == set(stage.task.shape())
    assert set(stage.method.send(server, stage.roster["ada"], stage.rounds[1]).global_) == set(server.global_)
    ada, bea, cid = (server.personal[site] for site in ("ada", "bea", "cid"))
    assert any(not torch.equal(ada[key], bea[key]) for key in names)
    for key, value in server.global_.items():  # three sites of equal size
        assert torch.allclose(value, (ada[key] + bea[key] + cid[key]) / 3, atol=1e-6)


def test_a_site_goes_on_from_its_own_part(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "multi-decoder", local__batch_size=4), tmp_path)
    stage.round(0)
    worker = stage.workers["ada"]
    memory = worker.kept(0).memory
    start = whole(stage.task, stage.server.global_, memory.personal)
    names = names_of(stage.task, "decoder")
    assert list(start) == list(stage.task.shape())
    assert all(
        torch.equal(start[key], (memory.personal if key in names else stage.server.global_)[key]) for key in start
    )
    # the part matters: with another site's decoder the site ends elsewhere
    order = stage.method.send(stage.server, stage.roster["ada"], stage.rounds[1])
    own, _ = stage.method.train(worker.site, memory, order, stage.rounds[1])
    other = replace(memory, personal=stage.server.personal["bea"])
    assert own.global_.digest != stage.method.train(worker.site, other, order, stage.rounds[1])[0].global_.digest


def test_what_is_not_shared_does_not_leave(organs: Path, tmp_path: Path) -> None:
    study = toy_study(organs, "multi-head", method__share_local_parts=False, study__rounds=1, local__batch_size=4)
    result = run_in_process(study, tmp_path)
    assert last(result).personal == {}
    with pytest.raises(NotForOutsiders, match="not shared"):
        study.method.deploy(study.task, None, study.method.release(last(result), None))
    rows = [r for r in RunFolder.open(result.folder).rows() if r.model == "personal"]
    assert {(r.site, r.of) for r in rows} == {(s, s) for s in ("ada", "bea", "cid")}  # each its own model only


def test_between_hospitals_nothing_is_shared(organs: Path) -> None:
    sent = for_federation(toy_study(organs, "fedbn"), ("ada", "bea", "cid"))
    assert FedBN().share_local_parts and not sent.method.share_local_parts  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fedbn", "multi-encoder"])
def test_a_guest_is_answered_by_all(name: str, organs: Path, tmp_path: Path) -> None:
    study = toy_study(organs, name, study__leave_out=["bea"], data__annotated={"ada": "all"}, **FAST)
    rows = RunFolder.open(run_in_process(study, tmp_path).folder).rows()
    outside = [r for r in rows if r.outside and r.metric == "dice" and r.model == "personal"]
    assert outside and {(r.site, r.of) for r in outside if r.phase != "best"} >= {("bea", "")}


# ------------------------------------------------------------------------------------------- when it is scored


def test_before_averaging_or_after(organs: Path, tmp_path: Path) -> None:
    """As trained: the site's whole model. Merged: the averaged part with the site's own."""
    stage = Stage(toy_study(organs, "fedbn", local__batch_size=4), tmp_path)
    stage.round(0)
    method, server, images = stage.method, stage.server, torch.rand(1, 1, 16, 16)
    models = {"trained": server.personal, "merged": {
        name: whole(stage.task, server.global_, w) for name, w in server.personal.items()}}  # fmt: skip
    for scored, weights in models.items():
        told: Any = replace(method, scored=scored)  # type: ignore[type-var]
        predictor = told.deploy(stage.task, None, told.release(server, None))
        outputs = [
            (
                stage.roster[name].labels,
                own_channels(stage.task, stage.task.infer(w, images), stage.roster[name].labels, False),
            )
            for name, w in sorted(weights.items())
        ]
        assert torch.allclose(predictor.answer(images).output, merged_logits(outputs, stage.task.labels))
        assert predictor.when == scored


# ------------------------------------------------------------------------------------------- losses and channels


def test_own_organs_and_their_inverse_by_hand() -> None:
    """A site with the liver alone: softmax of background and liver; other organs' channels get no gradient."""
    output = torch.tensor([[0.0, 1.0], [9.0, -9.0], [2.0, 0.5], [-3.0, 3.0]])[None, :, None].requires_grad_()
    batch = Batch(torch.zeros(1), torch.tensor([[[2, 0]]]), ("c",), labels=(("liver",),))
    loss = inverse_loss(TASK, ("liver",), output, batch)
    p = [1 / (1 + 2.718281828 ** -(2.0 - 0.0)), 1 / (1 + 2.718281828 ** -(0.5 - 1.0))]
    assert loss.item() == pytest.approx(1 - 2 * p[0] / (p[0] + p[1] + 1), abs=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad[0, [0, 2]].any() and not output.grad[0, [1, 3]].any()
    deep = inverse_loss(TASK, ("liver",), Supervised(output, ((0.5, output),)), batch)
    assert deep.item() == pytest.approx(1.5 * loss.item(), rel=1e-6)


def test_what_a_site_was_not_told_is_its_background() -> None:
    """FedBN's marginal loss: background is background or an organ the site does not annotate."""
    chances = torch.tensor([0.1, 0.2, 0.4, 0.3])
    output = chances.log()[None, :, None, None]
    seen = own_channels(TASK, output, ("liver",), inverse=False)[0, :, 0, 0].exp()
    assert torch.allclose(seen, torch.tensor([0.6, 0.4]))
    assert torch.allclose(own_channels(TASK, output, ("liver",), inverse=True)[0, :, 0, 0].exp(), chances[[0, 2]])


def test_the_papers_mean_of_background_logits_by_hand() -> None:
    """Two models know the liver, nobody the spleen: means of logits; the product rule gives another answer."""
    one, two = torch.tensor([[[3.0], [1.0]]]), torch.tensor([[[1.0], [4.0], [0.0]]])
    outputs = [(("liver",), one), (("liver", "kidney"), two)]
    mean = merged_logits(outputs, ("kidney", "liver", "spleen"), "mean")[0, :, 0]
    assert mean[:3].tolist() == [2.0, 0.0, 2.5] and mean[3] < -60
    assert not torch.allclose(mean.softmax(0), merged_logits(outputs, ("kidney", "liver", "spleen"))[0, :, 0].exp())


def test_the_option_reaches_the_prediction(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "multi-decoder", local__batch_size=4), tmp_path)
    stage.round(0)
    images = torch.rand(1, 1, 16, 16)
    told = {rule: MultiDecoder(background=rule) for rule in ("product", "mean")}
    answers = [m.deploy(stage.task, None, m.release(stage.server, None)).answer(images).output for m in told.values()]
    assert not torch.allclose(*answers)


# ------------------------------------------------------------------------------------------- refusals


def test_studies_that_cannot_work(federation: Path, tmp_path: Path) -> None:
    bare = Segmentation(("a",), 2, 1, SmallVGG((4,)), SmallVGG((4,)))  # type: ignore[arg-type]
    local = toy_study(federation, "fedbn").local
    with pytest.raises(StudyError, match="neither parameters nor statistics"):
        FedBN().check(bare, {}, local)
    with pytest.raises(StudyError, match="no known encoder"):
        FedBN(local_part="encoder").check(bare, {}, local)
    with pytest.raises(StudyError, match="no tensors there"):
        FedBN(local_part="supervision").check(TASK, {}, local)
    with pytest.raises(StudyError, match="is the whole network; use 'local'"):
        FedBN(local_part="head").check(replace(TASK, model=Head()), {}, local)
    with pytest.raises(StudyError, match="take batchnorm away"):
        run_in_process(toy_study(federation, "fedbn", local__batchnorm="local", task__norm="batch"), tmp_path)
    for field in ("local_part", "scored", "background"):
        with pytest.raises(StudyError, match=rf"\[method\] {field} = 'x': it must be one of"):
            toy_study(federation, "multi-head", **{f"method__{field}": "x"})


class Head:
    """A network of one layer."""

    def build(self, dimensions: int, channels: int, outputs: int) -> Any:
        return torch.nn.Conv2d(channels, outputs, 1)


def test_a_model_is_put_together_in_the_networks_order() -> None:
    names = list(TASK.shape())
    first, rest = Weights({names[1]: torch.ones(1)}), Weights({n: torch.zeros(1) for n in reversed(names)})
    joined = whole(TASK, first, rest)
    assert list(joined) == names and joined[names[1]].item() == 1.0 and joined[names[0]].item() == 0.0
