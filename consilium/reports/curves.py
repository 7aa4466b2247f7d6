"""Learning curves: every run's score over the rounds, and site by site."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from consilium.reports.reading import Curve
from consilium.reports.style import BOUND, NAME_WIDTH, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVER = (0, (5, 5))  # dashes over an equal line, so that both are seen: FedSM's own global model is FedAvg's


def learning_curves(
    curves: Mapping[str, Curve],
    colour: Mapping[str, str],
    bound: float | None = None,
    bound_sites: Mapping[str, float] | None = None,
    what: str = "dice",
    lower: bool = False,
) -> Figure:
    """Validation scores over rounds: the site mean large, each site small; `bound` is pooled training's best."""
    sites = sorted({site for curve in curves.values() for site in curve.sites})
    rows = max(2, math.ceil(len(sites) / 3))
    with sheet(height=max(3.7, 1.5 * rows + 0.6)) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15], squeeze=False)[0]
        main = left.subplots()
        _curves_panel(main, {name: c.site_mean for name, c in curves.items()}, curves, colour, bound, lower)
        main.set(title="Mean over sites", xlabel="round", ylabel=f"validation {what}")
        _end_labels(main, curves, colour, bound, lower)
        small = np.ravel(right.subplots(rows, 3, sharex=True))
        for axes, site in zip(small, sites, strict=False):
            there = {name: curve.sites[site] for name, curve in curves.items() if site in curve.sites}
            _curves_panel(axes, there, curves, colour, (bound_sites or {}).get(site), lower)
            axes.set_title(site)
            axes.locator_params(axis="y", nbins=4)
        for axes in small[len(sites) :]:
            axes.set_axis_off()
        # the panels above an unused place have lost their shared ticks
        for axes in small[max(0, len(sites) - 3) : len(sites)]:
            axes.tick_params(labelbottom=True)
        right.supxlabel("round", fontsize=9)
        return figure


def best_so_far(values: Sequence[float], lower: bool = False) -> NDArray[np.float64]:
    return np.asarray((np.fmin if lower else np.fmax).accumulate(np.asarray(values, dtype=float)))


def _curves_panel(
    axes: Axes,
    series: Mapping[str, Sequence[float]],
    curves: Mapping[str, Curve],
    colour: Mapping[str, str],
    bound: float | None,
    lower: bool,
) -> None:
    drawn: list[Sequence[float]] = []
    for name, values in series.items():
        style = OVER if any(np.array_equal(values, other, equal_nan=True) for other in drawn) else "-"
        drawn.append(values)
        axes.plot(curves[name].rounds, values, color=colour[name], linewidth=0.8, alpha=0.4)
        axes.plot(curves[name].rounds, best_so_far(values, lower), color=colour[name], linewidth=1.6, linestyle=style)
    if bound is not None:
        axes.axhline(bound, color=BOUND, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.grid(axis="y")
    axes.locator_params(axis="x", integer=True)  # there is no round 10.5
    axes.set_ylim(_limits(list(series.values()), bound, lower))


def _end_labels(
    axes: Axes, curves: Mapping[str, Curve], colour: Mapping[str, str], bound: float | None, lower: bool
) -> None:
    """Names at the ends of the lines, moved apart where they would touch."""
    ends = [(float(best_so_far(c.site_mean, lower)[-1]), name, colour[name]) for name, c in curves.items() if c.rounds]
    if bound is not None:
        ends.append((bound, "Pooled, best", BOUND))
    ends.sort()
    low, high = axes.get_ylim()
    names = [textwrap.fill(name, NAME_WIDTH) for _, name, _ in ends]
    steps = [0.055 * (high - low) * (1 + name.count("\n")) for name in names]
    places = [value for value, _, _ in ends]
    for _ in range(100):
        for i in range(1, len(places)):
            if (overlap := (steps[i] + steps[i - 1]) / 2 - (places[i] - places[i - 1])) > 0:
                places[i] += overlap / 2
                places[i - 1] -= overlap / 2
    for place, name, (_, _, tint) in zip(places, names, ends, strict=True):
        axes.annotate(
            name,
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=tint,
            fontweight="bold",
            annotation_clip=False,
        )


def _limits(series: Sequence[Sequence[float]], bound: float | None, lower: bool) -> tuple[float, float]:
    """Room for the second half of the rounds: in the first, every method is far from where it ends."""
    late = [found[len(found) // 2 :] if len(found) > 6 else found for found in series]  # a few points: all of them
    values = [value for found in late for value in found if math.isfinite(value)]
    values += [] if bound is None else [bound]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    span = max(high - low, 0.01)
    return (low - 0.1 * span, high + 0.4 * span) if lower else (low - 0.4 * span, high + 0.1 * span)
