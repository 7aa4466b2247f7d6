"""DOD*: the head by hand, what is averaged, every component off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from consilium.batch import Batch
from consilium.contract import Stage
from consilium.errors import StudyError
from consilium.methods.dod import DOD, dynamic, organ_loss
from consilium.methods.fedavg_foreground import foreground_only
from consilium.networks.cnn import CNN
from consilium.networks.dynamic import Dynamic, with_width
from consilium.networks.plain_unet import PlainUNet, Supervised
from consilium.networks.unet import UNet
from tests.toy import toy_study

IMAGES = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
DEEP = {"task__network": "plain-unet", "task__widths": [4, 8, 8], "task__residual_units": None, "local__batch_size": 8}


@pytest.mark.parametrize("inner", [PlainUNet((4, 8, 8)), UNet((4, 8, 16), 1)], ids=["plain", "monai"])
def test_three_convolutions_by_hand(inner: Any) -> None:
    """The controller's 8·8+8, 8·8+8 and 1·8+1 = 153 numbers, as ordinary 1×1 convolutions."""
    network: Any = Dynamic(inner, 3, (2, 0)).build(2, 1, 4).eval()
    assert network.controller.out_features == 153 and network.controller.in_features == inner.widths[-1] + 3
    maps, seen = [], []
    network.net.register_forward_hook(lambda module, given, output: maps.append(output))
    network.controller.register_forward_hook(lambda module, given, output: seen.append((given[0], output)))
    answer = network(IMAGES)
    assert maps[0].shape == (2, 8, 8, 8) and answer.shape == (2, 2, 8, 8)
    for place, organ in enumerate((2, 0)):
        told, numbers = seen[place]
        assert told[:, -3:].tolist() == [[float(i == organ) for i in range(3)]] * 2
        for case in range(2):
            n, flow = numbers[case], maps[0][case : case + 1]
            flow = functional.conv2d(flow, n[:64].reshape(8, 8, 1, 1), n[64:72]).relu()
            flow = functional.conv2d(flow, n[72:136].reshape(8, 8, 1, 1), n[136:144]).relu()
            flow = functional.conv2d(flow, n[144:152].reshape(1, 8, 1, 1), n[152:])
            assert torch.allclose(answer[case, place], flow[0, 0], atol=1e-5)


def test_the_head_is_the_images_and_the_organs_own() -> None:
    torch.manual_seed(0)
    network: Any = Dynamic(UNet((4, 8), 1), 2, (0, 1)).build(2, 1, 3).eval()
    fixed: Any = Dynamic(UNet((4, 8), 1), 2, (0, 1), controlled=False).build(2, 1, 3).eval()
    answer, same = network(IMAGES), fixed(IMAGES)
    assert not torch.allclose(answer[:, 0], answer[:, 1])
    assert torch.equal(same[:, 0], same[:, 1])  # without the controller an organ cannot be told from another
    numbers: list[torch.Tensor] = []
    network.controller.register_forward_hook(lambda module, given, output: numbers.append(output))
    network(IMAGES)
    assert not torch.allclose(numbers[0][0], numbers[0][1])


def test_encoder_and_supervision_are_averaged_the_rest_stays(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "dod", **DEEP), tmp_path)
    stage.round(0)
    common = {".".join(name.split(".")[:2]) for name in stage.server.global_}
    assert common == {"net.encoder", "net.supervision"}
    local = set(stage.server.personal["ada"]) - set(stage.server.global_)
    assert {name.split(".")[0] for name in local} == {"net", "controller"}
    assert {name.split(".")[1] for name in local if name.startswith("net.")} == {"decoder", "head"}
    assert [phase.name for phase in stage.method.phases(3)] == ["train"]  # no teachers


def test_the_loss_is_of_the_sites_own_organs_by_hand(organs: Path) -> None:
    """One logit per own organ, each by a sigmoid; supervised heads have all channels, of which its own count."""
    task = toy_study(organs, "dod").task
    batch = Batch(torch.zeros(1), torch.tensor([[[2, 0, 1]]]), ("c",), labels=(("square",),))
    logit = torch.tensor([[[[1.0, -2.0, 0.0]]]])
    p = logit.sigmoid().flatten()
    main = 1 - 2 * p[0] / (p.sum() + 1)
    assert organ_loss(task, ("square",), logit, batch).item() == pytest.approx(main.item(), abs=1e-4)
    aside = torch.randn(1, 3, 1, 3, generator=torch.Generator().manual_seed(0))
    deep = organ_loss(task, ("square",), Supervised(logit, ((0.5, aside),)), batch)
    extra = foreground_only(task).loss(aside, batch)
    assert deep.item() == pytest.approx(main.item() + 0.5 * extra.item(), abs=1e-4)


def test_each_component_matters(organs: Path, tmp_path: Path) -> None:
    """Controller and deep supervision off, one at a time: other weights of the encoder, another loss."""
    found = {}
    for name, changes in {
        "whole": {},
        "no controller": {"method__controller": False},
        "no supervision": {"task__supervision": []},
    }.items():
        stage = Stage(toy_study(organs, "dod", **DEEP, **changes), tmp_path / name)  # type: ignore[arg-type]
        site = stage.workers["cid"].site
        order = stage.method.send(stage.server, stage.roster["cid"], stage.rounds[0])
        sent, _ = stage.method.train(site, stage.method.remember(site), order, stage.rounds[0])
        encoder, _ = sent.global_.split(lambda key: "encoder" in key)
        found[name] = (encoder.digest, sent.loss)
    assert len(set(found.values())) == len({loss for _, loss in found.values()}) == 3


def test_an_organ_is_asked_of_those_who_annotate_it(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "dod", local__batch_size=4), tmp_path)
    stage.round(0)
    predictor = stage.method.deploy(stage.task, None, stage.method.release(stage.server, None))
    assert predictor.passes == 1 + 1 + 2

    def asked(site: str, label: str) -> torch.Tensor:
        return dynamic(stage.task, (label,), True).infer(stage.server.personal[site], IMAGES)[:, 0]

    disc = (asked("ada", "round") + asked("cid", "round")) / 2
    square = (asked("bea", "square") + asked("cid", "square")) / 2
    expected = torch.stack([0 * disc, disc, square], 1)
    assert torch.allclose(predictor.answer(IMAGES).output, expected, atol=1e-6)


def test_studies_that_cannot_work(organs: Path) -> None:
    study = toy_study(organs, "dod", task__unannotated="background")
    with pytest.raises(StudyError, match="dod has a loss on annotated labels only"):
        DOD().check(study.task, {}, study.local)
    with pytest.raises(StudyError, match="changes the network inside; take 'unet2d'"):
        with_width(CNN(), 2, 1, 2, 8)
