"""Pseudo labels from teachers that each know some organs: which label a voxel gets, and the entropy of all teachers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.site import Site
from consilium.task import Task
from consilium.tree import message
from consilium.weights import SiteName, Weights


class TeacherOutput(NamedTuple):
    """One teacher's prediction for a batch."""

    labels: tuple[str, ...]  # the organs it knows
    chances: Tensor  # (batch, 1 + labels, *spatial), background first


class PseudoLabels(NamedTuple):
    """The combined prediction of all teachers for a batch, each field (batch, *spatial)."""

    others: Tensor  # labels that the site does not annotate, as mask values; 0: none of them
    everything: Tensor  # all labels, before the site's own annotation
    entropy: Tensor  # E of the merged distribution, mean over classes


@message
class Maps:
    """The combined predictions for every training case, valid for one set of teachers."""

    labels: Weights  # by case, (2, *spatial): others, everything
    entropy: Weights  # by case, (1, *spatial)


def teacher_outputs(
    task: Task, teachers: Mapping[SiteName, Weights], labels: Mapping[SiteName, tuple[str, ...]], images: Tensor
) -> list[TeacherOutput]:
    """Every teacher's probabilities, in site-name order."""
    return [
        TeacherOutput(labels[name], task.infer(teachers[name], images, "teacher", labels[name]).float().softmax(1))
        for name in sorted(teachers)
    ]


def claimed(
    given: Sequence[TeacherOutput], labels: Sequence[str], priority: Sequence[str] = (), without: Collection[str] = ()
) -> Tensor:
    """Exclusive labels (batch, *spatial): a voxel gets the label that a teacher predicts there.

    Among several claims the first in `priority` wins, then the most probable; claims `without` are dropped.
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
        place.add_(torch.where(place > 0, float(rank), 0.0))  # a rank of 1 or more beats any probability
    best, which = strength.max(1)
    return torch.where(best > 0, which + 1, 0).to(torch.uint8)


def merged_chances(given: Sequence[TeacherOutput], labels: Sequence[str]) -> Tensor:
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


def combined_labels(
    given: Sequence[TeacherOutput],
    labels: Sequence[str],
    own: Collection[str],
    bare: Tensor,
    priority: Sequence[str] = (),
) -> PseudoLabels:
    """Combine the teachers' predictions; the site annotates its `own` labels, but not in `bare` cases (batch,)."""
    everything = claimed(given, labels, priority)
    others = claimed(given, labels, priority, without=own)
    others = torch.where(bare.view(-1, *[1] * (others.dim() - 1)), everything, others)
    return PseudoLabels(others, everything, entropy(merged_chances(given, labels)))


def with_truth(others: Tensor, truth: Tensor) -> Tensor:
    """The site's own annotation has priority over the teachers' labels; the rest is background."""
    return torch.where(truth > 0, truth, others.to(truth.dtype))


def maps_of(
    site: Site,
    teachers: Mapping[SiteName, Weights],
    labels: Mapping[SiteName, tuple[str, ...]],
    priority: Sequence[str] = (),
) -> Maps:
    """The combined predictions for the site's whole training cases; computed once, because teachers never change."""
    drawn: dict[str, Tensor] = {}
    sure: dict[str, Tensor] = {}
    for batch in site.data.whole("train", site.local.batch_size):
        given = teacher_outputs(site.task, teachers, labels, batch.images)
        pseudo = combined_labels(given, site.task.labels, site.card.labels, batch.bare, priority)
        for i, case in enumerate(batch.cases):
            drawn[case] = torch.stack([pseudo.others[i], pseudo.everything[i]])
            sure[case] = pseudo.entropy[i : i + 1].half()
    return Maps(Weights.over(drawn), Weights.over(sure))


def read_maps(batch: Batch) -> PseudoLabels:
    """The cached predictions of a batch: `others`, and if uncertainty is used also `everything` and `entropy`."""
    assert batch.beside is not None
    parts = batch.beside.unbind(1)
    others = parts[0].to(torch.uint8)
    if len(parts) == 1:
        return PseudoLabels(others, others, torch.zeros_like(parts[0], dtype=torch.float32))
    return PseudoLabels(others, parts[1].to(torch.uint8), parts[2].float())
