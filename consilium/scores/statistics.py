"""How sure a difference is: bootstrap intervals over cases and the paired comparison of two runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from consilium.scores.means import exact_mean

_CHUNK = 4_000_000  # resampled values held at once, 32 MB
_SLICE = re.compile(r"#\d+$")  # of a case that is a slice of a volume


Values = Sequence[float] | Mapping[str, float]  # of one site; with the names of cases, slices of a volume stay together


def interval(
    values: Mapping[str, Values],
    seed: int = 0,
    draws: int = 2000,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the site mean, cases resampled within each site.

    Slices of one volume are drawn together: they are one patient. A site with one case has no spread of its own and
    takes that of the other sites' cases; that may leave the score's range, so the interval ends `within` it.
    """
    low, high = np.percentile(_resampled(values, seed, draws), [2.5, 97.5]).clip(*within)
    return float(low), float(high)


@dataclass(frozen=True)
class Paired:
    """How much higher `a` is than `b` on the cases both were scored on."""

    difference: float  # of the site means
    low: float  # 95 % bootstrap interval of the difference
    high: float
    p: float  # Wilcoxon signed-rank, two-sided, over the pooled cases; of slices over volumes
    cases: int
    single: tuple[str, ...] = ()  # sites with one case, whose spread is taken from the others


def paired(a: Mapping[str, Mapping[str, float]], b: Mapping[str, Mapping[str, float]]) -> Paired | None:
    """Compare two runs case by case; None if they share no case."""
    gaps = {s: {c: a[s][c] - b[s][c] for c in sorted(a[s].keys() & b[s].keys())} for s in sorted(a.keys() & b.keys())}
    gaps = {site: found for site, found in gaps.items() if found}
    if not gaps:
        return None
    low, high = interval(gaps)
    patients = {site: _patients(found) for site, found in gaps.items()}
    pooled = [exact_mean(each) for found in patients.values() for each in found]
    difference = exact_mean(exact_mean(found.values()) for found in gaps.values())
    single = tuple(site for site, found in patients.items() if len(found) == 1)
    return Paired(difference, low, high, _wilcoxon(pooled), sum(map(len, gaps.values())), single)


def _patients(values: Values) -> list[list[float]]:
    """The values that belong together: those of one volume's slices, else each by itself."""
    if not isinstance(values, Mapping):
        return [[value] for value in values]
    found: dict[str, list[float]] = {}
    for case, value in values.items():
        found.setdefault(volume_of(case), []).append(value)
    return list(found.values())


def volume_of(case: str) -> str:
    """The volume of a case that is a slice; any other case by its own name."""
    return _SLICE.sub("", case)


def _resampled(values: Mapping[str, Values], seed: int, draws: int) -> NDArray[np.float64]:
    """Draws of the site mean, in site-name order."""
    generator = np.random.default_rng(seed)
    sites = [_patients(values[site]) for site in sorted(values) if len(values[site])]
    if not sites:
        raise ValueError("an interval needs at least one value")
    spread = _deviations(sites)
    means: NDArray[np.float64] = np.stack([_resample(site, spread, generator, draws) for site in sites]).mean(axis=0)
    return means


def _deviations(sites: Sequence[Sequence[Sequence[float]]]) -> NDArray[np.float64]:
    """How far patients lie from their site's mean, at all sites with several; without any, sites from each other."""
    means = [np.array([exact_mean(each) for each in site]) for site in sites]
    several = [found for found in means if len(found) > 1] or [np.concatenate(means)]
    # of n patients the mean is one of the unknowns: n / (n - 1)
    parts = [(found - found.mean()) * np.sqrt(len(found) / max(1, len(found) - 1)) for found in several]
    return np.concatenate(parts)


def _resample(
    patients: Sequence[Sequence[float]], spread: NDArray[np.float64], generator: np.random.Generator, draws: int
) -> NDArray[np.float64]:
    n = len(patients)
    if n == 1:
        return exact_mean(patients[0]) + spread[generator.integers(0, len(spread), draws)]
    sums = np.array([exact_mean(each) * len(each) for each in patients])
    counts = np.array([len(each) for each in patients], dtype=np.float64)
    step = max(1, _CHUNK // n)
    found = []
    for start in range(0, draws, step):
        drawn = generator.integers(0, n, (min(step, draws - start), n))
        found.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(found)


def _wilcoxon(gaps: Sequence[float]) -> float:
    from scipy.stats import wilcoxon  # here, because importing it takes longer than most uses of this file

    if not any(gaps):
        return 1.0
    return float(wilcoxon(gaps).pvalue)
