"""The global model as the main teacher (UFPS, Eq. 5), and a guard for organs it has not learned yet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from consilium.learning.pseudo_labels import Said

LAGGING = 0.7  # where the global model finds less than this share of what the teachers call an organ, they are heard


class Refined(NamedTuple):
    """Pseudo labels (batch, *spatial), and the voxels nothing is to be learned from."""

    labels: Tensor
    ignored: Tensor


def refined(said: Said, decided: Tensor, own: Tensor, agreement: float, intersect: bool, guard: bool) -> Refined:
    """Labels of the global model (`decided`, integers), refined by the teachers' case by case.

    Eq. 5: where the two share at least `agreement` of the model's foreground, only what they agree on is a label, and
    voxels they disagree on are ignored; else the model's own labels are taken. Without `intersect`, always those.
    `own` (batch, classes) tells which labels the site annotates there: claims on them are void, its annotation follows.
    """
    shared = ((said.everything == decided) & (decided > 0)).flatten(1).sum(1)
    found = (decided > 0).flatten(1).sum(1)
    rows = (len(decided), *[1] * (decided.dim() - 1))
    meet = ((shared >= agreement * found) & intersect).view(rows)
    model = torch.where(own.gather(1, decided.flatten(1).long()).view_as(decided), 0, decided.long())
    teacher = said.others.long()
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
