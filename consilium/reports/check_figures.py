"""Figures of a federation before training: cases with the outlines of their masks, and the sites side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.examining import examine
from consilium.data.images import ImageArray, orientation
from consilium.data.orientation import RADIOLOGICAL, axes_between, turned
from consilium.data.seen import SeenCase
from consilium.data.site_folder import Federation
from consilium.reports.style import FAINT, PALETTE, RULE, WIDTH, as_picture, label_colour, outline, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 6  # of a contact sheet
CASES = 12  # on a contact sheet
LETTERS = 20  # of a case's name
PIXELS = 192  # a thumbnail's longer side
BINS = 48
FAR = 50.0  # times the median: then the axis of intensities is logarithmic


@dataclass(frozen=True)
class Shown:
    """One picture of a contact sheet: (H, W) or (H, W, 3), its mask (H, W) or None, and words below it."""

    image: NDArray[Any]
    mask: NDArray[Any] | None
    words: str


def shown(federation: Federation, case: SeenCase) -> Shown | None:
    """A case as a picture; of a volume the slice that shows most of its labels, as radiologists look at it."""
    seen = examine(federation, case.site, case.case.name, case.case.image, case.case.label)
    if seen.image is None:
        return None
    words = f"{_short(case.case.name)}\n{case.case.split or 'no split'}"
    if isinstance(case.case.label, str):
        words += f", {case.case.label}"
    image, mask = _slice(seen.image, None if seen.mask is None else seen.mask.array)
    step = max(1, math.ceil(max(image.shape[:2]) / PIXELS))
    return Shown(image[::step, ::step], None if mask is None else mask[::step, ::step], words)


def _short(name: str) -> str:
    """A name that fits above its picture; both ends stay."""
    return name if len(name) <= LETTERS else f"{name[: LETTERS // 2]}…{name[-(LETTERS // 2 - 1) :]}"


def _slice(image: ImageArray, mask: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    array = image.array
    if array.ndim == 3:
        return (np.moveaxis(array, 0, -1) if len(array) == 3 else array[0]), mask
    axes = axes_between(orientation(image), RADIOLOGICAL)
    array, mask = turned(array, axes), None if mask is None else turned(mask, axes)
    full = mask is not None and mask.any()
    place = int(np.argmax((mask > 0).sum(axis=(1, 2)))) if full and mask is not None else array.shape[1] // 2
    return array[0, place], None if mask is None else mask[place]


def spread(cases: Sequence[SeenCase]) -> list[SeenCase]:
    """The cases of a contact sheet, evenly from the first to the last."""
    places = np.linspace(0, len(cases) - 1, min(CASES, len(cases))).round().astype(int)
    return [cases[int(place)] for place in places]


def contact_sheet(pictures: Sequence[Shown], labels: int) -> Figure:
    """Pictures with outlines, a colour per label."""
    rows = math.ceil(len(pictures) / COLUMNS)
    with sheet(height=1.95 * rows) as figure:
        for place, axes in enumerate(np.ravel(figure.subplots(rows, COLUMNS, squeeze=False))):
            axes.set_axis_off()
            if place >= len(pictures):
                continue
            one = pictures[place]
            axes.imshow(as_picture(one.image), cmap="gray", vmin=0, vmax=1)
            mask = np.zeros(one.image.shape[:2], np.uint8) if one.mask is None else one.mask
            for value in range(1, labels + 1):
                outline(axes, mask == value, label_colour(value - 1))
            axes.set_title(one.words, fontsize=7, loc="center")
        return figure


def intensities(quantiles: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """A histogram of stored values per site, all with the same axis; every case counts the same."""
    values = {site: np.concatenate([_drawn(found) for found in cases]) for site, cases in quantiles.items()}
    everything = np.concatenate(list(values.values()))
    low, middle, high = np.percentile(everything, [0.5, 50, 99.5])
    far = low >= 0 < middle and high > FAR * middle  # a few bright cases would press all others into one bar
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    if far:
        edges = np.concatenate([[low], np.geomspace(max(2 * low, middle / FAR), high, BINS)])
    columns = min(6, len(values))
    rows = math.ceil(len(values) / columns)
    with sheet(height=1.5 * rows + 0.4) as figure:
        panels = np.ravel(figure.subplots(rows, columns, squeeze=False, sharex=True))
        for axes, (site, drawn) in zip(panels, values.items()):
            axes.hist(drawn.clip(edges[0], edges[-1]), edges, color=PALETTE[0], density=not far)
            if far:
                axes.set_xscale("symlog", linthresh=float(edges[1]))
            axes.axvline(float(np.median(drawn)), color=PALETTE[1], linewidth=1)
            axes.set_title(site)
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.tick_params(labelbottom=True, labelsize=7)
        for axes in panels[len(values) :]:
            axes.set_axis_off()
        return figure


def _drawn(quantiles: Sequence[float]) -> NDArray[np.float64]:
    """Numbers that have these quantiles."""
    return np.interp(np.linspace(0, 1, 160), np.linspace(0, 1, len(quantiles)), quantiles)


def strips(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """One panel per quantity, one line per site, one dot per case; a bar is the median."""
    sites = list(dict.fromkeys(site for panel in panels.values() for site in panel))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with sheet(height=rows * (0.3 * len(sites) + 0.75), width=WIDTH) as figure:
        drawn = np.ravel(figure.subplots(rows, columns, squeeze=False, sharey=True))
        for axes, (title, values) in zip(drawn, panels.items()):
            _strip(axes, values, sites)
            axes.set_title(title)
        for axes in drawn[len(panels) :]:
            axes.set_axis_off()
        return figure


def _strip(axes: Axes, values: Mapping[str, Sequence[float]], sites: Sequence[str]) -> None:
    for line, site in enumerate(sites):
        found = np.asarray(values.get(site, ()), dtype=float)
        axes.axhline(line, color=RULE, linewidth=0.6, zorder=0)
        if len(found):
            lift = 0.16 * np.sin(np.arange(len(found)) * 2.4)  # apart, and the same in every drawing
            axes.plot(found, line + lift, ".", color=PALETTE[0], alpha=0.5, markersize=6, markeredgewidth=0)
            middle = float(np.median(found))
            axes.plot([middle, middle], [line - 0.32, line + 0.32], color=PALETTE[1], linewidth=2)
    axes.set_yticks(range(len(sites)), sites)
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7, labelcolor=FAINT)
    axes.margins(x=0.06)
    every = [number for found in values.values() for number in found]
    axes.locator_params(axis="x", nbins=5, integer=bool(every) and all(isinstance(number, int) for number in every))
