"""A network with a constant added after every normalisation layer of its decoder (Cond-dec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks import Network
from consilium.networks.parts import NORMALISATIONS, decoder_stages


@dataclass(frozen=True)
class Conditioned:
    """The network `inner` with `constant` added after each decoder norm, in multiples of the norm's own output."""

    inner: Network
    constant: float

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        network = self.inner.build(dimensions, channels, outputs)
        for layer in decoder_norms(network):
            layer.register_forward_hook(partial(_raised, self.constant))  # no new tensors: weights have the same names
        return network


def decoder_norms(network: nn.Module) -> list[nn.Module]:
    """The normalisation layers of the decoder; StudyError for a network without any."""
    found: list[nn.Module] = [
        layer for stage in decoder_stages(network) for layer in stage.modules() if isinstance(layer, NORMALISATIONS)
    ]
    if not found:
        raise StudyError(
            "this network has no decoder with normalisation to add a site's index to; take 'unet2d', 'unet3d' or "
            "'plain-unet'."
        )
    return found


def _raised(constant: float, layer: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Add the constant in units of the image's own magnitude, so that images of a batch are independent."""
    size = output.detach().abs().mean(tuple(range(1, output.dim())), keepdim=True)
    return output + constant * size
