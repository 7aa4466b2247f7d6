"""The parts of a network, found by its modules and their types, never by names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from consilium.errors import StudyError
from consilium.networks.nested_unet import NestedUNet, Skip
from consilium.networks.plain_unet import _PlainUNet
from consilium.networks.unet import AnySize

PARTS = ("encoder", "bottleneck", "decoder", "head", "norm", "supervision")
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm)  # _NormBase: batch and instance normalisation
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)  # a network's last layer is one of these


def part_names(network: nn.Module, part: str) -> frozenset[str]:
    """The names of all tensors of a part; empty if the network has none there.

    The encoder ends with the lowest level, the bottleneck. The decoder is everything after it, with the head. The head
    is the last layer. Heads on the encoder during training are the supervision. Normalisation is in both encoder and
    decoder. A network without a known encoder and decoder still has a head and normalisation.
    """
    if part == "norm":
        return _names(network, (module for module in network.modules() if isinstance(module, NORMALISATIONS)))
    if part == "head":
        return _names(network, [head(network)])
    if part == "supervision":
        return _names(network, [network.supervision] if isinstance(network, _PlainUNet) else [])
    stages = encoder_stages(network)
    if not stages:
        raise StudyError(f"this network has no known {part}; take 'unet2d', 'unet3d' or 'plain-unet' as its network.")
    if part == "bottleneck":
        return _names(network, stages[-1:])
    return _names(network, stages if part == "encoder" else decoder_stages(network))


def decoder_names(network: nn.Module) -> frozenset[str]:
    """The names of all tensors after the lowest level, the output's included; the rest is the encoder's."""
    if not decoder_stages(network):
        raise StudyError("this network has no known decoder; set [method] parts = 'whole'.")
    return _names(network, decoder_stages(network))


def encoder_stages(network: nn.Module) -> list[nn.Module]:
    """The encoder, the largest image first and the bottleneck last; empty for an unknown network.

    Each stage takes the output of the one before it; the first takes the padded image.
    """
    if isinstance(network, _PlainUNet):
        return list(network.encoder)
    return list(_downs(network.net.model)) if _is_nested(network) else []  # type: ignore[union-attr, arg-type]


def decoder_stages(network: nn.Module) -> list[nn.Module]:
    """Everything after the bottleneck, with the head; empty for an unknown network."""
    if isinstance(network, _PlainUNet):
        return [*network.decoder, network.head]
    return list(_ups(network.net.model)) if _is_nested(network) else []  # type: ignore[union-attr, arg-type]


def head(network: nn.Module) -> nn.Module:
    """The last layer: the output convolution of a U-Net, the last layer of any other network."""
    if isinstance(network, _PlainUNet):
        return network.head  # type: ignore[no-any-return]
    place = decoder_stages(network)[0] if _is_nested(network) else network  # the outermost decoder stage is the last
    layers = [module for module in place.modules() if isinstance(module, LAYERS)]
    if not layers:
        raise StudyError("this network has no convolution and no linear layer, so its head is not known.")
    return layers[-1]


def encoder_convolutions(network: nn.Module) -> list[nn.Module]:
    """The first convolution of every stage of the encoder, the largest image first; empty for an unknown network."""
    return [
        next(part for part in stage.modules() if isinstance(part, CONVOLUTIONS)) for stage in encoder_stages(network)
    ]


def _names(network: nn.Module, parts: Iterable[nn.Module]) -> frozenset[str]:
    inside = {id(tensor) for part in parts for tensor in part.state_dict(keep_vars=True).values()}
    return frozenset(name for name, tensor in network.state_dict(keep_vars=True).items() if id(tensor) in inside)


def _is_nested(network: nn.Module) -> bool:
    return isinstance(network, AnySize) and isinstance(network.net, NestedUNet)


def _downs(block: nn.Module) -> Iterator[nn.Module]:
    """The encoder stages and the bottleneck of a nested (down, skip connection, up)."""
    if isinstance(block, nn.Sequential) and len(block) == 3 and isinstance(block[1], Skip):
        yield block[0]
        yield from _downs(block[1].submodule)
    else:
        yield block


def _ups(block: nn.Sequential) -> Iterator[nn.Module]:
    """The decoder stages of a nested (down, skip connection, up)."""
    if len(block) == 3 and isinstance(block[1], Skip):
        yield block[2]
        if isinstance(block[1].submodule, nn.Sequential):
            yield from _ups(block[1].submodule)
