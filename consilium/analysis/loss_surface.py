"""How sharp is the valley a model lies in? The loss along straight lines through it, as in figure 4 of FedSM.

A random direction in the space of all parameters has length one, so a step is a distance between models and curves of
models of one architecture can be compared. With `filterwise` every filter of the direction gets the length of the
model's own filter and biases stay, as Li et al. (Visualizing the loss landscape of neural nets, NeurIPS 2018)
propose: a step is then a share of the model's own size. Only parameters move, never running statistics.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.analysis.probing import loss_at, models_at
from consilium.errors import RunError, UserError
from consilium.randomness import torch_generator
from consilium.weights import SiteName, Weights

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Surface:
    """The loss at every step of every direction."""

    steps: tuple[float, ...]  # symmetric; the middle one is 0, the model itself
    losses: tuple[tuple[float, ...], ...]  # one row per direction

    @property
    def mean(self) -> tuple[float, ...]:
        """Over the directions, at every step."""
        return tuple(statistics.fmean(column) for column in zip(*self.losses, strict=True))

    @property
    def centre(self) -> float:
        return self.mean[len(self.steps) // 2]

    @property
    def rise(self) -> float:
        """How much the mean loss grows from the model to the two ends: large is sharp."""
        return (self.mean[0] + self.mean[-1]) / 2 - self.centre

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "mean": list(self.mean),
            "losses": [list(row) for row in self.losses],
            "centre": self.centre,
            "rise": self.rise,
        }


def surface(
    loss_of: Callable[[Weights], float],
    weights: Weights,
    radius: float,
    points: int,
    directions: int,
    seed: int,
    moved: Collection[str] | None = None,
    filterwise: bool = False,
) -> Surface:
    """The loss from −radius to +radius along random directions; `moved` names the parameters, None: all floats.

    >>> bowl = surface(lambda w: w.dot(w), Weights({"w": torch.zeros(3)}), radius=2, points=3, directions=1, seed=0)
    >>> [round(loss, 4) for loss in bowl.mean]
    [4.0, 0.0, 4.0]
    """
    _check(radius, points, directions)
    steps = tuple(float(step) for step in np.linspace(-radius, radius, points))
    rows = []
    for index in range(directions):
        way = direction(weights, torch_generator(seed, "direction", index), moved, filterwise)
        rows.append(tuple(loss_of(weights + step * way) for step in steps))
    return Surface(steps, tuple(rows))


def _check(radius: float, points: int, directions: int) -> None:
    if not radius > 0 or points < 3 or points % 2 == 0 or directions < 1:
        raise UserError(
            "a loss surface needs a positive radius, at least one direction and an odd number of points from 3 on, "
            "so that the model itself is the middle one."
        )


@dataclass(frozen=True)
class Plane:
    """The loss on a square grid around a model."""

    steps: tuple[float, ...]  # along either direction; the middle one is 0, the model itself
    losses: tuple[tuple[float, ...], ...]  # a row per step along the second direction

    @property
    def centre(self) -> float:
        return self.losses[len(self.steps) // 2][len(self.steps) // 2]

    @property
    def rise(self) -> float:
        """How much the loss grows to the edge of the square, on average: large is sharp."""
        edge = [*self.losses[0], *self.losses[-1], *(end for row in self.losses[1:-1] for end in (row[0], row[-1]))]
        return statistics.fmean(edge) - self.centre

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "losses": [list(row) for row in self.losses],
            "centre": self.centre,
            "rise": self.rise,
        }


def plane(
    loss_of: Callable[[Weights], float],
    weights: Weights,
    radius: float,
    points: int,
    seed: int,
    moved: Collection[str] | None = None,
    filterwise: bool = False,
) -> Plane:
    """The loss on the square spanned by two random directions, the same two for every model of one architecture."""
    _check(radius, points, 2)
    steps = tuple(float(step) for step in np.linspace(-radius, radius, points))
    one, other = (direction(weights, torch_generator(seed, "plane", i), moved, filterwise) for i in range(2))
    rows = [[loss_of(weights + x * one + y * other) for x in steps] for y in steps]
    return Plane(steps, tuple(map(tuple, rows)))


def direction(
    weights: Weights, generator: torch.Generator, moved: Collection[str] | None = None, filterwise: bool = False
) -> Weights:
    """A random direction: of length one in all, or filter by filter as long as the model; zero where nothing moves."""

    def draw(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or (moved is not None and name not in moved):
            return torch.zeros_like(tensor)
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return _filter_scaled(drawn, tensor) if filterwise else drawn

    drawn = Weights.over({name: draw(name, tensor) for name, tensor in weights.items()})
    return drawn if filterwise else drawn / drawn.norm()


def _filter_scaled(drawn: Tensor, like: Tensor) -> Tensor:
    """Every filter (first index) as long as the model's own; biases and scales, which have none, do not move."""
    if like.dim() < 2:
        return torch.zeros_like(like)
    lengths = [tensor.flatten(1).norm(dim=1).clamp_min(1e-12) for tensor in (like, drawn)]
    factors: Tensor = lengths[0] / lengths[1]
    return drawn * factors.reshape(-1, *(1,) * (like.dim() - 1))


def site_surfaces(
    runs: Sequence[OpenRun],
    site: SiteName,
    radius: float | None = None,
    points: int = 21,
    directions: int = 10,
    seed: int = 0,
    filterwise: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Surface]]:
    """Model → split → surface, on one site's own cases, for every model of every run that serves this site.

    Without a radius: half the length of the first model, and filter by filter its whole length.
    """
    found: dict[str, dict[str, Surface]] = {}
    for name, here, weights, _ in models_at(runs, site):
        moved = here.task.parameters()
        radius = radius or _radius(weights, moved, filterwise)
        for split in SPLITS:
            if here.data.cases(split):
                say(f"loss surface of {name}: {site}, {split}")
                loss = partial(here.loss, split=split)
                made = surface(loss, weights, radius, points, directions, seed, moved, filterwise)
                found.setdefault(name, {})[split] = made
    if not found:
        names = ", ".join(run.name for run in runs)
        raise RunError(f"{names}: there is no network, or there are no cases, for site '{site}'; try another --site.")
    return found


def site_planes(
    runs: Sequence[OpenRun],
    sites: Sequence[SiteName],
    cases: int,
    radius: float | None = None,
    points: int = 21,
    seed: int = 0,
    filterwise: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> dict[SiteName, dict[str, Plane]]:
    """Site → model → the loss that was trained, on the site's training cases around the model: figure 9 of UFPS."""
    found: dict[SiteName, dict[str, Plane]] = {}
    for site in sites:
        for model in models_at(runs, site):
            say(f"landscape of {model.name}: {site}")
            task, weights = model.site.task, model.weights
            moved = task.parameters()
            radius = radius or _radius(weights, moved, filterwise)
            loss = loss_at(task, model.probes(cases))
            found.setdefault(site, {})[model.name] = plane(loss, weights, radius, points, seed, moved, filterwise)
    return found


def _radius(weights: Weights, moved: Collection[str], filterwise: bool) -> float:
    """Half the length of a model, rounded, and filter by filter its whole length."""
    return 1.0 if filterwise else float(f"{weights.split(moved.__contains__)[0].norm() / 2:.1g}")
