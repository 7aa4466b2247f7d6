"""The loss along random lines: exact on a bowl, and the run's own loss in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from consilium.analysis.loss_surface import Surface, direction, site_surfaces, surface
from consilium.analysis.opening import Runs
from consilium.errors import RunError, StudyError, UserError
from consilium.randomness import torch_generator
from consilium.weights import Weights

MODEL = Weights({
    "conv": torch.arange(1.0, 13.0).reshape(2, 2, 3),
    "bias": torch.tensor([3.0, 4.0]),
    "mean": torch.tensor([7.0, 7.0]),
    "count": torch.tensor(5),
})  # fmt: skip


def bowl(weights: Weights) -> float:
    return weights.dot(weights)


def test_the_rise_of_a_bowl_is_the_radius_squared() -> None:
    """‖w + t d‖² = ‖w‖² + 2 t w·d + t², so the two ends of every line lie 25 + t² high on average."""
    found = surface(bowl, Weights({"w": torch.tensor([3.0, 4.0])}), radius=2, points=5, directions=10, seed=0)
    assert found.steps == (-2, -1, 0, 1, 2)
    assert found.centre == pytest.approx(25)
    for losses in found.losses:
        assert (losses[0] + losses[4]) / 2 == pytest.approx(29, rel=1e-6)
        assert (losses[1] + losses[3]) / 2 == pytest.approx(26, rel=1e-6)
    assert found.rise == pytest.approx(4, rel=1e-6)


def test_along_a_known_direction() -> None:
    way = direction(MODEL, torch_generator(3, "direction", 0))
    found = surface(bowl, MODEL, radius=1, points=3, directions=1, seed=3)
    assert found.losses[0][2] == pytest.approx(bowl(MODEL) + 2 * MODEL.dot(way) + 1, rel=1e-6)


def test_directions_have_length_one_and_move_parameters_only() -> None:
    way = direction(MODEL, torch_generator(0), moved={"conv", "bias"})
    assert way.norm() == pytest.approx(1)
    assert way["mean"].tolist() == [0, 0]
    assert (MODEL + 3 * way)["count"] == 5


def test_filterwise_directions_are_as_long_as_the_model() -> None:
    way = direction(MODEL, torch_generator(0), filterwise=True)
    assert way["conv"].flatten(1).norm(dim=1).tolist() == pytest.approx(MODEL["conv"].flatten(1).norm(dim=1).tolist())
    assert way["bias"].tolist() == [0, 0]


def test_the_seed_decides() -> None:
    def made(seed: int) -> Surface:
        return surface(bowl, MODEL, 1, 3, 2, seed)

    assert made(0) == made(0)
    assert made(0) != made(1)


@pytest.mark.parametrize(("radius", "points", "directions"), [(0.0, 3, 1), (1.0, 4, 1), (1.0, 1, 1), (1.0, 3, 0)])
def test_what_cannot_be_drawn_is_refused(radius: float, points: int, directions: int) -> None:
    with pytest.raises(UserError, match="odd number of points"):
        surface(bowl, MODEL, radius, points, directions, 0)


def test_models_of_several_runs_at_one_site(finished: Mapping[str, Path]) -> None:
    runs = Runs([finished[name] for name in ("local", "fedavg", "guest", "pooled")]).opened
    found = site_surfaces(runs, "bea", points=3, directions=2)
    assert set(found) == {"Local", "FedAvg", "FedSM: global model", "FedSM: personal model", "Pooled"}
    here = runs[1].worker("bea")
    model = runs[1].models(here)["global"]
    assert found["FedAvg"]["test"].centre == here.site.loss(model.weights, "test")
    assert len({surfaces["train"].steps for surfaces in found.values()}) == 1


def test_a_guest_has_no_local_model(finished: Mapping[str, Path]) -> None:
    (guest,) = Runs([finished["guest"]]).opened
    assert list(site_surfaces([guest], "cid", 1.0, 3, 1)) == [guest.name]  # the global model only
    with pytest.raises(StudyError, match="there is no site 'dan'"):
        site_surfaces([guest], "dan", 1.0, 3, 1)
    with pytest.raises(RunError, match="try another --site"):
        site_surfaces([], "cid", 1.0, 3, 1)
