"""CMIDG: strong changes of intensity that keep the anatomy, after Ouyang et al. (IEEE TMI 2022).

An image passes through a small random network (GIN). A smooth random field blends two such images, so that an
intensity does not mean the same tissue everywhere. Images are (batch, channels, *spatial) in two or three dimensions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv3d, leaky_relu

LAYERS = 4
INTERVALS = 4  # of the blending field's control points, along each axis


@torch.no_grad()
def cmidg(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pass each image through two random networks of its own and blend the results by a field m: m a + (1 − m) b."""
    changed = torch.empty_like(images)
    for i, image in enumerate(images):
        one, other = gin(image, generator), gin(image, generator)
        changed[i] = torch.lerp(other, one, field(image.shape[1:], generator).to(image.device))
    return changed


@torch.no_grad()
def gin(image: Tensor, generator: torch.Generator) -> Tensor:
    """Pass one image (channels, *spatial) through random convolutions, mix it with itself, keep its Frobenius norm."""
    dimensions, channels = image.dim() - 1, len(image)
    convolve = conv2d if dimensions == 2 else conv3d
    hidden = 2 if dimensions == 2 else 1  # as in the original, and as UFPS has it for volumes
    widths = [channels, *[hidden] * (LAYERS - 1), channels]
    passed = image[None]
    for layer, (narrow, wide) in enumerate(pairwise(widths)):
        if layer:
            passed = leaky_relu(passed)
        side = 1 + 2 * int(torch.randint(2, (), generator=generator))  # 1 or 3
        kernel = torch.randn(wide, narrow, *[side] * dimensions, generator=generator)
        shift = torch.randn(wide, generator=generator)
        passed = convolve(passed, kernel.to(image.device), shift.to(image.device), padding=side // 2)
    mixed = torch.lerp(image, passed[0], float(torch.rand((), generator=generator)))
    return mixed.mul_(image.norm() / mixed.norm().clamp_min(1e-12))


def field(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A smooth random field from 0 to 1: cubic B-splines through normal control points, a quarter of a side apart."""
    values = torch.randn(*[INTERVALS + 3] * len(shape), generator=generator)
    for side in shape:  # each pass moves the first axis, at full length, behind the others
        values = torch.tensordot(values, _splines(side), dims=([0], [0]))
    low, high = values.aminmax()
    return (values - low) / (high - low).clamp_min(1e-12)


def _splines(side: int) -> Tensor:
    """The cubic B-splines at `side` places, (control points, side)."""
    away = (torch.linspace(0, INTERVALS, side) - torch.arange(-1, INTERVALS + 2)[:, None]).abs()
    return ((2 - away).clamp_min(0) ** 3 - 4 * (1 - away).clamp_min(0) ** 3) / 6
