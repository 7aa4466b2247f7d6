"""The loss on a plane of weights around a model, for each site: figure 9 of UFPS."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from consilium.analysis.finding import Finding, Options, Say, as_json, asked_sites, in_words
from consilium.analysis.loss_surface import check_grid, direction, radius_of
from consilium.analysis.opening import OpenRun, Runs
from consilium.analysis.probing import loss_at, models_at
from consilium.randomness import torch_generator
from consilium.reports.style import WIDTH, sheet
from consilium.weights import SiteName, Weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        """The mean growth of the loss towards the edge of the square: a large value means a sharp minimum."""
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
    check_grid(radius, points, 2)
    steps = tuple(float(step) for step in np.linspace(-radius, radius, points))
    one, other = (direction(weights, torch_generator(seed, "plane", i), moved, filterwise) for i in range(2))
    rows = [[loss_of(weights + x * one + y * other) for x in steps] for y in steps]
    return Plane(steps, tuple(map(tuple, rows)))


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
    """Site → model → the training loss around the model, on the site's training cases: figure 9 of UFPS."""
    found: dict[SiteName, dict[str, Plane]] = {}
    for site in sites:
        for model in models_at(runs, site):
            say(f"landscape of {model.name}: {site}")
            task, weights = model.site.task, model.weights
            moved = task.parameters()
            radius = radius or radius_of(weights, moved, filterwise)
            loss = loss_at(task, model.probes(cases))
            found.setdefault(site, {})[model.name] = plane(loss, weights, radius, points, seed, moved, filterwise)
    return found


def landscapes(found: Mapping[str, Mapping[str, Plane]]) -> Figure:
    """A row per model, a column per site, one scale of colour: dark is low."""
    models = list(dict.fromkeys(name for by in found.values() for name in by))
    losses = [loss for by in found.values() for one in by.values() for row in one.losses for loss in row]
    low, high = min(losses), float(np.quantile(losses, 0.98))  # the corners of one model would hide all others
    levels = np.linspace(low, max(high, low + 1e-6), 13)
    side = min(2.6, WIDTH / max(len(found), 2))
    with sheet(height=side * len(models) + 0.7, width=side * len(found) + 1.3) as figure:
        panels = figure.subplots(len(models), len(found), squeeze=False)
        for column, (site, by) in enumerate(found.items()):
            for row, name in enumerate(models):
                axes = panels[row, column]
                axes.set(xticks=[], yticks=[], aspect="equal")
                if name in by:
                    one = by[name]
                    drawn = axes.contourf(one.steps, one.steps, one.losses, levels, cmap="viridis", extend="both")
                    axes.contour(one.steps, one.steps, one.losses, levels, colors="white", linewidths=0.4)
                    axes.plot(0, 0, "o", color="white", markersize=3)
                    axes.set_xlabel(f"{one.centre:.3f} + {one.rise:.3f}", fontsize=8)
                if row == 0:
                    axes.set_title(site)
                if column == 0:
                    axes.set_ylabel(name, fontsize=8)
        figure.colorbar(drawn, ax=panels, label="training loss", shrink=0.8)
        return figure


def analyse_landscape(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs and sites in one figure."""
    found = site_planes(
        runs.opened, asked_sites(runs, options), options.cases, options.radius, options.points, options.seed,
        options.filterwise, say,
    )  # fmt: skip
    rises = in_words(found, lambda one: f"{one.centre:.3f} + {one.rise:.3f}")
    yield Finding(
        "landscape",
        "Loss around the models, site by site",
        f"Training loss at the model + its mean rise at the edge of the square. {rises}",
        {"sites": as_json(found)},
        {"landscape": landscapes(found)},
    )
