"""What is built here without MONAI is what MONAI builds: names, first weights, outputs and gradients, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consilium.networks.nested_unet import NestedUNet
from consilium.tasks.dice import dice_loss

pytestmark = pytest.mark.xdist_group("monai")  # one process loads it


@pytest.mark.parametrize(
    ("dimensions", "widths", "residual", "norm", "dropout"),
    [
        (2, (8, 16, 32, 64), 0, "instance", 0.0),
        (2, (4, 8, 16), 2, "batch", 0.2),
        (2, (4, 4), 1, "group", 0.0),
        (3, (4, 8, 16), 2, "instance", 0.0),
        (3, (4, 8), 3, "batch", 0.0),
    ],
)
def test_the_unet_is_monais(dimensions: int, widths: tuple[int, ...], residual: int, norm: str, dropout: float) -> None:
    from monai.networks.nets import UNet as MonaiUNet

    torch.manual_seed(1)
    ours = NestedUNet(dimensions, 2, 3, widths, residual, norm, dropout)
    after_ours = torch.rand(1)
    torch.manual_seed(1)
    theirs = MonaiUNet(**ours.as_monai)  # type: ignore[arg-type]
    assert torch.equal(torch.rand(1), after_ours)
    mine, its = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(its)
    assert all(torch.equal(mine[name], its[name]) for name in its)
    images = torch.rand(2, 2, *[16] * dimensions)
    for network in (ours, theirs):
        torch.manual_seed(2)  # of dropout
        output = network(images)
        output.square().sum().backward()
        network.found = output  # type: ignore[assignment]
    assert torch.equal(ours.found, theirs.found)  # type: ignore[arg-type]
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, other.grad), name


@pytest.mark.parametrize(
    ("exclusive", "background", "how"),
    [
        (False, True, {"sigmoid": True}),
        (True, True, {"softmax": True, "to_onehot_y": True}),
        (True, False, {"softmax": True, "to_onehot_y": True, "include_background": False}),
    ],
)
def test_the_dice_loss_is_monais(exclusive: bool, background: bool, how: dict[str, Any]) -> None:
    from monai.losses import DiceLoss

    torch.manual_seed(3)
    logits = torch.randn(3, 4, 9, 7)
    truth = torch.randint(0, 4, (3, 1, 9, 7)) if exclusive else torch.randint(0, 2, (3, 4, 9, 7)).float()
    slopes = []
    for loss in (lambda x: dice_loss(x, truth, exclusive, background).mean(), lambda x: DiceLoss(**how)(x, truth)):
        output = logits.clone().requires_grad_()
        found = loss(output)
        found.backward()
        slopes.append((found.detach(), output.grad))
    assert torch.equal(slopes[0][0], slopes[1][0])
    assert torch.equal(slopes[0][1], slopes[1][1])
    by_case = DiceLoss(**how, reduction="none")(logits, truth).flatten(1)
    assert torch.equal(dice_loss(logits, truth, exclusive, background), by_case)


def test_dice_and_cross_entropy_are_monais() -> None:
    from monai.losses import DiceCELoss

    from consilium.tasks.segmentation import Segmentation

    torch.manual_seed(4)
    logits, truth = torch.randn(3, 3, 9, 7), torch.randint(0, 3, (3, 9, 7))
    task = Segmentation(("a", "b"), 2, 1, model=None, selector=None, loss_name="dice+ce")  # type: ignore[arg-type]
    theirs = DiceCELoss(softmax=True, to_onehot_y=True, include_background=False)(logits, truth[:, None])
    ours = task._weighted_mean(logits, truth[:, None], None)
    assert torch.equal(ours, theirs)
