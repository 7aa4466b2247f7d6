"""Labels from teachers by hand: who gets a voxel, what remains background, how sure the teachers are together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from consilium.learning.pseudo_labels import (
    TeacherOutput,
    claimed,
    combined_labels,
    entropy,
    merged_chances,
    with_truth,
)

LABELS = ("kidney", "liver", "spleen")


def chances(*channels: list[float]) -> Tensor:
    """(1, channels, voxels)"""
    return torch.tensor(channels)[None]


# five voxels; the first teacher knows the kidney, the second liver and spleen
KIDNEY = TeacherOutput(("kidney",), chances([0.9, 0.1, 0.3, 0.6, 0.2], [0.1, 0.9, 0.7, 0.4, 0.8]))
OTHERS = TeacherOutput(
    ("liver", "spleen"),
    chances([0.8, 0.7, 0.1, 0.2, 0.05], [0.1, 0.2, 0.8, 0.1, 0.05], [0.1, 0.1, 0.1, 0.7, 0.9]),
)


def test_a_voxel_claimed_twice_goes_to_the_more_probable_teacher() -> None:
    """Nobody; kidney alone; kidney .7 against liver .8; spleen alone; kidney .8 against spleen .9."""
    assert claimed([KIDNEY, OTHERS], LABELS).tolist() == [[0, 1, 2, 3, 3]]


def test_a_fixed_order_can_decide_instead() -> None:
    assert claimed([KIDNEY, OTHERS], LABELS, priority=("kidney",)).tolist() == [[0, 1, 1, 3, 1]]
    assert claimed([KIDNEY, OTHERS], LABELS, priority=("spleen", "kidney")).tolist() == [[0, 1, 1, 3, 3]]


def test_ground_truth_goes_first_and_background_is_what_is_left() -> None:
    """At a site that annotates the kidney its own teacher's claims are void: a voxel it wrongly takes is free again."""
    others = claimed([KIDNEY, OTHERS], LABELS, without=("kidney",))
    assert others.tolist() == [[0, 0, 2, 3, 3]]
    truth = torch.tensor([[1, 0, 0, 1, 0]])
    assert with_truth(others, truth).tolist() == [[1, 0, 2, 1, 3]]


def test_of_two_teachers_of_one_organ_either_may_claim() -> None:
    doubting = TeacherOutput(("kidney",), chances([0.9] * 5, [0.1] * 5))
    assert claimed([KIDNEY, doubting], LABELS).tolist() == [[0, 1, 1, 0, 1]]


def test_the_merged_distribution() -> None:
    """Voxel 2: background .3 · .1, kidney .7, liver .8, spleen .1; renormalised by their sum 1.63."""
    merged = merged_chances([KIDNEY, OTHERS], LABELS)
    assert merged[0, :, 2].tolist() == pytest.approx([0.03 / 1.63, 0.7 / 1.63, 0.8 / 1.63, 0.1 / 1.63])
    assert merged.sum(1).tolist()[0] == pytest.approx([1.0] * 5)
    twice = merged_chances([KIDNEY, KIDNEY], ("kidney",))
    assert twice[0, :, 0].tolist() == pytest.approx([0.81 / 0.91, 0.1 / 0.91])


def test_entropy_is_over_classes_and_divided_by_their_number() -> None:
    even, sure = torch.full((1, 4, 1), 0.25), torch.tensor([[[1.0], [0.0], [0.0], [0.0]]])
    assert entropy(even).item() == pytest.approx(math.log(4) / 4)
    assert entropy(sure).item() == 0.0
    tilted = torch.tensor([0.5, 0.5, 0.0, 0.0])[None, :, None]
    assert entropy(tilted).item() == pytest.approx(math.log(2) / 4)


def test_doubt_is_told_before_ground_truth() -> None:
    heard = combined_labels([KIDNEY, OTHERS], LABELS, own=("kidney",), bare=torch.tensor([False]))
    assert heard.everything.tolist() == [[0, 1, 2, 3, 3]]
    assert heard.others.tolist() == [[0, 0, 2, 3, 3]]
    maskless = combined_labels([KIDNEY, OTHERS], LABELS, own=("kidney",), bare=torch.tensor([True]))
    assert maskless.others.tolist() == [[0, 1, 2, 3, 3]]  # the site's own teacher stands in for the annotation
    assert torch.equal(heard.entropy, entropy(merged_chances([KIDNEY, OTHERS], LABELS)))
