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
    true = np.asarray(truth)
    said = chances.argmax(axis=1)
    table = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(table, (true, said), 1)
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
    have = int(table[i].sum())
    others = int(table.sum()) - have
    false = int(table[:, i].sum() - table[i, i])
    area = ends = None
    if have and others:
        area = area_under_roc(true == i, chances[:, i])
        mixed = [draw for draw in draws if 0 < (true[draw] == i).sum() < len(draw)]
        if mixed:
            areas = [area_under_roc(true[draw] == i, chances[draw, i]) for draw in mixed]
            low, high = np.percentile(areas, [2.5, 97.5])
            ends = (float(low), float(high))
    sensitivity = float(table[i, i] / have) if have else None
    return ClassMeasure(have, sensitivity, 1 - false / others if others else None, area, ends)


def area_under_roc(positive: NDArray[np.bool_], score: NDArray[Any]) -> float:
    """Of cases of both kinds, by trapezoids: scikit-learn's `roc_auc_score`, bit by bit, without its checks of inputs,
    which take most of its time."""
    if not np.isfinite(score).all():
        raise ValueError("scores that are no finite numbers have no order")
    order = np.argsort(-score, kind="stable")
    ends = np.append(np.nonzero(np.diff(score[order]))[0], len(order) - 1)  # the last case of every score
    hits = np.cumsum(positive[order], dtype=np.float64)[ends]
    misses = 1 + ends.astype(np.float64) - hits
    if len(ends) > 2:  # points between others on a line are left out
        corners = (np.diff(misses, 2) != 0) | (np.diff(hits, 2) != 0)
        kept = np.concatenate([[True], corners, [True]])
        hits, misses = hits[kept], misses[kept]
    y, x = (np.append(0.0, counts) / counts[-1] for counts in (hits, misses))
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2.0))


def _calibration(confidence: NDArray[Any], right: NDArray[np.float64]) -> tuple[CalibrationBin, ...]:
    """Bins of equal width; an empty one is left out."""
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return tuple(
        CalibrationBin(float(confidence[place == b].mean()), float(right[place == b].mean()), int((place == b).sum()))
        for b in np.unique(place)
    )
