"""Measures of classification from probabilities: confusion, sensitivity, specificity, AUC, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.scores.statistics import interval

BINS = 10  # of confidence, for calibration
DRAWS = 200  # of cases, for intervals of AUC


@dataclass(frozen=True)
class ClassMeasure:
    """One class against the rest; None if the cases do not determine it."""

    cases: int
    sensitivity: float | None
    specificity: float | None
    auc: float | None
    auc_interval: tuple[float, float] | None  # 95 %, bootstrap over cases


@dataclass(frozen=True)
class CalibrationBin:
    """The cases whose confidence lies in one bin."""

    confidence: float  # mean
    accuracy: float
    cases: int


@dataclass(frozen=True)
class ClassReport:
    """All measures over some cases."""

    labels: tuple[str, ...]
    cases: int
    accuracy: float
    accuracy_interval: tuple[float, float]  # 95 %, bootstrap over cases
    classes: tuple[ClassMeasure, ...]  # in the order of the labels
    auc: float | None  # mean over classes
    confusion: tuple[tuple[int, ...], ...]  # [true][predicted]
    ece: float  # expected calibration error
    calibration: tuple[CalibrationBin, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def class_report(truth: Sequence[int], chances: NDArray[np.floating[Any]], labels: Sequence[str]) -> ClassReport:
    """Measures of probabilities (cases, classes) against true classes (cases,)."""
    from sklearn.metrics import confusion_matrix

    true = np.asarray(truth)
    said = chances.argmax(axis=1)
    table = confusion_matrix(true, said, labels=range(len(labels)))
    right = (said == true).astype(np.float64)
    draws = np.random.default_rng(0).integers(0, len(true), (DRAWS, len(true)))
    classes = tuple(_measure(table, true, chances, i, draws) for i in range(len(labels)))
    areas = [one.auc for one in classes if one.auc is not None]
    bins = _calibration(chances.max(axis=1), right)
    return ClassReport(
        labels=tuple(labels),
        cases=len(true),
        accuracy=float(right.mean()),
        accuracy_interval=interval({"": right.tolist()}),
        classes=classes,
        auc=float(np.mean(areas)) if areas else None,
        confusion=tuple(tuple(int(n) for n in row) for row in table),
        ece=float(sum(b.cases * abs(b.confidence - b.accuracy) for b in bins) / len(true)),
        calibration=bins,
    )


def _measure(
    table: NDArray[Any], true: NDArray[Any], chances: NDArray[Any], i: int, draws: NDArray[np.int64]
) -> ClassMeasure:
    from sklearn.metrics import roc_auc_score

    have = int(table[i].sum())
    others = int(table.sum()) - have
    false = int(table[:, i].sum() - table[i, i])
    area = ends = None
    if have and others:
        area = float(roc_auc_score(true == i, chances[:, i]))
        mixed = [draw for draw in draws if 0 < (true[draw] == i).sum() < len(draw)]
        if mixed:
            areas = [roc_auc_score(true[draw] == i, chances[draw, i]) for draw in mixed]
            low, high = np.percentile(areas, [2.5, 97.5])
            ends = (float(low), float(high))
    sensitivity = float(table[i, i] / have) if have else None
    return ClassMeasure(have, sensitivity, 1 - false / others if others else None, area, ends)


def _calibration(confidence: NDArray[Any], right: NDArray[np.float64]) -> tuple[CalibrationBin, ...]:
    """Bins of equal width; an empty one is left out."""
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return tuple(
        CalibrationBin(float(confidence[place == b].mean()), float(right[place == b].mean()), int((place == b).sum()))
        for b in np.unique(place)
    )
