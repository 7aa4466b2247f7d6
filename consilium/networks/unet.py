"""The U-Net of the segmentation studies: MONAI's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.fields import check_below_one, check_choices
from consilium.networks.nested_unet import NORMS, NestedUNet


@dataclass(frozen=True)
class UNet:
    """A U-Net with strided convolutions and `residual_units` per level."""

    widths: tuple[int, ...] = (16, 32, 64, 128, 256)  # channels per level; each level halves the image
    residual_units: int = 2
    norm: str = "instance"  # "batch", "group"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise StudyError(f"[task] widths = {list(self.widths)}: at least two positive numbers are needed.")
        check_choices(self, "task", norm=NORMS)
        if self.residual_units < 0:
            raise StudyError(f"[task] residual_units = {self.residual_units}: it cannot be negative.")
        check_below_one(self, "task", "dropout")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        network = NestedUNet(dimensions, channels, outputs, self.widths, self.residual_units, self.norm, self.dropout)
        return AnySize(network, 1 << (len(self.widths) - 1))


class AnySize(nn.Module):
    """Lets a network that needs multiples of `divisor` take images of any size: pads them and crops the output."""

    def __init__(self, net: nn.Module, divisor: int) -> None:
        super().__init__()
        self.net, self.divisor = net, divisor

    def forward(self, images: Tensor) -> Tensor:
        padded, size = self.padded(images, self.divisor)
        return self.cut(self.net(padded), size)

    @staticmethod
    def padded(images: Tensor, divisor: int | Sequence[int]) -> tuple[Tensor, torch.Size]:
        """Images whose sides are multiples of `divisor`, one for all or one each, and the sides they had."""
        size = images.shape[2:]
        divisors = [divisor] * len(size) if isinstance(divisor, int) else divisor
        gaps = [-side % by for side, by in zip(size, divisors, strict=True)]
        if not any(gaps):
            return images, size
        margins = [width for gap in reversed(gaps) for width in (0, gap)]
        return nn.functional.pad(images, margins, mode="replicate"), size

    @staticmethod
    def cut(output: Tensor, size: torch.Size) -> Tensor:
        """The part of an output that belongs to images of this size."""
        window: Any = (..., *(slice(side) for side in size))
        return output if output.shape[2:] == size else output[window]
