"""The networks: their sizes, the images they take, how they start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from consilium.errors import StudyError
from consilium.networks.cnn import CNN
from consilium.networks.plain_unet import PlainUNet, Supervised
from consilium.networks.unet import AnySize, UNet
from consilium.networks.vgg import VGG11, SmallVGG


def count(network: Any, dimensions: int, channels: int, outputs: int) -> int:
    """Parameters, counted without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in network.build(dimensions, channels, outputs).parameters())


def test_vgg11_is_the_papers() -> None:
    """Configuration A with 7 × 7 pooling: 128.8 million parameters for six sites and colour images."""
    convolutions = [(3, 64), (64, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 512), (512, 512)]
    linear = [(512 * 49, 4096), (4096, 4096), (4096, 6)]
    by_hand = sum(9 * a * b + b for a, b in convolutions) + sum(a * b + b for a, b in linear)
    assert count(VGG11(), 2, 3, 6) == by_hand
    assert by_hand / 1e6 == pytest.approx(128.8, abs=0.05)


def test_the_default_unet_is_small_beside_it() -> None:
    """16-32-64-128-256 with two residual units: about 1.6 million, so the selector is 98 % of 2 w_g + w_s."""
    unet = count(UNet(), 2, 1, 1)
    assert unet / 1e6 == pytest.approx(1.6, abs=0.05)
    selector = count(VGG11(), 2, 1, 6)
    assert selector / (2 * unet + selector) == pytest.approx(0.98, abs=0.01)


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
@pytest.mark.parametrize("size", [(16, 16), (13, 17), (7, 9, 11), (8, 8, 8)])
def test_a_unet_takes_any_size(norm: str, size: tuple[int, ...]) -> None:
    network = UNet(widths=(4, 8), residual_units=1, norm=norm).build(len(size), 2, 3)
    assert network(torch.rand(2, 2, *size)).shape == (2, 3, *size)


def test_padding_repeats_the_edge_and_is_cut_off() -> None:
    """A sum over 3 × 3 neighbours at the cut corner sees the repeated edge, not zeros: 9 ones."""
    convolution = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(convolution.weight)
    output = AnySize(convolution, 4)(torch.ones(1, 1, 5, 6))
    assert output.shape == (1, 1, 5, 6)
    assert output[0, 0, 4, 5].item() == 9.0
    assert AnySize(convolution, 5)(torch.ones(1, 1, 5, 5))[0, 0, 4, 4].item() == 4.0  # a multiple is not padded


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        ("instance", nn.InstanceNorm2d),
        ("batch", nn.BatchNorm2d),
        ("group", nn.GroupNorm),
    ],
)
def test_normalisation_has_weights_of_its_own(norm: str, kind: type[nn.Module]) -> None:
    network = UNet(widths=(4, 8), norm=norm).build(2, 1, 1)
    layers = [module for module in network.modules() if isinstance(module, kind)]
    assert layers
    assert all(layer.weight is not None for layer in layers)


@pytest.mark.parametrize("size", [(16, 16), (5, 5), (4, 9, 9), (1, 1)])
def test_a_small_vgg_takes_any_size(size: tuple[int, ...]) -> None:
    assert SmallVGG((4, 8, 8)).build(len(size), 2, 3)(torch.rand(2, 2, *size)).shape == (2, 3)


def test_vgg_starts_as_vgg_must() -> None:
    """He's deviation √(2 / (9·width)) for convolutions, zero biases."""
    torch.manual_seed(0)
    network = SmallVGG((64, 128)).build(2, 3, 5)
    first, second = (module for module in network.modules() if isinstance(module, nn.Conv2d))
    for layer in (first, second):
        assert layer.weight.std().item() == pytest.approx((2 / (9 * layer.out_channels)) ** 0.5, rel=0.1)
        assert layer.bias is not None and not layer.bias.any()


def test_standardised_images_differ_in_shape_only() -> None:
    """Brightness and contrast of a whole picture do not reach a standardised selector."""
    network = SmallVGG((4,), standardise=True).build(2, 3, 2)
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(network(images), network(images * 30 + 5), atol=1e-3, rtol=1e-3)


def test_the_cnn_is_the_papers_at_28_pixels() -> None:
    """Two 5 × 5 convolutions, 20 and 50 channels, a hidden layer of 500: 431 080 parameters for MNIST."""
    by_hand = (25 * 20 + 20) + (25 * 20 * 50 + 50) + (50 * 16 * 500 + 500) + (500 * 10 + 10)
    assert count(CNN(), 2, 1, 10) == by_hand == 431_080
    assert CNN().build(2, 1, 10)(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert CNN((4, 8), 16).build(2, 3, 2)(torch.rand(1, 3, 16, 20)).shape == (1, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CNN().build(3, 1, 2), "take a 'vgg-small' for volumes"),
        (lambda: CNN((0, 5)), "two positive widths"),
        (lambda: UNet(widths=(4, 0)), "at least two positive"),
        (lambda: SmallVGG(()), "at least one positive width"),
        (lambda: PlainUNet(widths=(4,)), "at least two positive"),
        (lambda: PlainUNet(supervision=(0.1, 0.0)), "weights are positive"),
        (lambda: PlainUNet(norm="layer"), "must be one of instance, batch, group"),
        (lambda: PlainUNet(widths=(6, 8), norm="group"), "multiples of 4"),
    ],
)
def test_what_cannot_be_built_is_said(make: Any, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        make()


# ------------------------------------------------------------------------------------------------ plain-unet

SIX = PlainUNet(widths=(4, 4, 4, 8, 8, 8))


def trained_by(network: nn.Module, loss: torch.Tensor) -> set[str]:
    """The parts of a network that a loss reaches."""
    network.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None and p.grad.any()}


def test_heads_of_the_encoder_do_not_reach_the_decoder() -> None:
    """Six levels, heads on levels 1 to 4: level 4 is the last above the bottom, and trains the encoder only."""
    torch.manual_seed(0)
    network = SIX.build(2, 1, 3)
    output = network(torch.rand(2, 1, 64, 64))
    assert isinstance(output, Supervised)
    assert [weight for weight, _ in output.asides] == [0.1, 0.2, 0.3, 0.4]
    assert all(logits.shape == output.main.shape == (2, 3, 64, 64) for _, logits in output.asides)
    assert trained_by(network, output.asides[3][1].square().sum()) == {"encoder", "supervision"}
    touched = [n for n, p in network.named_parameters() if n.startswith("encoder") and p.grad is not None]
    assert {int(name.split(".")[1]) for name in touched} == {0, 1, 2, 3, 4}  # not the bottom
    output = network(torch.rand(2, 1, 64, 64))
    assert trained_by(network, output.main.square().sum()) == {"encoder", "decoder", "head"}


def test_in_use_it_answers_with_logits_alone() -> None:
    network = SIX.build(2, 1, 3).eval()
    assert network(torch.rand(1, 1, 37, 33)).shape == (1, 3, 37, 33)
    assert isinstance(PlainUNet((4, 8), supervision=()).build(2, 1, 2)(torch.rand(1, 1, 8, 8)), torch.Tensor)


@pytest.mark.parametrize("norm", ["instance", "batch", "group"])
@pytest.mark.parametrize("residual", [False, True])
def test_forms_of_a_plain_unet(norm: str, residual: bool) -> None:
    """Odd volumes are padded and cut; nothing but parameters is in the weights, so all of them can be averaged."""
    network = PlainUNet((4, 8, 8), (0.1,), residual, norm).build(3, 1, 5)
    output = network(torch.rand(2, 1, 9, 10, 11))
    assert output.main.shape == output.asides[0][1].shape == (2, 5, 9, 10, 11)
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}
    assert any("pass_by" in name for name in network.state_dict()) == residual


def test_the_last_level_may_keep_the_slices() -> None:
    """Six slices are three at the bottom of three levels, where halving every level would pad them to eight."""
    network: Any = PlainUNet((4, 8, 8), keep_depth=True).build(3, 1, 2)
    assert network.divisor == (2, 4, 4)
    bottom = network.encoder[2](network.encoder[1](network.encoder[0](torch.rand(1, 1, 6, 8, 8))))
    assert bottom.shape == (1, 8, 3, 2, 2)
    assert network.eval()(torch.rand(1, 1, 5, 7, 9)).shape == (1, 2, 5, 7, 9)
    assert PlainUNet((4, 8), keep_depth=True).build(2, 1, 2).divisor == (2, 2)  # pictures have no slices


def test_the_papers_network_has_thirty_million_weights() -> None:
    with torch.device("meta"):
        assert count(PlainUNet(keep_depth=True), 3, 1, 5) == pytest.approx(30.8e6, rel=0.001)
