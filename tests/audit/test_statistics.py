"""Figures of an attack, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from consilium.audit.signals import CaseKey, centred
from consilium.audit.statistics import (
    OPEN,
    OVER,
    UNDER,
    Interval,
    Numbers,
    Power,
    auc,
    best_threshold,
    decided,
    power,
    tpr_at,
)


def numbers(*values: float) -> Numbers:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("members", "others", "area"),
    [((3, 4), (1, 2), 1.0), ((1, 2), (3, 4), 0.0), ((1, 3), (2, 4), 0.25), ((1, 2), (1, 2), 0.5), ((5,), (5,), 0.5)],
)
def test_the_area_counts_pairs_and_ties_count_half(
    members: tuple[float, ...], others: tuple[float, ...], area: float
) -> None:
    assert auc(numbers(*members), numbers(*others)) == area


def test_the_true_positive_rate_is_above_a_threshold_that_few_non_members_pass() -> None:
    others = np.arange(10.0)  # 0 … 9: at 10 % one may pass, so the threshold is 8
    assert tpr_at(numbers(8, 8.5, 9, 1), others, 0.1) == 0.5
    assert tpr_at(numbers(8.5, 9.5), others, 0.01) == 0.5  # none may pass: above 9


def test_accuracy_and_f1_of_both_classes() -> None:
    # 3 of 4 members found, 1 of 2 non-members taken for one
    found = decided(np.array([True, True, True, False]), np.array([True, False]))
    assert (found.member_accuracy, found.other_accuracy, found.mean_accuracy) == (0.75, 0.5, 0.625)
    assert found.member_f1 == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert found.other_f1 == pytest.approx(2 * 1 / (2 * 1 + 1 + 1))


def test_a_threshold_is_the_one_that_tells_the_classes_best_apart() -> None:
    assert best_threshold(numbers(3, 4, 5), numbers(1, 2, 3.5)) == 3.0


def test_the_rate_is_told_at_one_percent_only_with_300_non_members() -> None:
    members = np.linspace(0, 1, 50)
    assert power(members, np.linspace(0, 1, 299), 0).fpr == 0.1
    assert power(members, np.linspace(0, 1, 300), 0).fpr == 0.01


def test_intervals_hold_the_value_and_are_the_same_every_time() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.normal(0.5, 1, 60), rng.normal(0, 1, 60)
    one, two = power(members, others, 7), power(members, others, 7)
    assert one == two
    assert one.auc.low < one.auc.value < one.auc.high
    assert one.auc.high - one.auc.low == pytest.approx(4 * np.sqrt(1 / (12 * 60) * 2), rel=0.35)


@pytest.mark.parametrize(
    ("area", "rate", "verdict"),
    [
        ((0.7, 0.61, 0.8), (0.1, 0.0, 0.2), OVER),
        ((0.5, 0.45, 0.55), (0.5, 0.31, 0.7), OVER),
        ((0.5, 0.45, 0.6), (0.1, 0.0, 0.3), UNDER),
        ((0.5, 0.3, 0.7), (0.1, 0.0, 0.2), OPEN),
    ],
)
def test_verdicts(area: tuple[float, float, float], rate: tuple[float, float, float], verdict: str) -> None:
    assert Power(50, 50, Interval(*area), Interval(*rate), 0.1).verdict == verdict


def test_sites_whose_losses_differ_tell_of_nobody() -> None:
    keys = [CaseKey(site, str(i)) for site in ("ada", "bea") for i in range(3)]
    assert centred(keys, numbers(1, 2, 3, 11, 12, 14)).tolist() == [-1, 0, 1, -1, 0, 2]
