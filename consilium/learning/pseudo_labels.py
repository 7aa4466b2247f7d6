"""Labels from teachers, each of which knows some of the organs: who gets a voxel, and how sure they are together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consilium.site import Batch, Site, Task
from consilium.tree import message
from consilium.weights import SiteName, Weights


class Opinion(NamedTuple):
    """What one teacher says of a batch."""

    labels: tuple[str, ...]  # the organs it knows
    chances: Tensor  # (batch, 1 + labels, *spatial), background first


class Said(NamedTuple):
    """What all teachers say of a batch, each (batch, *spatial)."""

    others: Tensor  # the labels the site does not annotate, as values of the task's labels; 0: none of them
    everything: Tensor  # all labels, before the site's own annotation
    entropy: Tensor  # E, of the merged distribution, mean over the classes


@message
class Maps:
    """What the teachers say of every training case, as long as the teachers are these."""

    labels: Weights  # by case, (2, *spatial): others, everything
    entropy: Weights  # by case, (1, *spatial)


def opinions(
    task: Task, teachers: Mapping[SiteName, Weights], labels: Mapping[SiteName, tuple[str, ...]], images: Tensor
) -> list[Opinion]:
    """Every teacher's probabilities, in site-name order."""
    return [
        Opinion(labels[name], task.infer(teachers[name], images, "teacher", labels[name]).float().softmax(1))
        for name in sorted(teachers)
    ]


def claimed(
    given: Sequence[Opinion], labels: Sequence[str], priority: Sequence[str] = (), without: Collection[str] = ()
) -> Tensor:
    """Exclusive labels (batch, *spatial): a voxel goes to the label a teacher decides for there.

    Of several claims the one that `priority` names first wins, then the most probable; claims `without` are dropped.
    """
    batch, _, *spatial = given[0].chances.shape
    strength = given[0].chances.new_zeros((batch, len(labels), *spatial))
    for known, chances in given:
        decided = chances.argmax(1)
        for i, label in enumerate(known, start=1):
            if label not in without:
                claim = torch.where(decided == i, chances[:, i], 0.0)
                place = strength[:, labels.index(label)]
                torch.maximum(place, claim, out=place)
    for rank, label in enumerate(reversed(priority), start=1):
        place = strength[:, labels.index(label)]
        place.add_(torch.where(place > 0, float(rank), 0.0))  # probabilities end at 1, so a rank outweighs them
    best, which = strength.max(1)
    return torch.where(best > 0, which + 1, 0).to(torch.uint8)


def merged_chances(given: Sequence[Opinion], labels: Sequence[str]) -> Tensor:
    """One distribution (batch, 1 + labels, *spatial): organs by the mean of the teachers that know them, background by
    the product of all backgrounds, renormalised."""
    background = torch.stack([chances[:, 0] for _, chances in given]).prod(0)
    parts = [background]
    for label in labels:
        voices = [chances[:, 1 + known.index(label)] for known, chances in given if label in known]
        parts.append(torch.stack(voices).mean(0) if voices else torch.zeros_like(background))
    together = torch.stack(parts, dim=1)
    return together / together.sum(1, keepdim=True).clamp_min(1e-12)


def entropy(chances: Tensor) -> Tensor:
    """E = −Σ_c p_c ln p_c / N_c over the class axis: (batch, classes, *spatial) → (batch, *spatial)."""
    return -torch.xlogy(chances, chances).sum(1) / chances.shape[1]


def said(
    given: Sequence[Opinion],
    labels: Sequence[str],
    own: Collection[str],
    bare: Tensor,
    priority: Sequence[str] = (),
) -> Said:
    """`own` labels are the site's to draw, but in its `bare` cases (batch,), which have no mask, teachers draw them."""
    everything = claimed(given, labels, priority)
    others = claimed(given, labels, priority, without=own)
    others = torch.where(bare.view(-1, *[1] * (others.dim() - 1)), everything, others)
    return Said(others, everything, entropy(merged_chances(given, labels)))


def with_truth(others: Tensor, truth: Tensor) -> Tensor:
    """The site's own annotation goes before every teacher; what neither has is background."""
    return torch.where(truth > 0, truth, others.to(truth.dtype))


def maps_of(
    site: Site,
    teachers: Mapping[SiteName, Weights],
    labels: Mapping[SiteName, tuple[str, ...]],
    priority: Sequence[str] = (),
) -> Maps:
    """What the teachers say of the site's whole training cases: computed once, since teachers never change."""
    drawn: dict[str, Tensor] = {}
    sure: dict[str, Tensor] = {}
    for batch in site.data.whole("train", site.local.batch_size):
        given = opinions(site.task, teachers, labels, batch.images)
        heard = said(given, site.task.labels, site.card.labels, batch.bare, priority)
        for i, case in enumerate(batch.cases):
            drawn[case] = torch.stack([heard.others[i], heard.everything[i]])
            sure[case] = heard.entropy[i : i + 1].half()
    return Maps(Weights.over(drawn), Weights.over(sure))


def read_maps(batch: Batch) -> Said:
    """What stands beside the images of a batch: `others`, and if uncertainty is wanted `everything` and `entropy`."""
    assert batch.beside is not None
    parts = batch.beside.unbind(1)
    others = parts[0].to(torch.uint8)
    if len(parts) == 1:
        return Said(others, others, torch.zeros_like(parts[0], dtype=torch.float32))
    return Said(others, parts[1].to(torch.uint8), parts[2].float())
