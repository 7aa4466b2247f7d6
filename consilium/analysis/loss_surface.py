"""The loss along straight lines through a model, as in figure 4 of FedSM: how sharp its minimum is.

A random direction in the space of all parameters has length one. So a step is a distance between models, and curves of
models of one architecture can be compared. With `filterwise` every filter of the direction gets the length of the
model's own filter and biases stay (Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018). A step is
then a share of the model's own size. Only parameters move, never running statistics.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from consilium.analysis.figures import SPLIT_WORDS, model_tints, side_labels
from consilium.analysis.finding import Finding, Options, Say, as_json, in_words
from consilium.analysis.opening import OpenRun, Runs
from consilium.analysis.probing import models_at
from consilium.errors import RunError, UserError
from consilium.randomness import torch_generator
from consilium.reports.style import WIDTH, sheet
from consilium.weights import SiteName, Weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        """The growth of the mean loss from the model to the two ends: a large value means a sharp minimum."""
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
    check_grid(radius, points, directions)
    steps = tuple(float(step) for step in np.linspace(-radius, radius, points))
    rows = []
    for index in range(directions):
        way = direction(weights, torch_generator(seed, "direction", index), moved, filterwise)
        rows.append(tuple(loss_of(weights + step * way) for step in steps))
    return Surface(steps, tuple(rows))


def check_grid(radius: float, points: int, directions: int) -> None:
    if not radius > 0 or points < 3 or points % 2 == 0 or directions < 1:
        raise UserError(
            "a loss surface needs a positive radius, at least one direction and an odd number of points from 3 on, "
            "so that the model itself is the middle one."
        )


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
    """Scale every filter (first index) to the length of the model's own; biases and scales do not move."""
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
    """Model → split → surface on one site's own cases, for every model that this site can use.

    Without a radius: half the length of the first model, and filter by filter its whole length.
    """
    found: dict[str, dict[str, Surface]] = {}
    for name, here, weights, _ in models_at(runs, site):
        moved = here.task.parameters()
        radius = radius or radius_of(weights, moved, filterwise)
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


def radius_of(weights: Weights, moved: Collection[str], filterwise: bool) -> float:
    """Half the length of a model, rounded, and filter by filter its whole length."""
    return 1.0 if filterwise else float(f"{weights.split(moved.__contains__)[0].norm() / 2:.1g}")


def loss_surfaces(found: Mapping[str, Mapping[str, Surface]], site: str, filterwise: bool = False) -> Figure:
    """A panel per split, a colour per model: every direction thin, their mean bold."""
    splits = [split for split in ("train", "test") if any(split in surfaces for surfaces in found.values())]
    tint = model_tints(list(found))
    with sheet(height=3.6, width=WIDTH if len(splits) > 1 else 0.6 * WIDTH) as figure:
        panels = np.ravel(figure.subplots(1, len(splits), sharey=True, squeeze=False))
        for axes, split in zip(panels, splits, strict=True):
            for name, surfaces in found.items():
                if split in surfaces:
                    _surface(axes, surfaces[split], tint[name])
            axes.set_title(f"{SPLIT_WORDS[split]} cases of {site}")
            axes.grid(axis="y")
        panels[0].set_ylabel("loss")
        unit = "filter-normalised direction, in model sizes" if filterwise else "unit direction"
        figure.supxlabel(f"distance from the model along a random {unit}", fontsize=9)
        side_labels(panels[-1], {name: list(s.values())[-1].mean[-1] for name, s in found.items()}, tint)
        return figure


def _surface(axes: Axes, surface: Surface, colour: str) -> None:
    for losses in surface.losses:
        axes.plot(surface.steps, losses, color=colour, linewidth=0.6, alpha=0.3)
    axes.plot(surface.steps, surface.mean, color=colour, linewidth=2)
    axes.plot(0, surface.centre, "o", color=colour, markersize=4.5)


def analyse_loss_surface(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure, on one site's cases."""
    site = options.site or runs.opened[0].members[0]
    found = site_surfaces(
        runs.opened, site, options.radius, options.points, options.directions, options.seed, options.filterwise, say
    )
    radius = next(surface.steps[-1] for by in found.values() for surface in by.values())
    rises = in_words(found, lambda one: f"{one.centre:.3f} + {one.rise:.3f}")
    yield Finding(
        f"loss-surface-{site}",
        f"Loss around the models, on {site}'s cases",
        f"Loss at the model + its mean rise at distance {radius:g}. {rises}",
        {
            "site": site,
            "seed": options.seed,
            "filterwise": options.filterwise,
            "models": as_json(found),
        },
        {f"loss-surface-{site}": loss_surfaces(found, site, options.filterwise)},
    )
