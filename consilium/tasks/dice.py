"""The Dice loss as MONAI takes it, operation by operation, so that a study need not import MONAI for it."""

from __future__ import annotations

import torch
from torch import Tensor

SMOOTH = 1e-5  # of numerator and denominator


def dice_loss(output: Tensor, target: Tensor, exclusive: bool = False, background: bool = True) -> Tensor:
    """1 − Dice of logits (cases, channels, *spatial), by case and channel.

    Channels overlap, and `target` has one for each; or they are `exclusive`, and `target` (cases, 1, *spatial) names
    one of them, the first of which may be left out.
    """
    likely = torch.softmax(output, 1) if exclusive else torch.sigmoid(output)
    if exclusive:
        target = torch.zeros(likely.shape, device=output.device).scatter_(1, target.long(), 1)
        if not background:
            likely, target = likely[:, 1:], target[:, 1:]
    space = list(range(2, likely.dim()))
    hit = torch.sum(likely * target, dim=space)
    over = (torch.sum(likely, dim=space) - hit) * 0.5
    under = (torch.sum(target, dim=space) - hit) * 0.5
    return 1 - (2 * hit + SMOOTH) / (2 * (hit + over + under) + SMOOTH)
