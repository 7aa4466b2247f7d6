"""FedCRLD: attention by hand, the momentum model, every term off and on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from consilium.contract import Stage
from consilium.errors import NotForOutsiders, StudyError
from consilium.methods.fedcrld import FedCRLD, attended, copies, encoder_names, with_asked
from consilium.networks.attended import Attended, Featured, far_names
from consilium.networks.cnn import CNN
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet
from tests.toy import toy_study

IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
FAST = {"local__batch_size": 8}


@pytest.mark.parametrize("inner", [PlainUNet((4, 8, 8)), UNet((4, 8, 16), 1)], ids=["plain", "monai"])
def test_attention_at_the_bottleneck_by_hand(inner: Any) -> None:
    """z ← z + A(z, z), then z ← z + A'(z, far z), where the far encoder is a copy at first."""
    torch.manual_seed(0)
    network: Any = Attended(inner).build(2, 1, 3)
    bottleneck = IMAGES
    for stage in network.far:  # a copy of the encoder, so both bottlenecks are this
        bottleneck = stage(bottleneck)
    far = bottleneck
    for layer, others in ((network.within, None), (network.across, far)):
        places = bottleneck.flatten(2).transpose(1, 2)
        keys = places if others is None else others.flatten(2).transpose(1, 2)
        weight, bias = layer.ask.in_proj_weight, layer.ask.in_proj_bias
        q, k, v = (functional.linear(x, w, b) for x, w, b in zip((places, keys, keys), weight.chunk(3), bias.chunk(3)))
        told = layer.ask.out_proj((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v)
        bottleneck = bottleneck + told.transpose(1, 2).reshape(bottleneck.shape)
    answer = network.train()(IMAGES)
    assert isinstance(answer, Featured)
    assert torch.allclose(answer.features, bottleneck, atol=1e-5)
    assert network.eval()(IMAGES).shape == (2, 3, 8, 8)


def test_the_far_encoder_does_not_learn_and_is_a_copy_by_name() -> None:
    network: Any = Attended(PlainUNet((4, 8, 8))).build(2, 1, 3)
    assert not [name for name, _ in network.named_parameters() if name.startswith("far.")]
    state, names = network.state_dict(), far_names(network)
    assert set(names) == {name for name in state if name.startswith("far.")}
    assert all(torch.equal(state[far], state[near]) for far, near in names.items())
    assert far_names(Attended(PlainUNet((4, 8, 8)), cross_attention=False).build(2, 1, 3)) == {}
    with pytest.raises(StudyError, match="changes the network inside"):
        Attended(CNN()).build(2, 1, 3)


def featured(logits: list[list[float]], feature: float) -> Featured:
    """One image of two places, its bottleneck one number."""
    return Featured(torch.tensor(logits).T.reshape(1, -1, 1, 2), torch.tensor([[[[feature]]]]))


def test_the_terms_by_hand(organs: Path) -> None:
    """A site that draws the disc: channels 0 and 1 of three. Logits ln 3 and 0 are probabilities ¾ and ¼."""
    task = toy_study(organs, "fedcrld").task
    three = 1.0986123
    now = featured([[three, 0.0, 5.0], [0.0, 0.0, -5.0]], 1.0)
    steady, common = featured([[0.0, 0.0, 0.0]] * 2, 4.0), featured([[0.0, three, 9.0], [0.0, 0.0, 9.0]], 0.0)
    terms = FedCRLD(features=2.0).terms(task, ("round",), now, steady, common)
    assert terms["predictions"].item() == pytest.approx((2 * 0.25**2) / 4)
    assert terms["features"].item() == pytest.approx(2.0 * 9.0)
    divergence = 0.25 * torch.log(torch.tensor(0.25 / 0.75)) + 0.75 * torch.log(torch.tensor(0.75 / 0.25))
    assert terms["distillation"].item() == pytest.approx(divergence.item() / 2, rel=1e-5)
    assert FedCRLD(predictions=0, features=0, distillation=0).terms(task, ("round",), now, steady, common) == {}


COMPONENTS = ("predictions", "features", "distillation", "self_attention", "cross_attention", "momentum")


def test_each_component_off_gives_other_weights_and_another_loss(organs: Path, tmp_path: Path) -> None:
    """In the second round, when momentum model, global model and local model differ."""
    found: dict[str, tuple[str, float]] = {}
    for component in ("nothing", *COMPONENTS):
        off: Any = {} if component == "nothing" else {component: False if "attention" in component else 0.0}
        stage = Stage(
            toy_study(organs, "fedcrld", **FAST, **{f"method__{k}": v for k, v in off.items()}), tmp_path / component
        )
        site, method = stage.workers["cid"].site, stage.method
        server, memory = method.start(stage.task, stage.roster), method.remember(site)
        order = method.send(server, site.card, stage.rounds[0])
        sent, memory = method.train(site, memory, order, stage.rounds[0])
        shifted = {"bea": replace(sent, global_=0.5 * sent.global_ + 0.5 * server.global_), "cid": sent}
        order = method.send(method.merge(server, shifted, stage.rounds[0]), site.card, stage.rounds[1])
        sent, _ = method.train(site, memory, order, stage.rounds[1])
        unet, _ = sent.global_.split(lambda name: name.startswith("net."))  # what all of them have
        found[component] = (unet.digest, sent.loss)
    assert len({digest for digest, _ in found.values()}) == len({loss for _, loss in found.values()}) == 7


def test_a_site_takes_over_all_but_its_encoder(organs: Path, tmp_path: Path) -> None:
    """A learning rate that does nothing leaves what it started from: own encoder, everything else the server's."""
    stage = Stage(toy_study(organs, "fedcrld", local__lr=1e-30, local__optimizer="sgd", **FAST), tmp_path)
    site, method = stage.workers["ada"].site, stage.method
    task = attended(stage.task, True, True)
    memory: Any = method.remember(site)
    own = memory.personal.map(lambda tensor: tensor + 1)
    order = method.send(stage.server, site.card, stage.rounds[0])
    sent, kept = method.train(site, replace(memory, personal=own), order, stage.rounds[0])
    encoder = set(encoder_names(task))
    for name, tensor in sent.global_.items():
        assert torch.allclose(tensor, own[name] if name in encoder else stage.server.global_[name], atol=1e-6), name
    for far, near in copies(task).items():  # it asks the encoder it was sent
        assert torch.equal(kept.personal[far], stage.server.global_[near])
    assert set(sent.global_) == set(task.shape()) - set(copies(task))


def test_the_momentum_model_is_a_running_mean(organs: Path, tmp_path: Path) -> None:
    """One step at momentum 0.75: m = 0.75 m + 0.25 w."""
    stage = Stage(toy_study(organs, "fedcrld", method__momentum=0.75, **FAST), tmp_path)
    site, method = stage.workers["ada"].site, stage.method
    memory: Any = method.remember(site)
    sent, kept = method.train(site, memory, method.send(stage.server, site.card, stage.rounds[0]), stage.rounds[0])
    assert sent.steps == 1
    expected = 0.75 * memory.momentum + 0.25 * kept.personal
    assert all(torch.allclose(kept.momentum[k], v, atol=1e-6) for k, v in expected.items())
    assert not torch.allclose(
        kept.momentum["net.net.model.0.conv.unit0.conv.weight"], kept.personal["net.net.model.0.conv.unit0.conv.weight"]
    )


def test_scored_before_averaging_with_the_encoder_it_asked(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "fedcrld", **FAST), tmp_path)
    stage.round(0)
    stage.round(1)
    method, task = stage.method, attended(stage.task, True, True)
    memory: Any = stage.workers["ada"].kept(1).memory
    assembled = with_asked(task, stage.server.personal["ada"], stage.server.asked["ada"])
    assert assembled.digest == memory.personal.digest  # the server's copy is the site's own, bit by bit
    predictor = method.deploy(stage.task, None, method.release(stage.server, None))
    assert predictor.passes == 3 and predictor.when == "trained"
    alone: Any = replace(method, share_local_parts=False)  # type: ignore[type-var]
    reply = alone.Uplink(stage.server.global_, 0.0, 1)
    server = alone.merge(alone.start(stage.task, stage.roster), {"ada": reply}, stage.rounds[0])
    assert server.personal == {} and server.global_.digest == stage.server.global_.digest
    with pytest.raises(NotForOutsiders, match="not shared"):
        alone.deploy(stage.task, None, alone.release(server, None))


def test_fields_out_of_range(organs: Path) -> None:
    for field, value, words in (
        ("momentum", 1.0, r"in \[0, 1\)"),
        ("features", -1.0, "from 0 up"),
        ("background", "x", "product"),
    ):
        with pytest.raises(StudyError, match=rf"\[method\] {field} = .*{words}"):
            toy_study(organs, "fedcrld", **{f"method__{field}": value})
