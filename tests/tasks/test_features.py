"""Features of images: the encoder's activations, pooled, for our networks and for a stranger's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium.errors import StudyError
from consilium.networks import CNN, VGG11, PlainUNet, SmallVGG, UNet
from consilium.networks.parts import encoder_convolutions
from consilium.tasks.classification import Classification
from consilium.tasks.features import feature_count, pooled_activations, windows
from consilium.tasks.segmentation import Segmentation


def segmentation(network: Any, dimensions: int = 2, patch: tuple[int, ...] = ()) -> Segmentation:
    return Segmentation(("blob",), dimensions, 1, network, SmallVGG((4,)), patch=patch)


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize(
    ("network", "channels"),
    [
        (UNet((4, 8, 16), residual_units=0), 4 + 8 + 16),
        (UNet((4, 8, 16), residual_units=2), 4 + 8 + 16),
        (PlainUNet((4, 8, 8)), 4 + 8 + 8),
    ],
)
def test_two_numbers_per_channel_of_every_stage(network: Any, channels: int, dimensions: int) -> None:
    task = segmentation(network, dimensions)
    images = torch.rand(3, 1, *(16,) * dimensions, generator=torch.Generator().manual_seed(0))
    features = task.features(task.initial(), images)
    assert features.shape == (3, 2 * channels) == (3, feature_count(task))
    assert features.dtype == torch.float64
    torch.testing.assert_close(task.features(task.initial(), images[1:2])[0], features[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("network", "channels"), [(CNN((5, 7)), 12), (SmallVGG((4, 8)), 12), (VGG11(), 1472)])
def test_classifiers_have_stages_too(network: Any, channels: int) -> None:
    task = Classification(("a", "b"), 2, 1, network, SmallVGG((4,)))
    assert feature_count(task) == 2 * channels
    if channels < 100:
        assert task.features(task.initial(), torch.rand(2, 1, 28, 28)).shape == (2, 2 * channels)


def test_the_features_are_means_and_deviations_before_normalisation() -> None:
    task = segmentation(UNet((4, 8), residual_units=0))
    weights, image = task.initial(), torch.rand(1, 1, 16, 16)
    network = task.network()
    network.load_state_dict(dict(weights))
    first = encoder_convolutions(network)[0](image).detach().flatten(2)[0]
    features = task.features(weights, image)[0]
    torch.testing.assert_close(features[:4].float(), first.mean(1))
    torch.testing.assert_close(features[4:8].float(), first.std(1, unbiased=False))


def test_brightness_is_seen() -> None:
    """Twice the contrast is twice the deviation in the first stage, though the network normalises every image."""
    task = segmentation(UNet((4, 8), residual_units=0))
    image = torch.rand(1, 1, 16, 16)
    one, two = (task.features(task.initial(), image * gain)[0, 4:8] for gain in (1.0, 2.0))
    torch.testing.assert_close(two, 2 * one)


def test_windows_cover_an_image() -> None:
    assert windows((10, 4), ()) == [(slice(0, 10), slice(0, 4))]
    assert windows((10,), (4,)) == [(slice(0, 4),), (slice(4, 8),), (slice(6, 10),)]
    assert windows((3,), (4,)) == [(slice(0, 4),)]
    assert len(windows((8, 12), (4, 4))) == 6


def test_with_patches_features_are_the_mean_over_windows() -> None:
    whole = segmentation(UNet((4, 8), residual_units=0))
    task = segmentation(UNet((4, 8), residual_units=0), patch=(8, 8))
    weights, image = task.initial(), torch.rand(1, 1, 16, 8)
    parts = [whole.features(weights, image[:, :, rows]) for rows in (slice(0, 8), slice(8, 16))]
    torch.testing.assert_close(task.features(weights, image), (parts[0] + parts[1]) / 2)


class Stranger(nn.Module):
    """A network of a user's own: down once, up again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.c, self.head = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        low = self.c(self.b(self.a(images)).relu()).relu()
        return self.head(nn.functional.interpolate(low, scale_factor=2.0))  # type: ignore[no-any-return]


def test_a_strangers_network_is_read_by_the_sizes_of_its_activations() -> None:
    """The first convolution at full size (3 channels) and at half (5); the head, on the way up, is no stage."""
    assert pooled_activations(Stranger(), torch.rand(2, 1, 8, 8)).shape == (2, 2 * (3 + 5))


def test_a_network_without_convolutions_is_answered_with_a_sentence() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(StudyError, match=r"no convolution .* set .method. selector_training = 'synchronised'"):
        pooled_activations(flat, torch.rand(1, 1, 4, 4))
