"""The exclusion loss of MENU-Net: an unannotated organ cannot lie where the site has annotated another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from consilium.batch import Batch


def exclusion_loss(output: Tensor, batch: Batch, labels: Sequence[str], known: Sequence[str]) -> Tensor:
    """Dice and cross entropy of the probability of unannotated organs with the annotated foreground.

    Both are 0 where the two do not overlap. For each unannotated organ e with probability p_e and the foreground y:
    2 Σ p_e y / (Σ p_e + Σ y), and the mean of y ln(1 + p_e); their means over organs are added.

    Args:
        output: logits (batch, 1 + labels, *spatial).
        labels: the labels of the output.
        known: the labels that the truth shows.
    """
    others = [1 + i for i, label in enumerate(labels) if label not in known]
    if not others:
        return output.new_zeros(())
    chances = output.float().softmax(1)[:, others]
    drawn = torch.stack([batch.truth == 1 + list(labels).index(label) for label in known]).any(0)
    drawn = drawn.unsqueeze(1).to(chances.dtype)
    places = tuple(range(2, chances.dim()))
    shared = (chances * drawn).sum(places)
    dice = 2 * shared / (chances.sum(places) + drawn.sum(places) + 1e-5)
    return dice.mean() + (drawn * torch.log1p(chances)).mean()
