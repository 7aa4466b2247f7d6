"""Figures: each function draws one and returns it; nothing here touches matplotlib's global state for good."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from consilium.reports.reading import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours without their yellow, which is too faint for lines and text on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, RULE = "#222222", "#767676", "#d9d9d9"
BOUND, LOCAL = "#222222", "#767676"
TRUTH, PREDICTION = "#56B4E9", "#F0E442"
WIDTH = 10.0  # inches: 960 pixels, the width of the page

# what a selector can choose, and its shade
ROLES = (("the site's own model", "#0072B2"), ("the global model", "#c4c4c4"), ("another site's model", "#f2c49b"))

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so a page looks the same wherever it is made
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "consilium",  # the same runs give the same bytes
    "figure.dpi": 96,
}


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


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per name, the same in every figure of a page."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


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
    with sheet(height=0.9 + 0.36 * len(names), width=min(WIDTH, 2.6 + 0.95 * len(columns))) as figure:
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
        _matrix_axes(axes, names, columns)
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


def overlay(
    image: NDArray[Any],
    truth: Mapping[str, NDArray[np.bool_]],
    prediction: Mapping[str, NDArray[np.bool_]],
    title: str = "",
) -> Figure:
    """An image (H, W) or (H, W, 3) with the outlines of the truth, solid, and of the prediction, dashed."""
    height, width = image.shape[:2]
    seen = [name for name in truth if name in prediction and (truth[name] | prediction[name]).any()]
    scores = [f"{name} {dice(truth[name], prediction[name]):.3f}" for name in seen]
    lines = textwrap.wrap("Dice: " + ", ".join(scores) if scores else "", 36)
    with sheet(height=2.4 * height / width + 0.2 + 0.15 * max(1, len(lines)), width=2.4) as figure:
        axes = figure.subplots()
        axes.imshow(as_picture(image), cmap="gray", vmin=0, vmax=1)
        for masks, colour, dash in ((truth, TRUTH, "solid"), (prediction, PREDICTION, "dashed")):
            for mask in masks.values():
                outline(axes, mask, colour, dash)
        axes.set_axis_off()
        axes.set_title(title)
        figure.supxlabel("\n".join(lines), fontsize=8)
        return figure


def dice(truth: NDArray[np.bool_], prediction: NDArray[np.bool_]) -> float:
    """2|A ∩ B| / (|A| + |B|); 1 if both are empty."""
    size = int(truth.sum()) + int(prediction.sum())
    return 2 * int((truth & prediction).sum()) / size if size else 1.0


def to_bytes(figure: Figure, kind: Literal["svg", "png"] = "svg", dpi: int = 144) -> bytes:
    """A figure as a file; the same figure gives the same bytes."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return stream.getvalue()


@contextmanager
def sheet(height: float, width: float = WIDTH) -> Iterator[Figure]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        _settle(figure)


def _settle(figure: Figure) -> None:
    """Lay out once and round: the layout's last bits change from time to time, and ids in an SVG hash them."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        x, y, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(x, 5), round(y, 5), round(width, 5), round(height, 5)))


def bare(axes: Axes) -> None:
    """Names in the margin are enough: no left axis, first line on top."""
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


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
    for name, values in series.items():
        axes.plot(curves[name].rounds, values, color=colour[name], linewidth=0.8, alpha=0.4)
        axes.plot(curves[name].rounds, best_so_far(values, lower), color=colour[name], linewidth=1.6)
    if bound is not None:
        axes.axhline(bound, color=BOUND, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.grid(axis="y")
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
    step = 0.055 * (high - low)
    places = [value for value, _, _ in ends]
    for _ in range(100):
        for i in range(1, len(places)):
            if (overlap := step - (places[i] - places[i - 1])) > 0:
                places[i] += overlap / 2
                places[i - 1] -= overlap / 2
    for place, (_, name, tint) in zip(places, ends, strict=True):
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


def as_picture(image: NDArray[Any]) -> NDArray[np.float64]:
    """Any range of values to 0..1; bytes as they are, else between the 1st and 99th percentile."""
    if image.dtype == np.uint8:
        return np.asarray(image / 255.0)
    low, high = np.percentile(image, [1, 99])
    scaled = (image.astype(np.float64) - low) / (high - low) if high > low else np.zeros(image.shape)
    return np.asarray(scaled.clip(0, 1))


def outline(axes: Axes, mask: NDArray[np.bool_], colour: str, dash: str) -> None:
    if not mask.any():
        return
    from matplotlib.patheffects import withStroke

    padded = np.pad(mask.astype(float), 1)  # so that a structure at the border has a closed outline
    rows, columns = np.arange(-1, mask.shape[0] + 1), np.arange(-1, mask.shape[1] + 1)
    lines = axes.contour(columns, rows, padded, levels=[0.5], colors=[colour], linestyles=dash, linewidths=1.4)
    lines.set_path_effects([withStroke(linewidth=2.4, foreground="#00000088")])
