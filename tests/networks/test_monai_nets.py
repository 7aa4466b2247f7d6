"""MONAI's networks as studies name them: the images they take, their sizes, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from consilium.errors import StudyError
from consilium.networks.monai_nets import DenseNet, DynUNet, ResNet, SegResNet, SwinUNETR

pytestmark = pytest.mark.xdist_group("monai")  # one process loads it
SEGMENT: list[tuple[Any, tuple[int, ...]]] = [
    (DynUNet(widths=(4, 8, 8)), (13, 18)),
    (DynUNet(widths=(4, 8, 8), flat_levels=1, residual=True, norm="batch"), (5, 12, 9)),
    (SegResNet(width=8, blocks=(1, 1)), (13, 18)),
    (SegResNet(width=8, blocks=(1, 1)), (5, 6, 7)),
    (SwinUNETR(width=12), (33, 20)),
]


@pytest.mark.parametrize(("network", "size"), SEGMENT)
def test_segmentation_of_any_size_learns(network: Any, size: tuple[int, ...]) -> None:
    built = network.build(len(size), 2, 3)
    output = built(torch.rand(2, 2, *size))
    assert output.shape == (2, 3, *size)
    output.square().mean().backward()
    assert all(p.grad is not None for p in built.parameters() if p.requires_grad)


@pytest.mark.parametrize("size", [(40, 33), (16, 18, 20)])
@pytest.mark.parametrize(
    "network",
    [DenseNet(8, 4, (1, 2), norm="group"), ResNet((4, 4, 8, 8), (1, 1, 1, 1), norm="instance"), ResNet((4,) * 4)],
)
def test_classification_of_any_size(network: Any, size: tuple[int, ...]) -> None:
    built = network.build(len(size), 1, 5).eval()
    assert built(torch.rand(2, 1, *size)).shape == (2, 5)


def test_flat_levels_keep_the_slices() -> None:
    network = DynUNet(widths=(4, 8, 8), flat_levels=1).build(3, 1, 2)
    strides = [tuple(m.stride) for m in network.modules() if isinstance(m, nn.Conv3d) and max(m.stride) > 1]
    assert strides == [(1, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DynUNet(widths=(8,)), "at least 2"),
        (lambda: DynUNet(flat_levels=7), "0 to 4"),
        (lambda: DynUNet(flat_levels=1).build(2, 1, 2), "for volumes"),
        (lambda: SegResNet(width=12), "multiple of 8"),
        (lambda: SwinUNETR(width=16), "multiple of 12"),
        (lambda: DenseNet(norm="layer"), "instance, batch, group"),
        (lambda: ResNet(widths=(8, 8)), "four positive numbers"),
    ],
)
def test_what_cannot_be_built_is_refused(make: Any, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        make()
