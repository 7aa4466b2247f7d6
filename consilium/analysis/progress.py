"""Runs over the rounds: training loss, test score, and the test score of each site."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from consilium.analysis.figures import model_tints, side_labels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.reports.reading import Curve, RunView
from consilium.reports.style import sheet
from consilium.reports.tables import called

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TrainingCurves:
    """One run over its rounds."""

    loss: Mapping[int, float]  # round → training loss, mean over the sites that answered
    test: Curve  # of the headline model

    def to_json(self) -> dict[str, Any]:
        sites = {
            site: [value if math.isfinite(value) else None for value in values]
            for site, values in self.test.sites.items()
        }
        return {
            "loss": {str(round): value for round, value in self.loss.items()},
            "test": {"rounds": list(self.test.rounds), "site_mean": list(self.test.site_mean), "sites": sites},
        }


def progress_of(run: RunView) -> TrainingCurves:
    losses: dict[int, list[float]] = defaultdict(list)
    scored = {row.phase for row in run.rows}  # adaptation and calibration have losses of another kind
    for event in run.events:
        if event.get("event") == "train" and event.get("phase") in scored and event.get("loss") is not None:
            losses[event["round"]].append(event["loss"])
    return TrainingCurves({round: statistics.fmean(found) for round, found in sorted(losses.items())}, run.test_curve)


def draw(found: Mapping[str, TrainingCurves], what: str) -> Figure:
    """Training loss, test score as a mean over sites, and at each site; not smoothed."""
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
        for axes in small[max(0, len(sites) - 3) : len(sites)]:  # panels above an unused place have no ticks
            axes.tick_params(labelbottom=True)
        right.supxlabel("round", fontsize=9)
        return figure


def analyse_progress(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs in one figure."""
    found = {runs.names[view.folder]: progress_of(view) for view in runs.views}
    about = runs.views[0].headline
    if not about or any(not one.test.rounds for one in found.values()):
        raise RunError("these runs have no test scores by round; set study.score_every below study.rounds.")
    ends = ", ".join(f"{name} {one.test.site_mean[-1]:.3f}" for name, one in found.items())
    yield Finding(
        "progress",
        "Round by round",
        f"Test {called(about.metric)}, mean over sites, in the last round: {ends}",
        {"runs": {name: one.to_json() for name, one in found.items()}},
        {"progress": draw(found, called(about.metric))},
    )
