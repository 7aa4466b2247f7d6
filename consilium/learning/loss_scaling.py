"""Gradients of a loss in float16, where small numbers become zero: those of a multiple of the loss, divided again.

`fit` steps with PyTorch's scaler, which leaves out a step whose gradient is too large. A method that computes its own
gradients, and a selector whose gradient is sent, need each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FACTORS = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # from that with which PyTorch's scaler begins


def gradients_of(loss: Tensor, parameters: Sequence[Tensor], precision: str) -> tuple[Tensor, ...]:
    """∂loss/∂parameters. With `precision` "float16" the loss is multiplied by the largest factor that fits."""
    if precision != "float16":
        return torch.autograd.grad(loss, parameters)
    for factor in FACTORS:
        found = torch.autograd.grad(loss * factor, parameters, retain_graph=factor > FACTORS[-1])
        if all(bool(torch.isfinite(part).all()) for part in found):
            break
    return tuple(part / factor for part in found)
