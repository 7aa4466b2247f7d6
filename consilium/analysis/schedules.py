"""The loss weight of a case by its uncertainty, and its change over the rounds: figure S1 of UFPS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import Runs
from consilium.errors import RunError
from consilium.learning.uncertainty import SCHEDULERS, Scheduler
from consilium.methods.ufps import UFPS
from consilium.reports.style import FAINT, sheet
from consilium.study_reading import load_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROGRESS = (0.0, 0.25, 0.5, 0.75, 1.0)  # r / R
POINTS = 101

Curves = Mapping[float, list[float]]  # progress → weights over the uncertainties 0 … 1


def curves(scheduler: Scheduler) -> Curves:
    """The weights of evenly spread uncertainties, which are also the bank."""
    scores = torch.linspace(0, 1, POINTS)
    return {at: scheduler.weights(scores, scores, at).tolist() for at in PROGRESS}


def of_method(method: UFPS) -> dict[str, Curves]:
    """Every kind of schedule with a method's own fields."""
    return {kind: curves(method.uncertainty.schedule(kind)) for kind in SCHEDULERS}


def draw(found: Mapping[str, Curves], chosen: str) -> Figure:
    """A panel per kind, from the first round, light, to the last, dark; the run's own kind is named so."""
    from matplotlib import colormaps

    shades = colormaps["viridis_r"]
    with sheet(height=2.7) as figure:
        panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (kind, by) in zip(panels, found.items(), strict=True):
            for at, weights in by.items():
                places = [i / (len(weights) - 1) for i in range(len(weights))]
                axes.plot(places, weights, color=shades(0.15 + 0.8 * at), linewidth=1.5, label=f"r/R = {at:g}")
            axes.axhline(1, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
            axes.set(title=f"{kind} (this run)" if kind == chosen else kind, xlabel="uncertainty, least to most")
            axes.set_xlim(0, 1)
        panels[0].set_ylabel("weight in the loss")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(PROGRESS), frameon=False)
        return figure


def analyse_schedules(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    for view in [view for view in runs.views if view.method == "ufps"] or runs.views[:1]:
        method = load_study(view.folder / "study.toml").method
        if not isinstance(method, UFPS):
            raise RunError(f"{view.folder} weighs no cases by their uncertainty; give a run of ufps.")
        found, chosen = of_method(method), method.uncertainty.scheduler
        yield Finding(
            "schedules",
            "How much a case counts by its uncertainty",
            f"Weights in the loss over the rounds of the schedule; this run: {chosen}",
            {"scheduler": chosen, "weights": {kind: dict(by) for kind, by in found.items()}},
            {"schedules": draw(found, chosen)},
            run=view.folder,
        )
