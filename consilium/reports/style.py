"""The look of every figure: colours, a sheet to draw on, masks as outlines, a figure as bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours without their yellow, which is too faint for lines and text on white
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
INK, FAINT, RULE = "#222222", "#767676", "#d9d9d9"
BOUND, LOCAL = "#222222", "#767676"
# of labels over photographs and scans: bright, told apart by those who do not see red and green alike
LABELS = ("#56B4E9", "#F0E442", "#FF8A5B", "#4FD9A7", "#E78AC3", "#C2A5FF", "#B8E068", "#FFC2B3", "#8FD3D1")
TRUTH = LABELS[0]
NAME_WIDTH = 24  # characters of a line beside a figure; longer ones leave no room for it
WIDTH = 10.0  # inches: 960 pixels, the width of the page

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


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per name, the same in every figure of a page."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def label_colour(index: int) -> str:
    """Of a label's outline, by its place in the federation's labels; the same on every picture."""
    return LABELS[index % len(LABELS)]


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


def as_picture(image: NDArray[Any]) -> NDArray[np.float64]:
    """Any range of values to 0..1; bytes as they are, else between the 1st and 99th percentile."""
    if image.dtype == np.uint8:
        return np.asarray(image / 255.0)
    low, high = np.percentile(image, [1, 99])
    scaled = (image.astype(np.float64) - low) / (high - low) if high > low else np.zeros(image.shape)
    return np.asarray(scaled.clip(0, 1))


def outline(axes: Axes, mask: NDArray[np.bool_], colour: str) -> None:
    """Halfway between the pixels of a mask (H, W) and the others; a fourth of the time of `Axes.contour`."""
    if not mask.any():
        return
    from contourpy import contour_generator
    from matplotlib.collections import LineCollection
    from matplotlib.patheffects import withStroke

    padded = np.pad(mask.astype(float), 1)  # so that a structure at the border has a closed outline
    rows, columns = np.arange(-1, mask.shape[0] + 1), np.arange(-1, mask.shape[1] + 1)
    lines: list[NDArray[np.float64]] = contour_generator(columns, rows, padded).lines(0.5)  # type: ignore[assignment]
    stroke = withStroke(linewidth=2.4, foreground="#00000088")
    drawn = LineCollection(lines, colors=[colour], linewidths=1.4, path_effects=[stroke])
    axes.add_collection(drawn, autolim=False)
