"""A U-Net with attention at its bottleneck: within it, and to a second, fixed encoder (FedCRLD)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks import Network
from consilium.networks.parts import encoder_stages
from consilium.networks.plain_unet import PlainUNet, Supervised
from consilium.networks.unet import AnySize, UNet


class Featured(NamedTuple):
    """The network's result in training: its output, and the bottleneck after attention."""

    output: Tensor | Supervised
    features: Tensor


@dataclass(frozen=True)
class Attended:
    """The network `inner` with attention at the bottleneck."""

    inner: Network
    self_attention: bool = True
    cross_attention: bool = True  # to the bottleneck of `far`, an encoder that is not trained

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        if not isinstance(self.inner, (PlainUNet, UNet)):
            raise StudyError("this method changes the network inside; take 'unet2d', 'unet3d' or 'plain-unet'.")
        return _AttendedUNet(self, self.inner.build(dimensions, channels, outputs), self.inner.widths[-1])


class _AttendedUNet(nn.Module):
    def __init__(self, how: Attended, net: Any, width: int) -> None:
        super().__init__()
        self.net = net
        self.within = _Attention(width) if how.self_attention else None
        self.across = _Attention(width) if how.cross_attention else None
        self.far = nn.ModuleList(map(_fixed, encoder_stages(net) if how.cross_attention else []))
        self._far: list[Tensor] = []  # of the current pass: the other encoder's output, and the features
        self._features: list[Tensor] = []
        encoder_stages(net)[-1].register_forward_hook(lambda module, given, output: self._attended(output))

    def train(self, mode: bool = True) -> _AttendedUNet:
        super().train(mode)
        self.far.eval()  # always in evaluation mode
        return self

    def forward(self, images: Tensor) -> Tensor | Supervised | Featured:
        padded, size = AnySize.padded(images, self.net.divisor)
        if self.across is not None:
            flow = padded
            with torch.no_grad():
                for stage in self.far:
                    flow = stage(flow)
            self._far.append(flow)
        output = _cut(self.net(padded), size)
        features = self._features.pop()
        return Featured(output, features) if self.training else output

    def _attended(self, features: Tensor) -> Tensor:
        if self.within is not None:
            features = self.within(features, features)
        if self.across is not None:
            features = self.across(features, self._far.pop())
        self._features.append(features)
        return features


class _Attention(nn.Module):
    """Attention of every position of one feature map to all positions of another; the result is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ask = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, features: Tensor, others: Tensor) -> Tensor:
        """Both are (batch, width, *spatial)."""
        query, keys = (flow.flatten(2).transpose(1, 2) for flow in (features, others))
        told, _ = self.ask(query, keys, keys, need_weights=False)
        total: Tensor = features + told.transpose(1, 2).reshape(features.shape)
        return total


def _fixed(stage: nn.Module) -> nn.Module:
    """A copy whose parameters are buffers: they are part of the weights, but no optimiser changes them."""
    stage = deepcopy(stage)
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return stage


def _cut(output: Tensor | Supervised, size: torch.Size) -> Tensor | Supervised:
    if isinstance(output, Supervised):
        asides = tuple((weight, AnySize.cut(aside, size)) for weight, aside in output.asides)
        return Supervised(AnySize.cut(output.main, size), asides)
    return AnySize.cut(output, size)


def far_names(network: nn.Module) -> dict[str, str]:
    """The tensors of the fixed encoder, with the tensors they copy: `far.0.…` → `net.encoder.0.…`."""
    assert isinstance(network, _AttendedUNet)
    if network.across is None:
        return {}
    place = {id(tensor): name for name, tensor in network.state_dict(keep_vars=True).items()}
    return {
        f"far.{i}.{name}": place[id(tensor)]
        for i, stage in enumerate(encoder_stages(network.net))
        for name, tensor in stage.state_dict(keep_vars=True).items()
    }
