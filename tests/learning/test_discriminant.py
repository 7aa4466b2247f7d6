"""The closed-form discriminant: its sums, its probabilities against scikit-learn's, its limits, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from consilium.learning.discriminant import (
    NO_CASES,
    SHRINKAGES,
    TEMPERATURES,
    FeatureSums,
    Space,
    added,
    discriminant,
    distance_limits,
    oas_shrinkage,
    probabilities,
    routing_sums,
    summed,
    sums_of,
    symmetric,
    tempered,
    upper,
)

SITES = ("ada", "bea", "cid")


def clouds(n: int = 40, features: int = 6, apart: float = 2.0, seed: int = 0) -> dict[str, Tensor]:
    """Features of three sites: normal clouds of one shape, correlated and of very different scales."""
    draw = np.random.default_rng(seed)
    mix = draw.normal(size=(features, features)) * np.logspace(-1.5, 1.5, features)
    return {
        site: torch.from_numpy((draw.normal(size=(n, features)) + apart * draw.normal(size=features)) @ mix)
        for site in SITES
    }


# ------------------------------------------------------------------------------------------------ sums


def test_sums_by_hand() -> None:
    """Points (0, 0), (2, 4): mean (1, 2), scatter Σ (±1, ±2)(±1, ±2)ᵀ = [[2, 4], [4, 8]]."""
    found = sums_of(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    assert (found.n, found.mean.tolist(), found.scatter.tolist()) == (2, [1.0, 2.0], [2.0, 4.0, 8.0])
    assert found.mean.dtype == found.scatter.dtype == torch.float64


def test_batches_add_up_to_all_cases_together() -> None:
    """Far from zero (mean 1e6, deviation 1), in batches of 1, 7 and 32: as exact as the stacked features."""
    features = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
    found = summed(features.split([1, 7, 32]))
    assert found is not None and found.n == 40
    torch.testing.assert_close(found.mean, features.mean(0), rtol=1e-14, atol=0)
    by_numpy = torch.from_numpy(np.cov(features.T.numpy(), bias=True) * 40)
    torch.testing.assert_close(symmetric(found.scatter, 5), by_numpy, rtol=1e-8, atol=1e-8)
    assert summed([]) is None


def test_adding_does_not_depend_on_the_order_beyond_rounding() -> None:
    one, other = (sums_of(part) for part in clouds()["ada"].split([10, 30]))
    torch.testing.assert_close(added(one, other).scatter, added(other, one).scatter, rtol=1e-10, atol=1e-10)


def test_a_triangle_is_an_exactly_symmetric_matrix() -> None:
    matrix = torch.randn(7, 7, dtype=torch.float64)
    both = symmetric(upper(matrix + matrix.T), 7)
    assert both.equal(both.T) and both.equal(matrix + matrix.T)


# ------------------------------------------------------------------------------------------------ the discriminant


class Given:
    """A covariance estimator for scikit-learn that gives ours."""

    def __init__(self, covariance: np.ndarray) -> None:
        self.covariance_ = covariance

    def fit(self, _: object) -> Given:
        return self


@pytest.mark.parametrize("features", [6, 60])  # 60 features, 120 cases in all; and hardly any noise in some
def test_probabilities_are_scikit_learns(features: int) -> None:
    parts = clouds(features=features, apart=0.3)
    found = discriminant({site: sums_of(part) for site, part in parts.items()})
    space = Space(found)
    shrunk = space.correlation * (1 - found.shrinkage) + found.shrinkage * torch.eye(features)
    covariance = (shrunk * torch.outer(space.scale, space.scale)).numpy()
    reference = LinearDiscriminantAnalysis(
        solver="lsqr", priors=[1 / 3] * 3, covariance_estimator=Given(covariance)
    ).fit(torch.cat(list(parts.values())).numpy(), np.repeat(SITES, 40))
    fresh = torch.cat(list(clouds(features=features, apart=0.3, seed=1).values()))
    ours = probabilities(space.squared(fresh), 1.0).numpy()
    assert np.abs(ours - reference.predict_proba(fresh.numpy())).max() < 1e-6
    assert ours.min() < 0.05 < 0.6 < ours.max()


def test_the_covariance_is_shared_and_about_the_sites_own_means() -> None:
    """Two sites, x = 0, 2 and x = 10, 14: scatters 2 and 8, four cases less two means: (2 + 8) / 2 = 5."""
    sums = {"ada": sums_of(torch.tensor([[0.0], [2.0]])), "bea": sums_of(torch.tensor([[10.0], [14.0]]))}
    found = discriminant(sums)
    assert found.covariance.item() == 5.0
    assert Space(found).squared(torch.tensor([[6.0]])).tolist()[0] == pytest.approx([25 / 5, 36 / 5], rel=1e-4)


def test_large_sites_have_no_better_chances() -> None:
    """The middle between two means is even, though one site has ten times the cases."""
    sums = {
        "ada": FeatureSums(100, torch.tensor([0.0]).double(), torch.tensor([100.0]).double()),
        "bea": FeatureSums(10, torch.tensor([4.0]).double(), torch.tensor([10.0]).double()),
    }
    assert probabilities(Space(discriminant(sums)).squared(torch.tensor([[2.0]])), 1.0).tolist() == [[0.5, 0.5]]


def test_shrinkage_by_oas() -> None:
    """Against scikit-learn, which leaves out the terms in 2/p: within them; the identity is shrunk wholly."""
    x = np.random.default_rng(0).normal(size=(30, 200)) @ np.diag(np.linspace(0.5, 2, 200))
    x -= x.mean(0)
    ours = oas_shrinkage(torch.from_numpy(x.T @ x / 30), 30)
    assert ours == pytest.approx(OAS(assume_centered=True).fit(x).shrinkage_, rel=0.01)
    assert oas_shrinkage(torch.eye(5).double(), 10) == 1.0


def test_features_that_never_vary_do_no_harm() -> None:
    """A dead channel, and one that is constant inside sites but not between them."""
    parts = {site: torch.cat([part, torch.zeros(40, 1), torch.full((40, 1), float(i))], 1)
             for i, (site, part) in enumerate(clouds().items())}  # fmt: skip
    squared = Space(discriminant({site: sums_of(part) for site, part in parts.items()})).squared(parts["bea"])
    assert torch.isfinite(squared).all()
    assert (squared.argmin(1) == 1).all()


def test_few_cases_of_many_features() -> None:
    """Two cases per site, 50 features: sites that are apart are told apart."""
    parts = clouds(n=2, features=50, apart=3.0)
    squared = Space(discriminant({site: sums_of(part) for site, part in parts.items()})).squared(parts["cid"])
    assert torch.isfinite(squared).all() and (squared.argmin(1) == 2).all()


# ------------------------------------------------------------------------------------------------ validation


def on_validation(apart: float, n: int = 40) -> tuple[Space, dict[str, Tensor]]:
    parts = clouds(apart=apart, n=2 * n)
    space = Space(discriminant({site: sums_of(part[:n]) for site, part in parts.items()}))
    return space, {site: part[n:] for site, part in parts.items()}


def test_the_temperature_makes_the_probabilities_honest() -> None:
    """A discriminant that is ten times too sure is cooled by about that, and then expects what happens."""
    space, valid = on_validation(0.5)
    sure = replace(space.found, covariance=space.found.covariance / 10)
    sums = {site: routing_sums(Space(sure), part, site) for site, part in valid.items()}
    found = tempered(sure, sums, 0.999)
    assert found.temperature in (4.0, 8.0, 16.0)
    squared = torch.cat([Space(found).squared(part) for part in valid.values()])
    right = (squared.argmin(1) == torch.arange(3).repeat_interleave(40)).double().mean().item()
    assert probabilities(squared, found.temperature).max(1).values.mean().item() == pytest.approx(right, abs=0.07)


def test_a_sure_and_right_discriminant_stays_as_it_is() -> None:
    space, valid = on_validation(50.0)
    found = tempered(space.found, {s: routing_sums(space, part, s) for s, part in valid.items()}, 0.999)
    assert found.temperature == 1.0
    assert abs(found.shrinkage - space.found.shrinkage) == min(abs(s - space.found.shrinkage) for s in SHRINKAGES)


def test_without_validation_cases_nothing_changes() -> None:
    space, _ = on_validation(1.0)
    assert tempered(space.found, dict.fromkeys(SITES, NO_CASES), 0.999) is space.found
    assert len(NO_CASES.surprise) == len(SHRINKAGES) * len(TEMPERATURES)


def test_limits_by_hand() -> None:
    """Distances e⁰, e² at ada and e³, e⁵ at bea: means 1 and 4, shared variance (2 + 2) / 2 = 2; cid has no case."""
    logs = {"ada": (2, 2.0, 4.0), "bea": (2, 8.0, 34.0)}
    found = distance_limits(logs, SITES, 0.99)
    reach = NormalDist().inv_cdf(0.99) * math.sqrt(2)
    assert {site: math.log(limit) for site, limit in found.items()} == pytest.approx(
        {"ada": 1 + reach, "bea": 4 + reach, "cid": 2.5 + reach}
    )
    assert distance_limits(logs, SITES, 1.0) == {}
    assert distance_limits({"ada": (1, 2.0, 4.0)}, SITES, 0.99) == {}  # one case has no spread


def test_limits_let_nearly_all_of_the_sites_own_cases_through() -> None:
    """500 fresh cases of each site against limits from 40 validation cases; clouds ten times as far are all beyond."""
    space, valid = on_validation(1.0)
    found = tempered(space.found, {s: routing_sums(space, part, s) for s, part in valid.items()}, 0.999)
    limits = torch.tensor([found.limits[site] for site in SITES])
    far = Space(found).squared(torch.cat([part[:20] * 10 for part in valid.values()])).sqrt() > limits
    own = Space(found).squared(torch.cat([part[40:] for part in clouds(apart=1.0, n=540).values()])).sqrt() > limits
    assert far.all(1).double().mean() > 0.9
    assert own.all(1).double().mean() < 0.02
