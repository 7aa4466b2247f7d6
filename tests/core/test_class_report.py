"""Measures of classes, on numbers small enough to check on paper."""

from __future__ import annotations

import numpy as np
import pytest

from consilium.scores.classes import area_under_roc, class_report

TRUTH = [0, 0, 0, 1, 1]
CHANCES = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7], [0.6, 0.4]])


def test_confusion_sensitivity_specificity_and_auc_by_hand() -> None:
    found = class_report(TRUTH, CHANCES, ("well", "ill"))
    assert found.confusion == ((2, 1), (1, 1))
    assert found.accuracy == pytest.approx(3 / 5)
    well, ill = found.classes
    assert (well.cases, well.sensitivity, well.specificity) == (3, pytest.approx(2 / 3), pytest.approx(1 / 2))
    assert (ill.cases, ill.sensitivity, ill.specificity) == (2, pytest.approx(1 / 2), pytest.approx(2 / 3))
    # of the 3 × 2 pairs (well, ill), the ill one has the higher chance of being ill in 5: all but 0.4 against 0.6
    assert [ill.auc, well.auc, found.auc] == pytest.approx([5 / 6] * 3)
    low, high = ill.auc_interval or (0, 0)
    assert 0 <= low <= 5 / 6 <= high <= 1


def test_the_area_is_scikit_learns_bit_by_bit() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    for cases in (2, 3, 7, 40, 300):
        for digits in (1, 2, 8):  # with few digits there are ties
            for kind in (np.float32, np.float64):
                positive = rng.permutation(np.arange(cases) < max(1, cases // 3))
                score = (0.3 * positive + rng.random(cases)).round(digits).astype(kind)
                assert area_under_roc(positive, score) == roc_auc_score(positive, score)


def test_calibration_by_hand() -> None:
    found = class_report(TRUTH, CHANCES, ("well", "ill"))
    # confidences 0.9, 0.8, 0.6 (wrong), 0.7, 0.6 (wrong): bins 6, 7, 8, 9
    assert [(round(b.confidence, 6), b.accuracy, b.cases) for b in found.calibration] == [
        (0.6, 0.0, 2),
        (0.7, 1.0, 1),
        (0.8, 1.0, 1),
        (0.9, 1.0, 1),
    ]
    assert found.ece == pytest.approx((2 * 0.6 + 0.3 + 0.2 + 0.1) / 5)


def test_a_class_without_cases_has_no_sensitivity() -> None:
    found = class_report([0, 0], np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1]]), ("a", "b", "c"))
    assert [(one.sensitivity, one.auc) for one in found.classes] == [(0.5, None), (None, None), (None, None)]
    assert found.classes[0].specificity is None and found.auc is None
