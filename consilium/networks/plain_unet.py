"""The U-Net of nnU-Net with deep supervision on its encoder, as UFPS uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.networks.unet import AnySize

NORMS = ("instance", "batch", "group")


class Supervised(NamedTuple):
    """A network's result in training: its logits, and those of inner heads with their loss weights."""

    main: Tensor
    asides: tuple[tuple[float, Tensor], ...]


@dataclass(frozen=True)
class PlainUNet:
    """Two 3×3 convolutions per level, strided ones down, transposed ones up; heads on the encoder while it trains."""

    widths: tuple[int, ...] = (32, 64, 128, 256, 320, 320)  # channels per level; each level halves the image
    supervision: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)  # loss weights of heads on encoder levels 1, 2, …; (): none
    residual: bool = False  # each level adds its input to its output
    norm: str = "instance"  # "batch": of the current batch, also in prediction; "group"
    keep_depth: bool = False  # the last level halves rows and columns only, so that thin volumes keep their slices

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise StudyError(f"[task] widths = {list(self.widths)}: at least two positive numbers are needed.")
        check_choices(self, "task", norm=NORMS)
        if self.norm == "group" and any(width % 4 for width in self.widths):
            raise StudyError(f"[task] widths = {list(self.widths)}: group normalisation needs multiples of 4.")
        if any(not 0 < weight < 100 for weight in self.supervision):
            raise StudyError(f"[task] supervision = {list(self.supervision)}: weights are positive numbers.")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        return _PlainUNet(self, dimensions, channels, outputs)


class _PlainUNet(nn.Module):
    """Encoder, decoder and heads under separate names, so that methods can find them."""

    def __init__(self, how: PlainUNet, dimensions: int, channels: int, outputs: int) -> None:
        super().__init__()
        conv: Any = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        strides = _strides(how, dimensions)
        self.encoder = nn.ModuleList(
            _Level(how, dimensions, before, width, stride)
            for stride, (before, width) in zip(strides, pairwise((channels, *how.widths)), strict=True)
        )
        ways = list(zip(strides[1:], pairwise(how.widths), strict=True))
        self.decoder = nn.ModuleList(
            _Up(how, dimensions, below, width, stride) for stride, (width, below) in reversed(ways)
        )
        self.head = conv(how.widths[0], outputs, 1, bias=False)
        inner = how.widths[1:-1]  # neither the full resolution, which has the head, nor the lowest level
        self.supervision = nn.ModuleList(
            conv(width, outputs, 1, bias=False) for width, _ in zip(inner, how.supervision)
        )
        self.weights = how.supervision
        self.divisor = tuple(math.prod(sides) for sides in zip(*strides, strict=True))
        self.resize = "bilinear" if dimensions == 2 else "trilinear"
        self.apply(_start)

    def forward(self, images: Tensor) -> Tensor | Supervised:
        padded, size = AnySize.padded(images, self.divisor)
        levels: list[Tensor] = []
        for level in self.encoder:
            levels.append(level(levels[-1] if levels else padded))
        flow = levels[-1]
        for up, skip in zip(self.decoder, reversed(levels[:-1])):
            flow = up(flow, skip)
        main = AnySize.cut(self.head(flow), size)
        if not self.training or not len(self.supervision):
            return main
        asides = []
        for weight, head, features in zip(self.weights, self.supervision, levels[1:]):
            large = nn.functional.interpolate(head(features), padded.shape[2:], mode=self.resize)
            asides.append((weight, AnySize.cut(large, size)))
        return Supervised(main, tuple(asides))


def _strides(how: PlainUNet, dimensions: int) -> list[tuple[int, ...]]:
    """The stride of each encoder level along each axis."""
    strides = [(1,) * dimensions, *[(2,) * dimensions] * (len(how.widths) - 1)]
    if how.keep_depth and dimensions == 3:
        strides[-1] = (1, 2, 2)
    return strides


class _Level(nn.Module):
    """Two convolutions; the first may halve the image."""

    def __init__(self, how: PlainUNet, dimensions: int, before: int, width: int, stride: int | tuple[int, ...]) -> None:
        super().__init__()
        conv: Any = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.first = nn.Sequential(conv(before, width, 3, stride, 1), _norm(how.norm, dimensions, width), _act())
        self.second = nn.Sequential(conv(width, width, 3, 1, 1), _norm(how.norm, dimensions, width))
        self.act = _act()
        self.pass_by = conv(before, width, 1, stride) if how.residual else None

    def forward(self, features: Tensor) -> Tensor:
        out = self.second(self.first(features))
        if self.pass_by is not None:
            out = out + self.pass_by(features)
        return self.act(out)  # type: ignore[no-any-return]


class _Up(nn.Module):
    """Doubles the image (by `stride`), joins the encoder's features of that size, and mixes them."""

    def __init__(
        self, how: PlainUNet, dimensions: int, below: int, width: int, stride: int | tuple[int, ...] = 2
    ) -> None:
        super().__init__()
        turned: Any = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dimensions]
        self.widen = turned(below, width, stride, stride, bias=False)
        self.mix = _Level(how, dimensions, 2 * width, width, stride=1)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        return self.mix(torch.cat([self.widen(features), skip], dim=1))  # type: ignore[no-any-return]


def _norm(name: str, dimensions: int, width: int) -> nn.Module:
    """Learned scale and shift, without running statistics, which sites would have to average."""
    if name == "group":
        return nn.GroupNorm(4, width)
    if name == "batch":
        batch: Any = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
        return batch(width, track_running_stats=False)  # type: ignore[no-any-return]
    instance: Any = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dimensions]
    return instance(width, affine=True)  # type: ignore[no-any-return]


def _act() -> nn.Module:
    return nn.LeakyReLU(0.01, inplace=True)


def _start(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        nn.init.kaiming_normal_(module.weight, a=0.01)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
