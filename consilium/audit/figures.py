"""Figure S5 of UFPS: how unsure each model is of members and non-members, one row per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from consilium.reports.style import PALETTE, WIDTH, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 6  # columns; more models stand below


def shown_models(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The teachers, as in the paper; of a run without any, its models."""
    unsure = [model for model in facts["models"] if model["uncertainty"]]
    teachers = [model for model in unsure if model["model"].startswith("teacher/")]
    return teachers or unsure


def uncertainty_figure(audits: Sequence[Mapping[str, Any]]) -> Figure:
    """Densities of the uncertainty of members and non-members; audits of several runs stand below each other."""
    most = max(len(shown_models(facts)) for facts in audits)
    lines = [(start, facts) for start in range(0, most, MOST) for facts in audits]
    columns = min(MOST, most)
    with sheet(height=0.9 + 2.0 * len(lines), width=min(WIDTH, 1.2 + 2.6 * columns)) as figure:
        grid = figure.subplots(len(lines), columns, squeeze=False)
        for number, (start, facts) in enumerate(lines):
            row, first = grid[number], grid[number - number % len(audits)]  # the same models of the first run
            models = shown_models(facts)[start : start + MOST]
            for axes, alike, model in zip(row, first, models):
                if axes is not alike:
                    axes.sharex(alike)
                _draw(axes, model)
            row[0].set_ylabel(how_trained(facts))
            for axes in row[len(models) :]:
                axes.set_axis_off()
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
        return figure


def _draw(axes: Any, model: Mapping[str, Any]) -> None:
    groups = model["uncertainty"]
    every = [value for values in groups.values() for value in values]
    edges = np.histogram_bin_edges(every, bins=min(16, max(5, len(every) // 6)))
    for tint, (name, values) in zip(PALETTE, groups.items()):
        axes.hist(values, edges, density=True, histtype="stepfilled", alpha=0.25, color=tint)
        axes.hist(values, edges, density=True, histtype="step", color=tint, label=name)
    axes.set_title(f"{model['model']}\n{' and '.join(str(len(values)) for values in groups.values())}")
    axes.set_yticks([])
    axes.locator_params(axis="x", nbins=3)
    axes.set_xlabel("uncertainty")


def how_trained(facts: Mapping[str, Any]) -> str:
    """As table S13 names its parts."""
    parts = ["augmentation" if facts["augmented"] else "no augmentation", *(["DP"] if facts["private"] else [])]
    return " + ".join(parts)
