"""Figures of APPLE's relationships: one site's p over rounds, everyone's p_ii, and how the hold on p fades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from consilium.analysis.figures import MANY, side_labels
from consilium.reports.figures import FAINT, INK, WIDTH, sheet
from consilium.reports.relationships import Relationships

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def of_one_site(found: Relationships, site: str) -> Figure:
    """p_ij over rounds: a line per site j, the site's own bold; the ticks on the left are where they start, p0."""
    tint = _tints(found.sites)
    with sheet(height=3.8, width=0.65 * WIDTH) as figure:
        axes = figure.subplots()
        for j, other in enumerate(found.sites):
            line = [found.p0[other], *found.p[site][:, j]]
            width = 2.2 if other == site else 1.1
            axes.plot([0, *found.rounds[site]], line, color=tint[other], linewidth=width)
        axes.axhline(0, color=FAINT, linewidth=0.6)
        axes.set(title=f"What {site} takes from each site", xlabel="round", ylabel="$p_{ij}$")
        axes.grid(axis="y")
        axes.locator_params(axis="x", integer=True)
        side_labels(axes, {other: float(found.p[site][-1, j]) for j, other in enumerate(found.sites)}, tint)
        return figure


def of_all_selves(found: Relationships) -> Figure:
    """p_ii over rounds, a line per site."""
    tint = _tints(found.sites)
    with sheet(height=3.8, width=0.65 * WIDTH) as figure:
        axes = figure.subplots()
        for site in found.p:
            axes.plot([0, *found.rounds[site]], [found.p0[site], *found.own(site)], color=tint[site], linewidth=1.4)
        axes.set(title="What every site takes from its own core", xlabel="round", ylabel="$p_{ii}$")
        axes.grid(axis="y")
        axes.locator_params(axis="x", integer=True)
        side_labels(axes, {site: float(found.own(site)[-1]) for site in found.p}, tint)
        return figure


def fading(values: Sequence[float], kind: str) -> Figure:
    """λ(r), by which the hold on p near p0 is multiplied."""
    with sheet(height=2.6, width=0.45 * WIDTH) as figure:
        axes = figure.subplots()
        axes.plot(range(1, len(values) + 1), values, color=INK, linewidth=1.6, marker="o", markersize=2.5)
        axes.set(title=f"Scheduler, {kind}", xlabel="round", ylabel="λ", ylim=(-0.03, 1.05))
        axes.grid(axis="y")
        axes.locator_params(axis="x", integer=True)
        return figure


def _tints(sites: Sequence[str]) -> Mapping[str, str]:
    return {site: MANY[i % len(MANY)] for i, site in enumerate(sites)}
