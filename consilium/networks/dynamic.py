"""A U-Net in which a controller makes the head for each image and organ (DoDNet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks import Network
from consilium.networks.parts import encoder_stages, head
from consilium.networks.plain_unet import PlainUNet, Supervised
from consilium.networks.unet import UNet


@dataclass(frozen=True)
class Dynamic:
    """The network `inner` with three 1×1 convolutions, width-width-1, whose weights a controller makes per organ."""

    inner: Network
    organs: int  # how many there are, the length of the controller's one-hot vector
    asked: tuple[int, ...]  # the organs to predict, in this order
    width: int = 8
    controlled: bool = True  # False: the three convolutions are the same for every image and organ

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        return _DynamicUNet(self, dimensions, channels, outputs)


class _DynamicUNet(nn.Module):
    """Outputs one logit per requested organ: (batch, asked, *spatial)."""

    def __init__(self, how: Dynamic, dimensions: int, channels: int, outputs: int) -> None:
        super().__init__()
        self.how = how
        self.net, features = with_width(how.inner, dimensions, channels, outputs, how.width)
        w = how.width
        self.sizes = [(w, w), (w, w), (1, w)]  # out, in
        numbers = sum(out * (into + 1) for out, into in self.sizes)
        self.controller: nn.Module = (
            nn.Linear(features + how.organs, numbers) if how.controlled else _Constant(how.organs, numbers)
        )
        self._seen: list[Tensor] = []  # the bottleneck of the current pass
        encoder_stages(self.net)[-1].register_forward_hook(lambda module, given, output: self._seen.append(output))

    def forward(self, images: Tensor) -> Tensor | Supervised:
        output = self.net(images)
        pooled = self._seen.pop().flatten(2).mean(2)
        shared = output.main if isinstance(output, Supervised) else output
        answers = torch.cat([self._answer(shared, pooled, organ) for organ in self.how.asked], dim=1)
        return Supervised(answers, output.asides) if isinstance(output, Supervised) else answers

    def _answer(self, features: Tensor, pooled: Tensor, organ: int) -> Tensor:
        """The logit of one organ, (batch, 1, *spatial)."""
        which = torch.zeros(len(pooled), self.how.organs, device=pooled.device, dtype=pooled.dtype)
        which[:, organ] = 1
        numbers = self.controller(torch.cat([pooled, which], dim=1))
        flow, at = features.flatten(2), 0
        for layer, (out, into) in enumerate(self.sizes):
            weight = numbers[:, at : at + out * into].reshape(-1, out, into)
            bias = numbers[:, at + out * into : at + out * (into + 1)].unsqueeze(2)
            flow, at = torch.baddbmm(bias, weight, flow), at + out * (into + 1)
            flow = flow.relu() if layer < len(self.sizes) - 1 else flow
        return flow.reshape(len(features), 1, *features.shape[2:])


class _Constant(nn.Module):
    """A controller that ignores its input."""

    def __init__(self, organs: int, numbers: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(numbers) * 0.3)

    def forward(self, told: Tensor) -> Tensor:
        return self.numbers.expand(len(told), -1)


def with_width(inner: Network, dimensions: int, channels: int, outputs: int, width: int) -> tuple[Any, int]:
    """A U-Net that outputs `width` maps instead of logits, and the number of channels of its bottleneck.

    Heads that supervise the encoder still have `outputs` channels.
    """
    if not isinstance(inner, (PlainUNet, UNet)):
        raise StudyError("this method changes the network inside; take 'unet2d', 'unet3d' or 'plain-unet'.")
    if isinstance(inner, UNet):
        return inner.build(dimensions, channels, width), inner.widths[-1]
    network: Any = inner.build(dimensions, channels, outputs)
    last: Any = head(network)
    network.head = type(last)(last.in_channels, width, last.kernel_size, bias=last.bias is not None)
    nn.init.kaiming_normal_(network.head.weight, a=0.01)
    return network, inner.widths[-1]
