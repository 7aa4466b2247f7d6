"""One encoder per organ, and one decoder on their concatenated features (MENU-Net)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks import Network
from consilium.networks.plain_unet import PlainUNet, _Level, _start, _Up
from consilium.networks.unet import AnySize, UNet


@dataclass(frozen=True)
class MenuNet:
    """As many encoders as organs with the widths of `inner`; the decoder is as wide as all of them together."""

    inner: Network
    organs: int

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        return _MenuNet(levels_of(self.inner), self.organs, dimensions, channels, outputs)


def levels_of(inner: Network) -> PlainUNet:
    """The levels of a U-Net of the study, as those of a plain one without supervision."""
    if isinstance(inner, PlainUNet):
        return replace(inner, supervision=())
    if isinstance(inner, UNet):
        return PlainUNet(inner.widths, (), residual=inner.residual_units > 0, norm=inner.norm)
    raise StudyError("this method makes a network of its own from a U-Net; take 'unet2d', 'unet3d' or 'plain-unet'.")


class _MenuNet(nn.Module):
    def __init__(self, how: PlainUNet, organs: int, dimensions: int, channels: int, outputs: int) -> None:
        super().__init__()
        conv: Any = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
        self.encoders = nn.ModuleList(
            nn.ModuleList(
                _Level(how, dimensions, before, width, stride=1 if level == 0 else 2)
                for level, (before, width) in enumerate(pairwise((channels, *how.widths)))
            )
            for _ in range(organs)
        )
        wide = [organs * width for width in how.widths]
        self.decoder = nn.ModuleList(
            _Up(how, dimensions, below, width) for width, below in reversed(list(pairwise(wide)))
        )
        self.head = conv(wide[0], outputs, 1, bias=False)
        self.divisor = 1 << (len(how.widths) - 1)
        self.apply(_start)

    def forward(self, images: Tensor) -> Tensor:
        padded, size = AnySize.padded(images, self.divisor)
        seen = [self._levels(encoder, padded) for encoder in self.encoders]  # by encoder, then by level
        *skips, flow = (torch.cat(found, dim=1) for found in zip(*seen, strict=True))
        for up, skip in zip(self.decoder, reversed(skips)):
            flow = up(flow, skip)
        return AnySize.cut(self.head(flow), size)

    @staticmethod
    def _levels(encoder: Any, flow: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for stage in encoder:
            found.append(stage(found[-1] if found else flow))
        return found
