"""Which tensors of a network belong to its decoder: told by its modules, never by a part of a name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from consilium.errors import StudyError
from consilium.networks.plain_unet import _PlainUNet
from consilium.networks.unet import AnySize


def decoder_names(network: nn.Module) -> frozenset[str]:
    """The names of all tensors after the lowest level, the output's included; the rest is the encoder's."""
    if isinstance(network, _PlainUNet):
        parts: list[nn.Module] = [network.decoder, network.head]
    elif isinstance(network, AnySize):
        parts = list(_ups(network.net.model))  # type: ignore[arg-type]
    else:
        raise StudyError("this network has no known decoder; set [method] parts = 'whole'.")
    inside = {id(tensor) for part in parts for tensor in part.state_dict(keep_vars=True).values()}
    return frozenset(name for name, tensor in network.state_dict(keep_vars=True).items() if id(tensor) in inside)


def _ups(block: nn.Sequential) -> Iterator[nn.Module]:
    """Of MONAI's nested (down, skip around what is below, up): every way up."""
    from monai.networks.layers import SkipConnection

    if len(block) == 3 and isinstance(block[1], SkipConnection):
        yield block[2]
        if isinstance(block[1].submodule, nn.Sequential):
            yield from _ups(block[1].submodule)
