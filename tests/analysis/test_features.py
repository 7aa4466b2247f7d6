"""What the selector sees: the right layer, and a layout that keeps apart what is apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from consilium.analysis.features import laid_out, selector_features, separation
from consilium.analysis.opening import Runs
from consilium.errors import UserError
from consilium.learning.discriminant import probabilities
from consilium.methods.routers import DiscriminantRouter, penultimate
from tests.toy import SIZES

SITES = ["ada"] * 12 + ["bea"] * 12 + ["cid"] * 12


@pytest.fixture(scope="module")
def clouds() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate([rng.normal(10 * k, 1, (12, 8)) for k in range(3)])


@pytest.mark.parametrize("way", ["tsne", "pca"])
def test_clouds_stay_apart(clouds: np.ndarray, way: str) -> None:
    points = laid_out(clouds, way)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1) + 1e9 * np.eye(len(points))
    assert [SITES[i] for i in distances.argmin(1)] == SITES
    assert np.array_equal(points, laid_out(clouds, way))


def test_separation() -> None:
    values = np.array([[0.0], [0.0], [1.0], [1.0]])
    assert separation(values, ["a", "a", "b", "b"]) == 1.0
    assert separation(values, ["a", "a", "a", "a"]) is None


@pytest.mark.parametrize("shape", [(4, 8), (5, 1), (40, 2)])
def test_few_cases_and_few_features(shape: tuple[int, int]) -> None:
    assert laid_out(np.random.default_rng(0).normal(size=shape)).shape == (shape[0], 2)


def test_equal_features_lie_in_one_point() -> None:
    assert np.ptp(laid_out(np.ones((6, 3))), axis=0).tolist() == [0, 0]


def test_what_cannot_be_laid_out_is_refused() -> None:
    with pytest.raises(UserError, match="at least 4"):
        laid_out(np.ones((3, 2)))
    with pytest.raises(UserError, match="tsne or pca"):
        laid_out(np.ones((5, 2)), "umap")


def test_the_input_of_the_last_linear_layer() -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 3))
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))  # type: ignore[operator]
    assert penultimate(network, torch.tensor([[3.0, 4.0]])).tolist() == [[3.0, 0.0]]
    with pytest.raises(UserError, match="no linear layer"):
        penultimate(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 2, 2))


def test_features_of_a_run_give_back_its_selections(finished: Mapping[str, Path]) -> None:
    """The distances between the features and the sites' means give the selector's probabilities."""
    (run,) = Runs([finished["guest"]]).opened
    found = selector_features(run)
    assert len(found.seen) == sum(map(sum, SIZES.values()))
    assert {one.site for one in found.seen if one.outside} == {"cid"}
    worker = run.worker("bea")
    model = run.super_model(worker)
    (batch,) = worker.site.data.whole("test", 16)
    router = model.router
    assert isinstance(router, DiscriminantRouter)
    means = router.space.whitened(router.space.means, router.found.shrinkage)
    rows = [i for i, one in enumerate(found.seen) if (one.site, one.split) == ("bea", "test")]
    gaps = torch.from_numpy(found.values[rows]).double()[:, None] - means[None]
    chances = probabilities(gaps.square().sum(2), router.found.temperature)
    assert torch.allclose(chances.float(), model.routes(batch.images).chances, atol=1e-5)
