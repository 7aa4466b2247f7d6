"""How runs get on, round by round: training loss, test score, and every site's own."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from consilium.analysis.figures import model_tints, side_labels
from consilium.reports.figures import sheet
from consilium.reports.reading import Curve, RunView

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Progress:
    """One run over its rounds."""

    loss: Mapping[int, float]  # round → training loss, mean over the sites that answered
    test: Curve  # of the headline model

    def to_json(self) -> dict[str, Any]:
        sites = {site: _finite(values) for site, values in self.test.sites.items()}
        return {
            "loss": {str(round): value for round, value in self.loss.items()},
            "test": {"rounds": list(self.test.rounds), "site_mean": list(self.test.site_mean), "sites": sites},
        }


def _finite(values: tuple[float, ...]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def progress_of(run: RunView) -> Progress:
    losses: dict[int, list[float]] = defaultdict(list)
    scored = {row.phase for row in run.rows}  # adaptation and calibration have losses of another kind
    for event in run.events:
        if event.get("event") == "train" and event.get("phase") in scored and event.get("loss") is not None:
            losses[event["round"]].append(event["loss"])
    return Progress({round: statistics.fmean(found) for round, found in sorted(losses.items())}, run.test_curve)


def draw(found: Mapping[str, Progress], what: str) -> Figure:
    """Training loss, mean over sites on test, and each site on test; as measured, nothing is chosen here."""
    tint = model_tints(list(found))
    sites = sorted({site for one in found.values() for site in one.test.sites})
    rows = max(1, math.ceil(len(sites) / 3))
    with sheet(height=max(5.0, 1.4 * rows + 0.6)) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15], squeeze=False)[0]
        loss, mean = left.subplots(2, 1, sharex=True)
        small = np.ravel(right.subplots(rows, 3, sharex=True, sharey=True))  # one scale, to compare sites
        for name, one in found.items():
            loss.plot(list(one.loss), list(one.loss.values()), color=tint[name], linewidth=1.3)
            mean.plot(one.test.rounds, one.test.site_mean, color=tint[name], linewidth=1.3)
            for axes, site in zip(small, sites, strict=False):
                if site in one.test.sites:
                    axes.plot(one.test.rounds, one.test.sites[site], color=tint[name], linewidth=1)
        loss.set(title="Training loss", ylabel="mean over sites")
        mean.set(title=f"Test {what}", xlabel="round", ylabel="mean over sites")
        for axes in (loss, mean):
            axes.grid(axis="y")
            axes.locator_params(axis="x", integer=True)
        side_labels(mean, {name: one.test.site_mean[-1] for name, one in found.items()}, tint)
        for axes, site in zip(small, sites, strict=False):
            axes.set_title(site)
            axes.locator_params(axis="y", nbins=4)
            axes.locator_params(axis="x", integer=True)
            axes.grid(axis="y")
        for axes in small[len(sites) :]:
            axes.set_axis_off()
        for axes in small[max(0, len(sites) - 3) : len(sites)]:  # those above an unused place have lost their ticks
            axes.tick_params(labelbottom=True)
        right.supxlabel("round", fontsize=9)
        return figure
