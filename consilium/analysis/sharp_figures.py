"""Figures about flatness and likeness: landscapes, spectra, steep gradients, layers side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from consilium.analysis.figures import model_tints, side_labels
from consilium.analysis.hessian import Curvature
from consilium.analysis.loss_surface import Plane
from consilium.analysis.similarity import Similarities
from consilium.analysis.steepness import Steepness
from consilium.reports.figures import FAINT, WIDTH, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def spectra(found: Mapping[str, Mapping[str, Curvature]]) -> Figure:
    """A panel per site: the density of eigenvalues, log scale, a colour per model, its λ_max dashed."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(name for by in found.values() for name in by))
    tint = model_tints(names)
    with site_panels(found, 2.6) as (figure, panels):
        for axes, (site, by) in zip(panels, found.items(), strict=True):
            for name, one in by.items():
                grid, density = one.density()
                axes.plot(grid, density, color=tint[name], linewidth=1.2, label=name)
                axes.axvline(one.largest[0], color=tint[name], linewidth=0.8, linestyle=(0, (2, 2)))
            axes.set(yscale="log", title=site, xlabel="eigenvalue", ylim=(1e-6, None))
        panels[0].set_ylabel("density")
        handles = [Line2D([], [], color=tint[name], label=name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return figure


def steep(found: Mapping[str, Mapping[str, Steepness]]) -> Figure:
    """A panel per site: how the relative difference is distributed; right of zero is steep."""
    tint = model_tints(list(dict.fromkeys(name for by in found.values() for name in by)))
    with site_panels(found, 2.4) as (figure, panels):
        for axes, (site, by) in zip(panels, found.items(), strict=True):
            for name, one in by.items():
                shares = np.array(one.counts) / max(1, sum(one.counts))
                label = f"{name}: {100 * one.steep:.0f} % steep"
                axes.stairs(shares, one.edges, color=tint[name], linewidth=1.3, label=label)
            axes.axvline(0, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
            axes.set(title=site, xlabel="r = log |(∇f′ − ∇f) / ∇f|", yticks=[])
            axes.legend(fontsize=7, frameon=False, loc="upper left")
        panels[0].set_ylabel("share of parameters")
        return figure


def similarity(found: Similarities, beside: str) -> Figure:
    """Linear CKA by layer, a line per model."""
    layers = list(next(iter(found.values())))
    tint = model_tints(list(found))
    with sheet(height=3.4, width=WIDTH) as figure:
        axes = figure.subplots()
        for name, by in found.items():
            axes.plot(range(len(layers)), list(by.values()), "o-", color=tint[name], linewidth=1.3, markersize=3)
        axes.set(title=f"Likeness to {beside}, layer by layer", ylabel="linear CKA", ylim=(0, 1.02))
        axes.set_xlabel("layer, from input to output")
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y")
        side_labels(axes, {name: list(by.values())[-1] for name, by in found.items()}, tint)
        return figure


@contextmanager
def site_panels(found: Mapping[str, object], height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A sheet with one panel per site, at most four in a row."""
    columns = min(4, len(found))
    rows = math.ceil(len(found) / columns)
    with sheet(height=height * rows + 0.4, width=WIDTH if columns > 2 else 0.75 * WIDTH) as figure:
        panels = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
        for axes in panels[len(found) :]:
            axes.set_axis_off()
        yield figure, panels[: len(found)]
