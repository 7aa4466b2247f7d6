"""Losses foreseen from sums: the ridge by hand, sites that sum up to one, strengths by validation."""

from __future__ import annotations

import pytest
import torch

from consilium.learning.discriminant import sums_of
from consilium.learning.regression import STRENGTHS, LossForecast, chosen_strength, regression


def test_sums_of_two_sites_give_the_ridge_of_all_images() -> None:
    """Standardised features, centred losses: W = (XᵀX / n + s I)⁻¹ XᵀY / n."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((40, 5), generator=generator, dtype=torch.float64) * torch.tensor([1.0, 10, 0.1, 3, 1]) + 2
    y = x @ torch.randn((5, 3), generator=generator, dtype=torch.float64) + torch.randn((40, 3), generator=generator)
    both = torch.cat([x, y], 1)
    found = LossForecast(regression([sums_of(both[:25]), sums_of(both[25:])], 3))
    standard = (x - x.mean(0)) / x.std(0, unbiased=False)
    for strength in (1e-4, 0.1, 10.0):
        gram = standard.T @ standard / 40 + strength * torch.eye(5, dtype=torch.float64)
        weights = torch.linalg.solve(gram, standard.T @ (y - y.mean(0)) / 40)
        by_hand = standard @ weights + y.mean(0)
        torch.testing.assert_close(found.expected(x, strength), by_hand, rtol=1e-8, atol=1e-8)


def test_a_strong_ridge_expects_the_mean_losses() -> None:
    x = torch.randn((20, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = LossForecast(regression([sums_of(torch.cat([x, x[:, :2]], 1))], 2))
    torch.testing.assert_close(found.expected(x, 1e9), x[:, :2].mean(0).expand(20, 2), atol=1e-6, rtol=0)


def test_the_strength_with_the_best_site_mean_is_taken_and_of_equals_the_strongest() -> None:
    many = [0.0] * len(STRENGTHS)
    # the large site prefers the first strength by 0.1, the small one the third by 0.2: sites count alike
    large, small = many.copy(), many.copy()
    large[0], small[2] = 10.0, 0.4
    assert chosen_strength([(large, 100), (small, 2)]) == STRENGTHS[2]
    assert chosen_strength([(many, 3)]) == STRENGTHS[-1]
    assert chosen_strength([(many, 0)]) is None


def test_features_that_never_vary_do_no_harm() -> None:
    x = torch.ones((6, 2), dtype=torch.float64)
    y = torch.arange(6, dtype=torch.float64)[:, None]
    found = LossForecast(regression([sums_of(torch.cat([x, y], 1))], 1))
    assert found.expected(x[:1]).item() == pytest.approx(2.5)
