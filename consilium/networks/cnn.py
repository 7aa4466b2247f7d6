"""The four-layer network of the APPLE paper, for small images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from consilium.errors import StudyError


@dataclass(frozen=True)
class CNN:
    """Two 5×5 convolutions with pooling, a hidden layer, the classes."""

    widths: tuple[int, int] = (20, 50)
    hidden: int = 500

    def __post_init__(self) -> None:
        if len(self.widths) != 2 or min(*self.widths, self.hidden) < 1:
            raise StudyError("[task] a cnn takes two positive widths and a positive number of hidden units.")

    def build(self, dimensions: int, channels: int, outputs: int) -> nn.Module:
        if dimensions != 2:
            raise StudyError("[task] network = 'cnn' is for 2-D images; take a 'vgg-small' for volumes.")
        first, second = self.widths
        return nn.Sequential(
            *(nn.Conv2d(channels, first, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            *(nn.Conv2d(first, second, 5), nn.MaxPool2d(2), nn.ReLU(inplace=True)),
            nn.AdaptiveAvgPool2d(4),  # the identity at the paper's 28×28; allows other sizes
            nn.Flatten(),
            *(nn.Linear(second * 16, self.hidden), nn.ReLU(inplace=True)),
            nn.Linear(self.hidden, outputs),
        )
