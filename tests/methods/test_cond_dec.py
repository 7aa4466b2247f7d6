"""Cond-dec: the index in the decoder, its limit, one pass per site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.contract import Stage
from consilium.errors import StudyError
from consilium.methods.cond_dec import CondDec, conditioned, index_of
from consilium.networks.conditioned import Conditioned, decoder_norms
from consilium.networks.parts import encoder_stages
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet
from tests.toy import toy_study

FAST = {"local__batch_size": 4}
IMAGES = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def test_the_constant_is_added_in_the_norms_own_magnitude() -> None:
    """Of each image by itself: the norm gives −1 and 1 in every channel, so half of 1 is added."""
    layer: Any = decoder_norms(Conditioned(UNet((2, 4), 1), 0.5).build(2, 1, 2))[0]
    plain = type(layer)(2, affine=True)
    given = torch.tensor([[[[1.0, 3.0]], [[5.0, 9.0]]], [[[0.0, 2.0]], [[7.0, 8.0]]]])
    assert torch.allclose(layer(given), plain(given) + 0.5, atol=1e-4)
    strong = torch.cat([given[:1], 0 * given[:1]])
    assert torch.equal(layer(strong)[:1], layer(given[:1]))  # an image's own, whatever lies beside it


@pytest.mark.parametrize("inner", [PlainUNet((4, 8)), UNet((4, 8), 1)], ids=["plain", "monai"])
def test_only_the_decoder_is_told_and_weights_have_the_same_names(inner: Any) -> None:
    plain, told = inner.build(2, 1, 3).eval(), Conditioned(inner, 1.0).build(2, 1, 3).eval()
    told.load_state_dict(plain.state_dict())
    seen: list[torch.Tensor] = []
    for network in (plain, told):
        encoder_stages(network)[-1].register_forward_hook(lambda module, given, output: seen.append(output))
    first, second = plain(IMAGES), told(IMAGES)
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(first, second)
    assert len(decoder_norms(told)) == len([m for m in told.modules() if hasattr(m, "num_features")]) - len(
        [m for stage in encoder_stages(told) for m in stage.modules() if hasattr(m, "num_features")]
    )


def _rounds(organs: Path, tmp_path: Path, name: str, **changes: Any) -> Stage:
    stage = Stage(toy_study(organs, name, **FAST, **changes), tmp_path / (name + str(changes)))
    for index in range(2):
        stage.round(index)
    return stage


def test_without_the_index_it_is_fedavg_on_the_foreground_bit_by_bit(organs: Path, tmp_path: Path) -> None:
    """The one component switched off, and on: weights and loss are others."""
    off, on = (_rounds(organs, tmp_path, "cond-dec", method__scale=scale) for scale in (0.0, 1.0))
    plain = _rounds(organs, tmp_path, "fedavg-foreground")
    assert off.server.global_.digest == plain.server.global_.digest != on.server.global_.digest
    losses = []
    for stage in (off, on):
        site = stage.workers["ada"].site
        order = stage.method.send(stage.server, stage.roster["ada"], stage.rounds[2])
        losses.append(stage.method.train(site, stage.method.remember(site), order, stage.rounds[2])[0].loss)
    assert losses[0] != losses[1]


def test_an_organ_comes_from_the_passes_of_the_sites_that_annotate_it(organs: Path, tmp_path: Path) -> None:
    """ada (1/3) draws the disc, bea (2/3) the square, cid (1) both; background is 0."""
    stage = _rounds(organs, tmp_path, "cond-dec")
    predictor = stage.method.deploy(stage.task, None, stage.method.release(stage.server, None))
    ada, bea, cid = (conditioned(stage.task, k / 3).infer(stage.server.global_, IMAGES) for k in (1, 2, 3))
    expected = torch.stack([0 * ada[:, 0], (ada[:, 1] + cid[:, 1]) / 2, (bea[:, 2] + cid[:, 2]) / 2], 1)
    assert torch.allclose(predictor.answer(IMAGES).output, expected, atol=1e-6)
    assert not torch.allclose(ada[:, 1], cid[:, 1])
    assert predictor.passes == 3 and (predictor.model, predictor.when) == ("global", "merged")
    assert [index_of(i, 3) for i in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


def test_studies_that_cannot_work(organs: Path) -> None:
    with pytest.raises(StudyError, match=r"scale = -1\.0: it must be a number from 0 up"):
        toy_study(organs, "cond-dec", method__scale=-1.0)
    with pytest.raises(StudyError, match="no decoder with normalisation"):
        decoder_norms(nn.Conv2d(1, 1, 1))
    task = toy_study(organs, "cond-dec", task__unannotated="background").task
    with pytest.raises(StudyError, match="cond-dec has a loss on annotated labels only"):
        CondDec().check(task, {}, None)
