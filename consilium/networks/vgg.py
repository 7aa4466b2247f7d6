"""VGG-style classifiers: the selector of FedSM, as in its paper and small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from consilium.errors import StudyError


def _convolutions(dimensions: int) -> tuple[type[nn.Module], type[nn.Module], type[nn.Module]]:
    if dimensions == 2:
        return nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d
    return nn.Conv3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d


def _stages(dimensions: int, channels: int, stages: Sequence[Sequence[int]]) -> list[nn.Module]:
    """3×3 convolutions with ReLU; every stage ends by halving the image."""
    conv, pool, _ = _convolutions(dimensions)
    layers: list[nn.Module] = []
    for stage in stages:
        for width in stage:
            layers += [conv(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(pool(2, ceil_mode=True))  # so that small images can be halved five times
    return layers


def _start(module: nn.Module) -> None:
    """He's initialisation, as VGG networks without normalisation need."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0.0, 0.01)
        if isinstance(part, (nn.Conv2d, nn.Conv3d, nn.Linear)) and part.bias is not None:
            nn.init.zeros_(part.bias)


@dataclass(frozen=True)
class VGG11:
    """Configuration A of the VGG paper, without normalisation: 128.8 million parameters."""

    dropout: float = 0.5

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        *_, pool = _convolutions(dimensions)
        side = 7 if dimensions == 2 else 3
        network = nn.Sequential(
            *_stages(dimensions, channels, [(64,), (128,), (256, 256), (512, 512), (512, 512)]),
            pool(side),
            nn.Flatten(),
            *(nn.Linear(512 * side**dimensions, 4096), nn.ReLU(inplace=True), nn.Dropout(self.dropout)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(self.dropout)),
            nn.Linear(4096, outputs),
        )
        _start(network)
        return network


class _Standardised(nn.Module):
    """Images with mean 0 and deviation 1 over the whole picture; colour balance between channels stays."""

    def forward(self, images: Tensor) -> Tensor:
        dims = tuple(range(1, images.dim()))
        middle = images.mean(dims, keepdim=True)
        return (images - middle) / (images.var(dims, keepdim=True, unbiased=False) + 1e-5).sqrt()


@dataclass(frozen=True)
class SmallVGG:
    """A few thousand parameters in the same style, with averaged features and no dropout."""

    widths: tuple[int, ...] = (8, 16, 32)
    standardise: bool = False  # every image to mean 0 and deviation 1 first

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise StudyError("a small VGG needs at least one positive width.")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        *_, pool = _convolutions(dimensions)
        last = nn.Linear(self.widths[-1], outputs)
        network = nn.Sequential(
            *([_Standardised()] if self.standardise else []),
            *_stages(dimensions, channels, [(width,) for width in self.widths]),
            pool(1),
            nn.Flatten(),
            last,
        )
        _start(network)
        nn.init.kaiming_normal_(last.weight)
        return network
