"""The parts of a network, encoder and decoder: told by its modules, never by a part of a name."""

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


CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


def encoder_convolutions(network: nn.Module) -> list[nn.Module]:
    """The first convolution of every stage of the encoder, the largest image first; empty for an unknown network."""
    stages: list[nn.Module] = []
    if isinstance(network, _PlainUNet):
        stages = list(network.encoder)
    elif isinstance(network, AnySize):
        stages = list(_downs(network.net.model))  # type: ignore[arg-type]
    return [next(part for part in stage.modules() if isinstance(part, CONVOLUTIONS)) for stage in stages]


def _downs(block: nn.Module) -> Iterator[nn.Module]:
    """Of MONAI's nested (down, skip around what is below, up): every way down, and the bottom."""
    from monai.networks.layers import SkipConnection

    if isinstance(block, nn.Sequential) and len(block) == 3 and isinstance(block[1], SkipConnection):
        yield block[0]
        yield from _downs(block[1].submodule)
    else:
        yield block


def _ups(block: nn.Sequential) -> Iterator[nn.Module]:
    """Of MONAI's nested (down, skip around what is below, up): every way up."""
    from monai.networks.layers import SkipConnection

    if len(block) == 3 and isinstance(block[1], SkipConnection):
        yield block[2]
        if isinstance(block[1].submodule, nn.Sequential):
            yield from _ups(block[1].submodule)
