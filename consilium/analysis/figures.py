"""Shared by the figures of several analyses: colours of models and sites, labels at line ends, a panel per site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from consilium.reports.style import BOUND, LOCAL, PALETTE, WIDTH, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# the report's colours, then Paul Tol's muted ones, for federations of many sites
MANY = (*PALETTE, "#882255", "#117733", "#332288", "#999933", "#AA4499", "#44AA99")

SPLIT_WORDS = {"train": "training", "valid": "validation", "test": "test"}


def model_tints(names: Sequence[str]) -> dict[str, str]:
    """Ink for pooled training and grey for local, as in the report; the palette for the rest."""
    fixed = {name: BOUND if name.startswith("Pooled") else LOCAL for name in names if name.startswith(_FIXED)}
    rest = [name for name in names if name not in fixed]
    return fixed | {name: MANY[i % len(MANY)] for i, name in enumerate(rest)}


_FIXED = ("Pooled", "Local")


def side_labels(axes: Axes, ends: Mapping[str, float], tint: Mapping[str, str]) -> None:
    """Names beside the right ends of lines, moved apart if they would overlap."""
    low, high = axes.get_ylim()
    step = 0.07 * (high - low)
    names = sorted(ends, key=ends.__getitem__)
    places = [ends[name] for name in names]
    for _ in range(200):
        for i in range(1, len(places)):
            if (overlap := step - (places[i] - places[i - 1])) > 1e-9:
                places[i], places[i - 1] = places[i] + overlap / 2, places[i - 1] - overlap / 2
    for name, place in zip(names, places, strict=True):
        axes.annotate(
            name, (1, place), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", color=tint[name], fontweight="bold", annotation_clip=False,
        )  # fmt: skip


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
