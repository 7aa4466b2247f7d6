"""MONAI's U-Net: the same modules, names, first weights and bits, without the seconds that importing MONAI takes.

Most studies need nothing else of MONAI, and every worker process would wait for all of it. `tests/networks` holds the
two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTION: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INSTANCE: dict[int, Any] = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
BATCH: dict[int, Any] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

MONAI_NORMS: dict[str, tuple[str, dict[str, Any]]] = {  # the same as MONAI's networks are told
    "instance": ("instance", {"affine": True}),
    "batch": ("batch", {}),
    "group": ("group", {"num_groups": 1}),
}
NORMS: dict[str, Callable[[int, int], nn.Module]] = {
    "instance": lambda dimensions, width: INSTANCE[dimensions](width, affine=True),
    "batch": lambda dimensions, width: BATCH[dimensions](width),
    "group": lambda dimensions, width: nn.GroupNorm(1, width),  # one group: the outputs are normalised too
}


class NestedUNet(nn.Module):
    """Every level is (down, a skip around the level below, up); `residual` units each where there are any."""

    def __init__(
        self,
        dimensions: int,
        channels: int,
        outputs: int,
        widths: Sequence[int],
        residual: int,
        norm: str,
        dropout: float,
    ) -> None:
        super().__init__()
        self._dimensions, self._residual, self._norm, self._dropout = dimensions, residual, norm, dropout
        self.as_monai = {  # the arguments of monai.networks.nets.UNet
            "spatial_dims": dimensions,
            "in_channels": channels,
            "out_channels": outputs,
            "channels": list(widths),
            "strides": [2] * (len(widths) - 1),
            "num_res_units": residual,
            "norm": list(MONAI_NORMS[norm]),
            "dropout": dropout,
        }
        self.model = self._level(channels, outputs, widths, top=True)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.model(images)
        return found

    def _level(self, channels: int, outputs: int, widths: Sequence[int], top: bool) -> nn.Sequential:
        """The levels below are made first, as MONAI does: the order in which weights are drawn decides their bits."""
        width = widths[0]
        if len(widths) > 2:
            below: nn.Module = self._level(width, width, widths[1:], top=False)
        else:
            below = self._down(width, widths[1], stride=1)
        back = width * 2 if len(widths) > 2 else width + widths[1]
        down = self._down(channels, width, stride=2)
        return nn.Sequential(down, Skip(below), self._up(back, outputs, top))

    def _down(self, channels: int, width: int, stride: int) -> nn.Module:
        if not self._residual:
            return self._convolution(channels, width, stride)
        return self._unit(channels, width, stride, self._residual)

    def _up(self, channels: int, outputs: int, top: bool) -> nn.Module:
        raised = self._convolution(channels, outputs, 2, transposed=True, bare=top and not self._residual)
        if not self._residual:
            return raised
        return nn.Sequential(raised, self._unit(outputs, outputs, 1, units=1, bare=top))

    def _unit(self, channels: int, width: int, stride: int, units: int, bare: bool = False) -> nn.Module:
        made = nn.Sequential()
        for unit in range(units):
            first, last = unit == 0, unit == units - 1
            layer = self._convolution(channels if first else width, width, stride if first else 1, bare=bare and last)
            made.add_module(f"unit{unit}", layer)
        around: nn.Module = nn.Identity()
        if stride != 1:
            around = CONVOLUTION[self._dimensions](channels, width, 3, stride, 1)
        elif channels != width:
            around = CONVOLUTION[self._dimensions](channels, width, 1, stride, 0)
        return Residual(made, around)

    def _convolution(
        self, channels: int, width: int, stride: int, transposed: bool = False, bare: bool = False
    ) -> nn.Sequential:
        """A convolution, then normalisation, dropout and activation unless it is `bare`."""
        made = nn.Sequential()
        if transposed:
            layer = TRANSPOSED[self._dimensions](channels, width, 3, stride, padding=1, output_padding=stride - 1)
        else:
            layer = CONVOLUTION[self._dimensions](channels, width, 3, stride, padding=1)
        made.add_module("conv", layer)
        if not bare:
            after = nn.Sequential()
            after.add_module("N", NORMS[self._norm](self._dimensions, width))
            after.add_module("D", nn.Dropout(self._dropout))
            after.add_module("A", nn.PReLU())
            made.add_module("adn", after)
        return made


class Skip(nn.Module):
    """What goes in, and beside it what a submodule makes of it."""

    def __init__(self, submodule: nn.Module) -> None:
        super().__init__()
        self.submodule = submodule

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images, self.submodule(images)], dim=1)


class Residual(nn.Module):
    """Convolutions, and what goes around them."""

    def __init__(self, conv: nn.Module, residual: nn.Module) -> None:
        super().__init__()
        self.conv, self.residual = conv, residual

    def forward(self, images: Tensor) -> Tensor:
        around: Tensor = self.residual(images)
        through: Tensor = self.conv(images)
        return through + around
