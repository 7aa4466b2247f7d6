"""Learning from labels that may be wrong: voxels left out, the reverse cross entropy (UFPS, Eq. 9)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from consilium.networks.plain_unet import Supervised

SURE = 1e4  # larger than any other logit
LEAST = 1e-4  # replaces a label probability of 0, so that its logarithm is finite


def left_out(output: Any, ignored: Tensor) -> Any:
    """Logits with certain background where voxels are `ignored` (batch, *spatial).

    If the truth is 0 there, these voxels add neither loss nor gradient to cross entropy and to Dice of the labels. A
    Dice of background, where the study has one, counts them as found.
    """

    def change(logits: Tensor) -> Tensor:
        quiet = torch.full_like(logits, -SURE)
        quiet[:, 0] = SURE
        return torch.where(ignored[:, None], quiet, logits)

    if isinstance(output, Supervised):
        return Supervised(change(output.main), tuple((weight, change(aside)) for weight, aside in output.asides))
    return change(output)


def reverse_cross_entropy(output: Any, truth: Tensor) -> Tensor:
    """Eq. 9 without its factor: −Σ_c q_c log p_c, mean over voxels; q is the prediction, p the label clipped to 1e−4.

    Where the model is certain of another class than the label, the loss is bounded by −log 1e−4.
    """
    if isinstance(output, Supervised):
        total = reverse_cross_entropy(output.main, truth)
        for weight, logits in output.asides:
            total = total + weight * reverse_cross_entropy(logits, truth)
        return total
    agrees: Tensor = output.float().softmax(1).gather(1, truth.long()[:, None])
    return -math.log(LEAST) * (1 - agrees).mean()


def reverse_factor(step: int, total: int, growth: float = 20.0) -> float:
    """e^{−growth (1 − r/R)} in round r = step + 1: near 0 for most rounds, 1 in the last."""
    return math.exp(-growth * (1 - (step + 1) / total))
