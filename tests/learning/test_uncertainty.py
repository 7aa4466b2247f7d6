"""UFPS, Eqs. 6, 7, 8 and Note S8, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from consilium.learning.uncertainty import SCHEDULERS, Scheduler, trust, uncertainty

BANK = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])  # mean .3, range .4


def test_uncertainty_is_a_mean_over_classes_of_means_over_their_voxels() -> None:
    """Class 0: (.1 + .3) / (2 + 1); class 1: .6 / (1 + 1); class 2 has no voxel. Divided by all three."""
    entropy = torch.tensor([[0.1, 0.6, 0.3]])
    labels = torch.tensor([[0, 1, 0]], dtype=torch.uint8)
    assert uncertainty(entropy, labels, 3).item() == pytest.approx((0.4 / 3 + 0.6 / 2) / 3)


def test_every_case_has_its_own() -> None:
    entropy, labels = torch.rand(3, 4, 5, 6), torch.randint(0, 4, (3, 4, 5, 6), dtype=torch.uint8)
    apart = [uncertainty(entropy[i : i + 1], labels[i : i + 1], 4).item() for i in range(3)]
    assert uncertainty(entropy, labels, 4).tolist() == pytest.approx(apart)


def weight(kind: str, score: float, progress: float, bank: torch.Tensor = BANK) -> float:
    return Scheduler(kind).weights(torch.tensor([score]), bank, progress).item()


def test_tail_shift() -> None:
    """The .7 quantile of the bank is .38; norm(.2) = −.25, norm(.5) = .5."""
    assert weight("tail-shift", 0.2, 0.5) == pytest.approx(2 - math.exp(-0.25))
    assert weight("tail-shift", 0.5, 0.0) == pytest.approx(2 - math.exp(0.5))
    assert weight("tail-shift", 0.5, 0.5) == pytest.approx(2 - math.exp(0.0))
    assert weight("tail-shift", 0.5, 1.0) == pytest.approx(2 - math.exp(-0.5))
    assert weight("tail-shift", 0.38, 1.0) == pytest.approx(2 - math.exp(0.2))  # at the quantile, not above it


def test_base_decrement_ends_at_equal_weights() -> None:
    assert weight("base-decrement", 0.2, 0.0) == pytest.approx(2 - math.exp(-0.25))
    half = (1 - math.e) / 2 + math.e
    assert weight("base-decrement", 0.5, 0.5) == pytest.approx(2 - half**0.5)
    assert weight("base-decrement", 0.5, 1.0) == pytest.approx(1.0)


def test_the_round_trip_starts_at_the_surest_case_goes_to_the_threshold_and_back() -> None:
    """Note S8: norm(U_min) = −.5, norm(U_𝒯) = .2; the Gaussian's centre is −.5, −.15, .2, −.15, −.5."""
    for progress, centre in ((0.0, -0.5), (0.25, -0.15), (0.5, 0.2), (0.75, -0.15), (1.0, -0.5)):
        bell = math.exp(-((0.25 - centre) ** 2) / (2 * 0.28**2)) / (math.sqrt(2 * math.pi) * 0.28)
        expected = 0.3 * bell + 0.7 * (2 - math.exp(0.25))
        assert weight("round-trip", 0.4, progress) == pytest.approx(expected, rel=1e-4)


def test_every_scheduler_first_prefers_sure_cases() -> None:
    """Note S8: at the beginning less uncertain samples have the higher weight under any scheduler."""
    for kind in SCHEDULERS:
        weights = Scheduler(kind).weights(BANK, BANK, 0.0).tolist()
        assert weights == sorted(weights, reverse=True)


def test_the_round_trip_does_not_blow_up_the_tail() -> None:
    """Uncertainties spread over [0, 1], mid-run: the least sure case weighs .487, not more than the others."""
    bank = torch.linspace(0, 1, 1001)
    assert weight("round-trip", 1.0, 0.5, bank) == pytest.approx(0.487, abs=2e-3)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_weights_are_near_one_on_average_and_never_negative(kind: str) -> None:
    for progress in (0.0, 0.3, 1.0):
        weights = Scheduler(kind).weights(BANK, BANK, progress)
        assert 0.8 < weights.mean().item() < 1.35  # the tail shift ends above 1, the round trip starts below
    assert weight(kind, 5.0, 0.0) == 0.0  # far outside the bank: e^{norm} is above 2


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_equal_uncertainties_weigh_equally(kind: str) -> None:
    bank = torch.full((4,), 0.2)
    assert weight(kind, 0.2, 0.5, bank) == pytest.approx(1.0)
    assert weight(kind, 0.2, 0.5, torch.empty(0)) == 1.0  # before anything was seen


MEANS = {"a": 0.03, "b": 0.04, "c": 0.05}
VARIANCES = {"a": 2e-4, "b": 5e-4, "c": 9e-4}
CASES = {"a": 84.0, "b": 186.0, "c": 140.0}


def test_trust_with_the_papers_temperatures() -> None:
    """softmax(−.6, −.8, −1) = .4018 .3289 .2693; softmax(−.2, −.5, −.9) = .4456 .3301 .2213 …"""
    shares = trust(MEANS, VARIANCES, CASES, 0.05, 0.001)

    def cold(*values: float) -> list[float]:
        total = sum(math.exp(-v) for v in values)
        return [math.exp(-v) / total for v in values]

    expected = [
        (x + y + z / 410) / 3 for x, y, z in zip(cold(0.6, 0.8, 1.0), cold(0.2, 0.5, 0.9), (84, 186, 140), strict=True)
    ]
    assert list(shares.values()) == pytest.approx(expected)
    assert list(shares.values()) == pytest.approx([0.351, 0.371, 0.278], abs=1e-3)


@pytest.mark.parametrize("taus", [(0.05, 0.001), (0.0, 0.0)])
def test_trust_sums_to_one_and_prefers_less_noise(taus: tuple[float, float]) -> None:
    equal = dict.fromkeys(MEANS, 10.0)
    shares = trust(MEANS, VARIANCES, equal, *taus)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["a"] > shares["b"] > shares["c"]


def test_without_temperatures_only_ratios_count() -> None:
    tenfold = trust({k: 10 * v for k, v in MEANS.items()}, {k: 7 * v for k, v in VARIANCES.items()}, CASES)
    assert tenfold == pytest.approx(trust(MEANS, VARIANCES, CASES))
    certain = dict.fromkeys(MEANS, 0.0)
    assert trust(certain, certain, dict.fromkeys(MEANS, 1.0)) == pytest.approx(dict.fromkeys(MEANS, 1 / 3))
    assert trust({"a": 0.1}, {"a": 0.2}, {"a": 5.0, "b": 1.0}) == pytest.approx({"a": 1.0})
