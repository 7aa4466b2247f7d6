"""How well an attack tells members from non-members: AUC, TPR at a small FPR, accuracy and F1 by class, a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.randomness import numpy_generator

Numbers = NDArray[np.float64]

ENOUGH_FOR_ONE_PERCENT = 300  # non-members from which on the TPR is told at 1 % FPR
DRAWS = 1000  # of the bootstrap
BAR_AUC = 0.6  # the bar of the verdict: an AUC above it
BAR_TIMES = 3.0  # or a TPR above so many times the FPR

OVER, UNDER, OPEN = "over the bar", "under the bar", "cannot be told"


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % bootstrap interval over cases."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {"value": round(self.value, 6), "low": round(self.low, 6), "high": round(self.high, 6)}


@dataclass(frozen=True)
class ByClass:
    """What an attack decided, class by class as in table S13: accuracy is the share of a class that was recognised."""

    member_accuracy: float
    member_f1: float
    other_accuracy: float
    other_f1: float

    @property
    def mean_accuracy(self) -> float:
        return (self.member_accuracy + self.other_accuracy) / 2

    @property
    def mean_f1(self) -> float:
        return (self.member_f1 + self.other_f1) / 2

    def to_json(self) -> dict[str, dict[str, float]]:
        return {
            "class mean": {"accuracy": round(self.mean_accuracy, 6), "f1": round(self.mean_f1, 6)},
            "member": {"accuracy": round(self.member_accuracy, 6), "f1": round(self.member_f1, 6)},
            "non-member": {"accuracy": round(self.other_accuracy, 6), "f1": round(self.other_f1, 6)},
        }


@dataclass(frozen=True)
class Power:
    """How well one attack did on one model."""

    members: int
    others: int
    auc: Interval
    tpr: Interval
    fpr: float  # at which the TPR is told
    by_class: ByClass | None = None  # None: the attack ranks cases and does not decide

    @property
    def verdict(self) -> str:
        """Over the bar where the whole interval of one figure is; under it where both whole intervals are."""
        if self.auc.low > BAR_AUC or self.tpr.low > BAR_TIMES * self.fpr:
            return OVER
        return UNDER if self.auc.high <= BAR_AUC and self.tpr.high <= BAR_TIMES * self.fpr else OPEN

    def to_json(self) -> dict[str, Any]:
        decided = {} if self.by_class is None else {"by_class": self.by_class.to_json()}
        counts = {"members": self.members, "non_members": self.others}
        figures = {"auc": self.auc.to_json(), "tpr": self.tpr.to_json(), "fpr": self.fpr}
        return {**counts, **figures, **decided, "verdict": self.verdict}


def bar_in_words() -> str:
    return (
        f"The bar: an AUC of {BAR_AUC:g}, or a TPR of {BAR_TIMES:g} times the FPR. A model is over the bar where the "
        "whole 95 % interval of either is above, under it where both whole intervals are below; else the cases are too "
        "few to tell."
    )


def power(members: Numbers, others: Numbers, seed: int, by_class: ByClass | None = None) -> Power:
    """How well scores tell members (the larger ones) from non-members.

    Args:
        members: a score per member.
        others: a score per non-member.
        seed: of the bootstrap, which draws members and non-members anew, each among themselves.
        by_class: what the attack decided, where it decides.
    """
    fpr = 0.01 if len(others) >= ENOUGH_FOR_ONE_PERCENT else 0.1
    generator = numpy_generator(seed, "bootstrap")
    drawn = np.empty((DRAWS, 2))
    for row in drawn:
        one = members[generator.integers(len(members), size=len(members))]
        two = others[generator.integers(len(others), size=len(others))]
        row[:] = auc(one, two), tpr_at(one, two, fpr)
    (low, low_tpr), (high, high_tpr) = np.percentile(drawn, [2.5, 97.5], axis=0)
    area, rate = auc(members, others), tpr_at(members, others, fpr)
    ends = Interval(area, float(low), float(high)), Interval(rate, float(low_tpr), float(high_tpr))
    return Power(len(members), len(others), *ends, fpr, by_class)


def auc(members: Numbers, others: Numbers) -> float:
    """The chance that a member's score is above a non-member's; ties count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, members, "left") + np.searchsorted(ordered, members, "right")
    return float(below.sum() / (2 * len(members) * len(others)))


def tpr_at(members: Numbers, others: Numbers, fpr: float) -> float:
    """The share of members above a threshold that at most this share of non-members is above."""
    allowed = int(fpr * len(others) + 1e-9)
    threshold = np.sort(others)[len(others) - 1 - allowed]
    return float((members > threshold).mean())


def decided(members: NDArray[np.bool_], others: NDArray[np.bool_]) -> ByClass:
    """From what an attack called a member, among members and among non-members."""
    hits, misses = int(members.sum()), int((~members).sum())
    alarms, rejections = int(others.sum()), int((~others).sum())
    return ByClass(
        hits / len(members),
        _f1(hits, alarms, misses),
        rejections / len(others),
        _f1(rejections, misses, alarms),
    )


def best_threshold(members: Numbers, others: Numbers) -> float:
    """The threshold with the best mean of the two classes' accuracies; a score at or above it is called a member."""
    candidates = np.unique(np.concatenate([members, others]))
    gains = [(members >= t).mean() + (others < t).mean() for t in candidates]
    return float(candidates[int(np.argmax(gains))])


def _f1(true: int, false: int, missed: int) -> float:
    return 2 * true / (2 * true + false + missed) if true else 0.0
