"""MENU-Net: encoders side by side, who trains and averages which, the exclusion loss by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.batch import Batch
from consilium.contract import Stage
from consilium.errors import StudyError
from consilium.learning.exclusion import exclusion_loss
from consilium.methods.menu_net import MENUNet, encoder_names, menu
from consilium.networks.cnn import CNN
from consilium.networks.menu_net import MenuNet, levels_of
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet
from consilium.weights import Weights
from tests.toy import toy_study

FAST = {"local__batch_size": 8}


def test_features_stand_side_by_side_at_every_level() -> None:
    """Three encoders of 4 and 8 channels: the decoder gets 12 and 24, and every encoder matters."""
    network: Any = MenuNet(PlainUNet((4, 8)), 3).build(2, 1, 4).eval()
    assert network.decoder[0].widen.in_channels == 24 and network.head.in_channels == 12
    assert network.decoder[0].mix.first[0].in_channels == 24  # 12 from below, 12 from the encoders
    images = torch.rand(1, 1, 7, 9, generator=torch.Generator().manual_seed(0))
    before = network(images)
    assert before.shape == (1, 4, 7, 9)
    for encoder in network.encoders:
        kept = [p.clone() for p in encoder.parameters()]
        with torch.no_grad():
            for p in encoder.parameters():
                p.zero_()
            assert not torch.allclose(network(images), before)
            for p, old in zip(encoder.parameters(), kept):
                p.copy_(old)
    assert levels_of(UNet((4, 8), 1)) == PlainUNet((4, 8), (), residual=True)
    with pytest.raises(StudyError, match="from a U-Net"):
        levels_of(CNN())


def test_the_exclusion_loss_by_hand() -> None:
    """Two places, the disc drawn at the first; the square has ½ there and ¼ beside it."""
    chances = torch.tensor([[0.25, 0.5], [0.25, 0.25], [0.5, 0.25]])  # background, round, square
    output = chances.log()[None, :, None]
    batch = Batch(torch.zeros(1), torch.tensor([[[1, 0]]]), ("c",))
    loss = exclusion_loss(output, batch, ("round", "square"), ("round",))
    dice, entropy = 2 * 0.5 / (0.5 + 0.25 + 1), math.log(1.5) / 2
    assert loss.item() == pytest.approx(dice + entropy, abs=1e-4)
    apart = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).clamp_min(1e-9).log()[None, :, None]
    assert exclusion_loss(apart, batch, ("round", "square"), ("round",)).item() == pytest.approx(0, abs=1e-6)
    assert exclusion_loss(output, batch, ("round", "square"), ("round", "square")).item() == 0  # nothing is unknown


def trained(stage: Stage, site: str) -> Any:
    order = stage.method.send(stage.server, stage.roster[site], stage.rounds[0])
    place = stage.workers[site].site
    return stage.method.train(place, stage.method.remember(place), order, stage.rounds[0])[0]


def test_a_site_trains_the_decoder_and_its_organs_encoders_once_per_organ(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "menu-net", **FAST), tmp_path)
    start = stage.server.global_
    ada, cid = trained(stage, "ada"), trained(stage, "cid")
    assert set(ada.encoders) == {"round"} and set(cid.encoders) == {"round", "square"}
    assert cid.steps == 2 * ada.steps  # eight cases each
    for reply in (ada, cid):
        assert all(not torch.equal(tensor, start[name]) for name, tensor in reply.decoder.items() if "weight" in name)
        for part in reply.encoders.values():
            assert any(not torch.equal(tensor, start[name]) for name, tensor in part.items())


def ones(like: Weights, value: float) -> Weights:
    return like.map(lambda tensor: torch.full_like(tensor, value))


@pytest.mark.parametrize(
    ("rule", "answered", "disc", "square"),
    [
        ("annotating", {"ada": 1.0, "bea": 2.0, "cid": 4.0}, (1 + 4) / 2, (2 + 4) / 2),
        ("annotating", {"ada": 1.0}, 1.0, 0.0),  # nobody who answered draws the square: it stays
        ("half", {"ada": 1.0, "bea": 2.0, "cid": 4.0}, (1 + 4 + 0.5 * 0) / 2.5, (2 + 4 + 0.5 * 0) / 2.5),
        ("half", {"ada": 1.0}, 1.0, 0.0),
        ("half", {"cid": 4.0}, 4.0, 4.0),
    ],
)
def test_an_organs_encoder_is_the_mean_of_those_who_draw_it(
    rule: str, answered: dict[str, float], disc: float, square: float, organs: Path
) -> None:
    """Three sites of equal size; the server's encoders are 0."""
    task = toy_study(organs, "menu-net").task
    method: Any = MENUNet(encoder_shares=rule)
    stage = {"ada": ("round",), "bea": ("square",), "cid": ("round", "square")}
    names = encoder_names(menu(task))
    whole = ones(menu(task).initial(), 0.0)
    server = method.Server(whole, names, stage, dict.fromkeys(stage, 8))
    inside = {name for found in names.values() for name in found}
    replies = {}
    for site, value in answered.items():
        encoders = {o: ones(whole.split(set(names[o]).__contains__)[0], value) for o in stage[site]}
        replies[site] = method.Uplink(ones(whole.split(lambda n: n not in inside)[0], value), encoders, 0.0, 1)
    merged = method.merge(server, replies, None).global_
    assert list(merged) == list(whole)
    for name, tensor in merged.items():
        plain = sum(answered.values()) / len(answered)
        expected = disc if name in names["round"] else square if name in names["square"] else plain
        assert torch.allclose(tensor, torch.full_like(tensor, expected)), name


def test_without_exclusion_the_loss_is_the_marginal_one_and_weights_are_others(organs: Path, tmp_path: Path) -> None:
    stages = {
        v: Stage(toy_study(organs, "menu-net", method__exclusion=v, **FAST), tmp_path / str(v)) for v in (0.0, 1.0)
    }
    sent = {value: trained(stage, "ada") for value, stage in stages.items()}
    assert sent[0.0].decoder.digest != sent[1.0].decoder.digest
    assert sent[0.0].loss < sent[1.0].loss  # the term is added
    site = stages[0.0].workers["ada"].site
    batch = next(iter(site.batches(stages[0.0].rounds[0])))
    output = torch.randn(len(batch.cases), 3, 16, 16, generator=torch.Generator().manual_seed(0))
    off, on = (stage.method.site_loss(site, batch, output) for stage in stages.values())  # type: ignore[attr-defined]
    assert off == site.task.loss(output, batch)
    assert on - off == pytest.approx(exclusion_loss(output, batch, site.task.labels, ("round",)).item(), rel=1e-5)


def test_studies_that_cannot_work(organs: Path) -> None:
    study = toy_study(organs, "menu-net", task__unannotated="ignored")
    with pytest.raises(StudyError, match="menu-net has its own loss"):
        MENUNet().check(study.task, {}, study.local)
    with pytest.raises(StudyError, match="encoder_shares = 'x': it must be one of annotating, half"):
        toy_study(organs, "menu-net", method__encoder_shares="x")
    with pytest.raises(StudyError, match=r"exclusion = .*from 0 up"):
        toy_study(organs, "menu-net", method__exclusion=-1.0)
