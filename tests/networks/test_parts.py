"""The parts of a network by module type: which tensors are in which part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from consilium.errors import StudyError
from consilium.networks.cnn import CNN
from consilium.networks.parts import PARTS, encoder_stages, head, part_names
from consilium.networks.plain_unet import PlainUNet
from consilium.networks.unet import UNet
from consilium.networks.vgg import SmallVGG

PLAIN = PlainUNet((4, 8, 8)).build(2, 1, 3)
MONAI = UNet((4, 8, 16), 1).build(2, 1, 3)


def starts(network: nn.Module, *prefixes: str) -> set[str]:
    return {name for name in network.state_dict() if name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("network", "part", "prefixes"),
    [
        (PLAIN, "encoder", ("encoder.",)),
        (PLAIN, "bottleneck", ("encoder.2.",)),
        (PLAIN, "decoder", ("decoder.", "head.")),
        (PLAIN, "head", ("head.",)),
        (PLAIN, "supervision", ("supervision.",)),
        (MONAI, "encoder", ("net.model.0.", "net.model.1.submodule.0.", "net.model.1.submodule.1.")),
        (MONAI, "bottleneck", ("net.model.1.submodule.1.",)),
        (MONAI, "decoder", ("net.model.2.", "net.model.1.submodule.2.")),
        (MONAI, "head", ("net.model.2.1.",)),
        (MONAI, "supervision", ("none",)),
    ],
)
def test_parts_of_our_networks(network: nn.Module, part: str, prefixes: tuple[str, ...]) -> None:
    assert part_names(network, part) == starts(network, *prefixes)


@pytest.mark.parametrize("network", [PLAIN, MONAI], ids=["plain", "monai"])
def test_encoder_decoder_and_supervision_are_the_whole_network(network: nn.Module) -> None:
    parts = [part_names(network, part) for part in ("encoder", "decoder", "supervision")]
    assert frozenset().union(*parts) == set(network.state_dict())
    assert sum(map(len, parts)) == len(network.state_dict())


@pytest.mark.parametrize(("norm", "tensors"), [("instance", 2), ("batch", 5), ("group", 2)])
def test_normalisation_by_type(norm: str, tensors: int) -> None:
    """Scale and shift; of batch normalisation also two statistics and a counter."""
    network = UNet((4, 8, 16), 1, norm).build(2, 1, 3)
    layers = [m for m in network.modules() if type(m).__name__ in ("InstanceNorm2d", "BatchNorm2d", "GroupNorm")]
    assert len(part_names(network, "norm")) == tensors * len(layers) > 0
    assert part_names(SmallVGG((4,)).build(2, 1, 2), "norm") == frozenset()


def test_a_name_decides_nothing() -> None:
    """A convolution called norm and a normalisation called convolution."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.decoder_conv = nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2)

    assert part_names(Odd(), "norm") == {"decoder_conv.weight", "decoder_conv.bias"}
    assert part_names(Odd(), "head") == {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("part", ["encoder", "bottleneck", "decoder"])
def test_an_unknown_network_has_a_head_only(part: str) -> None:
    network = CNN((2, 3), 4).build(2, 1, 5)
    assert isinstance(head(network), nn.Linear) and head(network).out_features == 5
    with pytest.raises(StudyError, match=f"no known {part}; take 'unet2d'"):
        part_names(network, part)
    assert set(PARTS) > {part}
    with pytest.raises(StudyError, match="its head is not known"):
        head(nn.ReLU())


@pytest.mark.parametrize("network", [PLAIN, MONAI], ids=["plain", "monai"])
def test_encoder_stages_one_after_the_other_are_the_encoder(network: Any) -> None:
    """What the last stage gives inside the network is what the stages give when called in order."""
    inside: list[torch.Tensor] = []
    stages = encoder_stages(network.eval())
    handle = stages[-1].register_forward_hook(lambda module, given, output: inside.append(output))
    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    network(images)
    handle.remove()
    features = images
    for stage in stages:
        features = stage(features)
    assert torch.equal(inside[0], features)
