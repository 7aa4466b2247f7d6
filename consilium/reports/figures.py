"""The figures of the report page: each function draws one and returns it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consilium.reports.style import BOUND, INK, NAME_WIDTH, WIDTH, bare, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# what a selector can choose, and its shade
ROLES = (("the site's own model", "#0072B2"), ("the global model", "#c4c4c4"), ("another site's model", "#f2c49b"))


@dataclass(frozen=True)
class Dot:
    """One line of the gap chart."""

    name: str
    value: float
    low: float | None
    high: float | None
    colour: str
    part: bool = False  # one of several models of a method, drawn hollow


@dataclass(frozen=True)
class Cost:
    """What a method's run took; megabytes are 10⁶ bytes over all sites and rounds."""

    name: str
    up_mb: float
    down_mb: float
    minutes: float
    memory_mb: float
    up_turn_mb: float = 0.0  # per site and round
    down_turn_mb: float = 0.0
    round_seconds: float = 0.0
    passes: float | None = None  # forward passes per case at prediction; None: a run of an earlier version


def heat(
    values: Mapping[str, Mapping[str, float]],
    columns: Sequence[str],
    boxed: Sequence[tuple[str, str]] = (),
    row_label: str = "",
    column_label: str = "",
    lower: bool = False,
) -> Figure:
    """A matrix of numbers on their shade, dark is better; `boxed` (row, column) pairs get a frame."""
    import matplotlib

    names = list(values)
    grid = np.array([[values[name].get(column, math.nan) for column in columns] for name in names], dtype=float)
    told = [textwrap.fill(name, NAME_WIDTH) for name in names]  # a long name would leave no room for the numbers
    height = 0.9 + sum(0.36 + 0.16 * name.count("\n") for name in told)
    with sheet(height=height, width=min(WIDTH, 2.6 + 0.95 * len(columns))) as figure:
        axes = figure.subplots()
        shades = matplotlib.colormaps["Blues_r" if lower else "Blues"].with_extremes(bad="#f4f4f4")
        low, high = _range(grid)
        image = axes.imshow(
            grid, cmap=shades, vmin=low - 0.1 * (high - low), vmax=high + 0.9 * (high - low), aspect="auto"
        )
        for (i, j), value in np.ndenumerate(grid):
            dark = not math.isnan(value) and _luminance(image.cmap(image.norm(value))) < 0.18
            text = "–" if math.isnan(value) else f"{value:.3f}"
            axes.text(j, i, text, ha="center", va="center", color="white" if dark else INK)
            if (names[i], columns[j]) in boxed:
                axes.add_patch(_frame(i, j))
        _matrix_axes(axes, told, columns)
        axes.set(xlabel=column_label, ylabel=row_label)
        axes.xaxis.set_label_position("top")
        return figure


def relation_map(matrix: Mapping[str, Mapping[str, float]], sites: Sequence[str]) -> Figure:
    """Who takes how much from whom: a row is a site, a column whose core it takes; its own is framed."""
    own = [(site, site) for site in matrix]
    return heat(matrix, sites, own, row_label="personal model of", column_label="takes from the core of")


def selection_bars(frequencies: Mapping[str, Mapping[str, float]]) -> Figure:
    """What the selector chose per site: its own model, the global one, or another site's."""
    from matplotlib.patches import Patch

    sites = list(frequencies)
    with sheet(height=1.1 + 0.36 * len(sites)) as figure:
        axes = figure.subplots()
        for i, site in enumerate(sites):
            start = 0.0
            for choice, share in sorted(frequencies[site].items(), key=lambda item: (role_of(item[0], site), -item[1])):
                fill = ROLES[role_of(choice, site)][1]
                axes.barh(i, share, left=start, height=0.7, color=fill, edgecolor="white", linewidth=1.5)
                _bar_text(axes, start, share, i, choice, site)
                start += share
        axes.set_yticks(range(len(sites)), sites)
        axes.set(xlim=(0, 1), xlabel="share of test cases")
        figure.legend(
            handles=[Patch(color=fill, label=name) for name, fill in ROLES],
            loc="outside upper left",
            ncols=3,
            frameon=False,
            handlelength=1,
            handleheight=1,
        )
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        bare(axes)
        return figure


def gap(dots: Sequence[Dot], what: str, bound: float | None = None) -> Figure:
    """Site means as dots with intervals, the first on top; `bound` is a dashed line."""
    with sheet(height=0.8 + 0.32 * len(dots)) as figure:
        axes = figure.subplots()
        for i, dot in enumerate(dots):
            if dot.low is not None and dot.high is not None:
                axes.plot(
                    [dot.low, dot.high], [i, i], color=dot.colour, linewidth=2.2, alpha=0.45, solid_capstyle="round"
                )
            fill = "white" if dot.part else dot.colour
            axes.plot(dot.value, i, "o", color=dot.colour, markerfacecolor=fill, markersize=7, clip_on=False)
            axes.annotate(
                f"{dot.value:.3f}",
                (1, i),
                xycoords=("axes fraction", "data"),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                color=dot.colour,
                fontweight="bold",
            )
        if bound is not None:
            axes.axvline(bound, color=BOUND, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.set_yticks(range(len(dots)), [dot.name for dot in dots])
        axes.grid(axis="x")
        axes.set(xlabel=f"test {what}, mean over sites")
        axes.margins(x=0.04)
        bare(axes)
        axes.set_ylim(len(dots) - 0.5, -0.5)
        return figure


def cost_bars(costs: Sequence[Cost], colour: Mapping[str, str]) -> Figure:
    """Traffic, time and memory of each method, one panel each."""
    panels = (
        ("sent by sites", "up_mb", "MB"),
        ("sent to sites", "down_mb", "MB"),
        ("time", "minutes", "min"),
        ("peak memory", "memory_mb", "MB"),
    )
    with sheet(height=0.9 + 0.3 * len(costs)) as figure:
        for axes, (title, field, unit) in zip(figure.subplots(1, 4, sharey=True), panels, strict=True):
            values = [getattr(cost, field) for cost in costs]
            axes.barh(range(len(costs)), values, height=0.62, color=[colour[cost.name] for cost in costs])
            for i, value in enumerate(values):
                axes.annotate(_short(value), (value, i), xytext=(4, 0), textcoords="offset points", va="center")
            axes.set(title=f"{title}, {unit}", xlim=(0, 1.35 * (max(values) or 1)))
            axes.xaxis.set_visible(False)
            axes.spines["bottom"].set_visible(False)
            axes.set_yticks(range(len(costs)), [cost.name for cost in costs])
            bare(axes)
        return figure


def dice(truth: NDArray[np.bool_], prediction: NDArray[np.bool_]) -> float:
    """2|A ∩ B| / (|A| + |B|); 1 if both are empty."""
    size = int(truth.sum()) + int(prediction.sum())
    return 2 * int((truth & prediction).sum()) / size if size else 1.0


def _range(grid: NDArray[np.float64]) -> tuple[float, float]:
    finite = grid[np.isfinite(grid)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _luminance(rgba: Any) -> float:
    """Relative luminance as in the rules for accessible contrast; below 0.18 white text is easier to read."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgba[:3]]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


def _matrix_axes(axes: Axes, names: Sequence[str], columns: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    if max(map(len, columns), default=0) > 12:  # else neighbours would touch
        axes.tick_params(axis="x", labelrotation=25)
        for text in axes.get_xticklabels():
            text.set_horizontalalignment("left")
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(len(columns) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)


def _frame(i: int, j: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False, edgecolor=INK, linewidth=1.1)


def role_of(choice: str, site: str) -> int:
    """0: the site's own model, 1: the global one, 2: another site's."""
    if choice == "global":
        return 1
    return 0 if choice.rpartition("/")[2] == site else 2


def _bar_text(axes: Axes, start: float, share: float, i: int, choice: str, site: str) -> None:
    percent = f"{100 * share:.0f} %"
    texts = [f"{choice.rpartition('/')[2]} {percent}"] if role_of(choice, site) == 2 else []
    fitting = [text for text in [*texts, percent] if 0.009 * len(text) < share]
    if fitting:
        tint = "white" if role_of(choice, site) == 0 else INK
        axes.text(start + share / 2, i, fitting[0], ha="center", va="center", fontsize=8, color=tint)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"
