"""The global model as the main teacher (UFPS, Eq. 5), and a guard for organs it has not learned yet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from consilium.learning.pseudo_labels import PseudoLabels

LAGGING = 0.7  # below this share of the teachers' voxels of an organ, the teachers' label is used


class Refined(NamedTuple):
    """Pseudo labels (batch, *spatial), and the voxels that are left out of the loss."""

    labels: Tensor
    ignored: Tensor


def refined(
    pseudo: PseudoLabels, decided: Tensor, own: Tensor, agreement: float, intersect: bool, guard: bool
) -> Refined:
    """The global model's labels (`decided`, integers), refined by the teachers' labels for each case.

    Eq. 5: if both agree on at least `agreement` of the model's foreground, only voxels on which they agree get a label,
    and the others are ignored. Otherwise, and always without `intersect`, the model's own labels are used.
    `own` (batch, classes) marks the labels that the site annotates: predictions of them are dropped.
    """
    shared = ((pseudo.everything == decided) & (decided > 0)).flatten(1).sum(1)
    found = (decided > 0).flatten(1).sum(1)
    rows = (len(decided), *[1] * (decided.dim() - 1))
    meet = ((shared >= agreement * found) & intersect).view(rows)
    model = torch.where(own.gather(1, decided.flatten(1).long()).view_as(decided), 0, decided.long())
    teacher = pseudo.others.long()
    labels = torch.where(meet & (model != teacher), 0, model)
    ignored = meet & (model != teacher)
    if guard:
        for c in range(1, own.shape[1]):
            if own[:, c].all():
                continue
            theirs = teacher == c
            both = (theirs & (model == c)).flatten(1).sum(1)
            lags = (both < LAGGING * theirs.flatten(1).sum(1)).view(rows)
            stray = lags & (labels == c) & ~theirs
            labels = torch.where(lags & theirs, c, torch.where(stray, 0, labels))
            ignored = (ignored & ~(lags & theirs)) | stray
    return Refined(labels.to(decided.dtype), ignored)
