"""ε of many releases together: opacus's accountants, and the closed form where nothing is sampled.

One `Use` is a Gaussian mechanism on a Poisson sample of the patients, taken some number of times. With rate 1 all
patients are in it. Neighbours differ by one patient who is there or is not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from consilium.errors import StudyError

ACCOUNTANTS = ("rdp", "prv")
EXACT = "exact"  # the closed form of Gaussian mechanisms
# of Rényi divergences: any list bounds ε. Whole orders are quick; with these it is within 1 % of opacus's own list
ORDERS = [
    *(1 + x / 4 for x in range(1, 12)),
    *range(4, 17),
    4.5,
    5.5,
    6.5,
    18,
    20,
    24,
    28,
    32,
    40,
    48,
    64,
    96,
    128,
    256,
]
MOST_NOISE = 1e4  # more is not tried: an ε that needs it cannot be had


class Use(NamedTuple):
    """So many draws of one kind."""

    noise: float  # standard deviation of the noise, in the largest change that one patient can make; 0: none
    rate: float = 1.0  # of every patient to be drawn
    steps: int = 1


def require_opacus() -> None:
    if find_spec("opacus") is None:
        raise StudyError("[privacy] unit = 'patient' needs the package opacus: pip install 'consilium[dp]'.")


def accountant_of(uses: Iterable[Use], accountant: str = "rdp") -> str:
    """The name of what counts these uses."""
    return accountant if any(use.rate < 1 for use in uses) else EXACT


def composed(uses: Iterable[Use], delta: float, accountant: str = "rdp") -> float:
    """The ε of all uses together at a δ; infinite if one of them has no noise."""
    merged = _merged(uses)
    if not merged:
        return 0.0
    if not all(use.noise for use in merged):
        return math.inf
    if all(use.rate >= 1 for use in merged):
        return epsilon(math.sqrt(math.fsum(use.steps / use.noise**2 for use in merged)), delta)
    return (_by_prv if accountant == "prv" else _by_rdp)(merged, delta)


def noise_for(target: float, delta: float, uses: Callable[[float], Sequence[Use]], accountant: str = "rdp") -> float:
    """The least noise, to a thousandth, whose `uses` together stay within the target ε."""

    def within(noise: float) -> bool:
        return composed(uses(noise), delta, accountant) <= target

    low, high = 0.0, 1.0
    while not within(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise StudyError(
                f"[privacy] epsilon = {target}: no noise reaches it; raise it, or [privacy] statistics, or take fewer "
                "rounds."
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0.05 and within(middle) else (middle, high)
    return high


def _merged(uses: Iterable[Use]) -> tuple[Use, ...]:
    """The same noise and rate counted once, in a fixed order."""
    steps: dict[tuple[float, float], int] = {}
    for use in uses:
        steps[use.noise, use.rate] = steps.get((use.noise, use.rate), 0) + use.steps
    return tuple(Use(noise, rate, count) for (noise, rate), count in sorted(steps.items()) if count)


def _by_rdp(uses: Sequence[Use], delta: float) -> float:
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = sum(use.steps * _divergences(use.noise, use.rate) for use in uses)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the last one tried: the bound holds all the same
        return float(get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)[0])


@lru_cache(maxsize=256)
def _divergences(noise: float, rate: float) -> Any:
    """Rényi divergences of one draw, by order."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)


@lru_cache(maxsize=256)
def _by_prv(uses: Sequence[Use], delta: float) -> float:
    from opacus.accountants import PRVAccountant

    counter = PRVAccountant()
    counter.history = [tuple(use) for use in uses]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(counter.get_epsilon(delta))


# ---------------------------------------------------------------------------------------------- the closed form


def epsilon(mean: float, delta: float) -> float:
    """The smallest ε of a Gaussian mechanism whose two distributions lie `mean` standard deviations apart, for a δ.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) falls with ε, so halving finds it.
    """
    low, high = 0.0, 1.0
    while _delta(mean, high) > delta:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(mean, middle) > delta else (low, middle)
    return high


def _delta(mean: float, epsilon: float) -> float:
    from scipy.special import log_ndtr, ndtr  # late: few studies need it

    return float(ndtr(mean / 2 - epsilon / mean) - math.exp(epsilon + log_ndtr(-mean / 2 - epsilon / mean)))
