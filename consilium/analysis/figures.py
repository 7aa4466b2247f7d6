"""Figures of the analyses: each function draws one and returns it, in the style of the report's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consilium.analysis.features import Points, Seen
from consilium.analysis.gallery import SPLITS, Counts, Example, total
from consilium.analysis.loss_surface import Surface
from consilium.analysis.sweeps import GammaSweep, LambdaSweep
from consilium.reports.figures import (
    BOUND,
    FAINT,
    INK,
    LOCAL,
    PALETTE,
    ROLES,
    TRUTH,
    WIDTH,
    as_picture,
    bare,
    outline,
    role_of,
    sheet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# the report's colours, then Paul Tol's muted ones, for federations of many sites
MANY = (*PALETTE, "#882255", "#117733", "#332288", "#999933", "#AA4499", "#44AA99")
_SHADES = {"train": "#0072B2", "valid": "#56B4E9", "test": "#E69F00"}
_MARKERS = {"train": "o", "valid": "s", "test": "^"}
_WAYS = {"tsne": "t-SNE", "pca": "principal components"}
_WORDS = {"train": "training", "valid": "validation", "test": "test"}


# --------------------------------------------------------------------------------------------------- loss surface


def loss_surfaces(found: Mapping[str, Mapping[str, Surface]], site: str, filterwise: bool = False) -> Figure:
    """A panel per split, a colour per model: every direction thin, their mean bold."""
    splits = [split for split in ("train", "test") if any(split in surfaces for surfaces in found.values())]
    tint = model_tints(list(found))
    with sheet(height=3.6, width=WIDTH if len(splits) > 1 else 0.6 * WIDTH) as figure:
        panels = np.ravel(figure.subplots(1, len(splits), sharey=True, squeeze=False))
        for axes, split in zip(panels, splits, strict=True):
            for name, surfaces in found.items():
                if split in surfaces:
                    _surface(axes, surfaces[split], tint[name])
            axes.set_title(f"{_WORDS[split]} cases of {site}")
            axes.grid(axis="y")
        panels[0].set_ylabel("loss")
        unit = "filter-normalised direction, in model sizes" if filterwise else "unit direction"
        figure.supxlabel(f"distance from the model along a random {unit}", fontsize=9)
        side_labels(panels[-1], {name: list(s.values())[-1].mean[-1] for name, s in found.items()}, tint)
        return figure


def _surface(axes: Axes, surface: Surface, colour: str) -> None:
    for losses in surface.losses:
        axes.plot(surface.steps, losses, color=colour, linewidth=0.6, alpha=0.3)
    axes.plot(surface.steps, surface.mean, color=colour, linewidth=2)
    axes.plot(0, surface.centre, "o", color=colour, markersize=4.5)


def model_tints(names: Sequence[str]) -> dict[str, str]:
    """Ink for pooled training and grey for local, as in the report; the palette for the rest."""
    fixed = {name: BOUND if name.startswith("Pooled") else LOCAL for name in names if name.startswith(_FIXED)}
    rest = [name for name in names if name not in fixed]
    return fixed | {name: MANY[i % len(MANY)] for i, name in enumerate(rest)}


_FIXED = ("Pooled", "Local")


def side_labels(axes: Axes, ends: Mapping[str, float], tint: Mapping[str, str]) -> None:
    """Names beside the lines' right ends, moved apart where they would touch."""
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


# --------------------------------------------------------------------------------------------------- features


def feature_map(points: Points, seen: Sequence[Seen], way: str) -> Figure:
    """Cases as points (n, 2): a colour and a name per site, a marker per split; sites outside are hollow."""
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    sites = list(dict.fromkeys(one.site for one in seen))
    with sheet(height=4.8, width=6.4) as figure:
        axes = figure.subplots()
        for i, site in enumerate(sites):
            tint = MANY[i % len(MANY)]
            for split, marker in _MARKERS.items():
                chosen = [k for k, one in enumerate(seen) if (one.site, one.split) == (site, split)]
                outside = any(seen[k].outside for k in chosen)
                axes.scatter(
                    points[chosen, 0],
                    points[chosen, 1], s=26, marker=marker, linewidths=0.9,
                    facecolors="none" if outside else tint, edgecolors=tint if outside else "white",
                )  # fmt: skip
            own = [k for k, one in enumerate(seen) if one.site == site]
            name = f"{site} (outside)" if seen[own[0]].outside else site
            x, y = _above(points[own])
            text = axes.annotate(
                name, (x, y), xytext=(0, 6), textcoords="offset points", color=tint, fontweight="bold", ha="center"
            )
            text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        axes.set(xticks=[], yticks=[], title=f"Selector features, {_WAYS[way]}")
        axes.spines[:].set_visible(False)
        axes.margins(0.08)
        there = [split for split in _MARKERS if any(one.split == split for one in seen)]
        figure.legend(
            handles=[
                Line2D([], [], linestyle="", marker=_MARKERS[s], color=FAINT, label=f"{_WORDS[s]} cases") for s in there
            ],
            loc="outside lower center", ncols=3, frameon=False,
        )  # fmt: skip
        return figure


def _above(points: Points) -> tuple[float, float]:
    """A place for a name: over the middle half of a cloud."""
    low, middle, high = np.percentile(points[:, 0], [25, 50, 75])
    return float(middle), float(points[(points[:, 0] >= low) & (points[:, 0] <= high), 1].max())


# --------------------------------------------------------------------------------------------------- gallery


def gallery(found: Sequence[Example], counts: Counts) -> Figure:
    """A column per site: the image, and below it the same with the truth outlined, where there is one."""
    columns = min(6, len(found))
    outlined = any(example.outlines for example in found)
    deep, bands = 1 + outlined, math.ceil(len(found) / columns)
    side = WIDTH / max(columns, 4)
    with sheet(height=bands * (deep * side + 0.55), width=side * columns) as figure:
        panels = figure.subplots(bands * deep, columns, squeeze=False)
        for axes in panels.flat:
            axes.set_axis_off()
        for k, example in enumerate(found):
            top, column = deep * (k // columns), k % columns
            image = _true_colours(example.image)
            for axes in panels[top : top + deep, column]:
                axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            for mask in example.outlines.values():
                outline(panels[top + deep - 1, column], mask, TRUTH, "solid")
            height, width = image.shape[:2]  # outlines may reach a pixel over the edge
            panels[top + deep - 1, column].set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
            panels[top, column].set_title(_gallery_title(example, total(counts[example.site]).cases), fontsize=8.5)
        return figure


def _true_colours(image: NDArray[Any]) -> NDArray[Any]:
    """A colour picture that preprocessing left between 0 and 1 as it is; others are stretched."""
    return image if image.ndim == 3 and image.min() >= 0 and image.max() <= 1 else as_picture(image)


def _gallery_title(example: Example, cases: int) -> str:
    where = f"{example.site} (outside)" if example.outside else example.site
    return f"{where}, {cases} cases\n{example.case}" + (f", {example.note}" if example.note else "")


def count_bars(counts: Counts, guests: Sequence[str]) -> Figure:
    """Cases per site, one bar in three parts, with their numbers; of volumes also the slices."""
    from matplotlib.patches import Patch

    with sheet(height=1.1 + 0.36 * len(counts), width=0.8 * WIDTH) as figure:
        axes = figure.subplots()
        most = max(total(row).cases for row in counts.values()) or 1
        for i, row in enumerate(counts.values()):
            start = 0
            for split in SPLITS:
                cases = row[split].cases
                axes.barh(i, cases, left=start, height=0.7, color=_SHADES[split], edgecolor="white", linewidth=1.5)
                if cases > 0.012 * most * len(str(cases)) + 0.01 * most:
                    tint = "white" if split == "train" else INK
                    axes.text(start + cases / 2, i, str(cases), ha="center", va="center", fontsize=8, color=tint)
                start += cases
            whole = total(row)
            note = f"{whole.cases}" if whole.slices is None else f"{whole.cases} ({whole.slices} slices)"
            axes.annotate(note, (start, i), xytext=(5, 0), textcoords="offset points", va="center", fontweight="bold")
        axes.set_yticks(range(len(counts)), [f"{site} (outside)" if site in guests else site for site in counts])
        axes.set(xlabel="cases", xlim=(0, 1.2 * most))
        axes.locator_params(axis="x", integer=True)
        bare(axes)
        figure.legend(
            handles=[Patch(color=_SHADES[split], label=_WORDS[split]) for split in SPLITS],
            loc="outside upper left", ncols=3, frameon=False, handlelength=1, handleheight=1,
        )  # fmt: skip
        return figure


# --------------------------------------------------------------------------------------------------- sweeps


def gamma(sweep: GammaSweep, what: str = "Dice") -> Figure:
    """Scores over γ on the left, what the selector does with test cases on the right; the run's γ is a line."""
    from matplotlib.patches import Patch

    scale = _Nines.of(sweep)
    with sheet(height=3.7) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
        _score_panel(left, sweep, scale)
        left.set(title="Score by γ", ylabel=what)
        shares = np.array([_shares(sweep, value) for value in sweep.grid]).T
        right.stackplot(scale(sweep.grid), shares, colors=[fill for _, fill in ROLES], linewidth=0, step="post")
        right.set(title="Who answers test cases, mean over sites", ylim=(0, 1))
        right.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        for axes in (left, right):
            scale.draw(axes, sweep.chosen)
        figure.supxlabel("γ: an image goes to the global model unless the selector is surer than this", fontsize=9)
        figure.legend(
            handles=[Patch(color=fill, label=name) for name, fill in ROLES],
            loc="outside upper right",
            ncols=3,
            frameon=False,
            handlelength=1,
            handleheight=1,
        )
        return figure


_SPLIT_TINTS = {"valid": "#0072B2", "test": "#D55E00"}


def _score_panel(axes: Axes, sweep: GammaSweep, scale: _Nines) -> None:
    lines = {
        f"{_WORDS[s]}, site mean": (values, _SPLIT_TINTS[s]) for s in _SPLIT_TINTS if (values := sweep.site_mean(s))
    }
    for i, (site, values) in enumerate(sweep.sites("test", outside=True).items()):
        lines[f"{site} (outside), test"] = (values, tint := PALETTE[(2 + i) % len(PALETTE)])
        oracle = sweep.oracle_gamma[site]
        axes.plot(*scale((oracle.gamma,)), oracle.score, "o", color=tint, markerfacecolor="white", zorder=3)
    for name, (values, tint) in lines.items():
        dash = (0, (4, 2)) if "(outside)" in name else "-"
        axes.plot(scale(sweep.grid), values, color=tint, linewidth=1.8, linestyle=dash, drawstyle="steps-post")
    axes.grid(axis="y")
    side_labels(axes, {name: v[-1] for name, (v, _) in lines.items()}, {name: t for name, (_, t) in lines.items()})


@dataclass(frozen=True)
class _Nines:
    """An axis of γ with room near 1, where a trained selector's confidences lie: 0.9 is at 1, 0.99 at 2, …"""

    last: float  # where 1 itself is drawn

    @classmethod
    def of(cls, sweep: GammaSweep) -> _Nines:
        """As many nines as the surest case has, and a little more."""
        surest = max((case.sure for case in sweep.cases), default=0.0)
        return cls(min(5.3, math.ceil(-math.log10(max(1 - surest, 1e-6))) + 0.3))

    def __call__(self, grid: Sequence[float]) -> list[float]:
        return [-math.log10(1 - value + 10**-self.last) for value in grid]

    def draw(self, axes: Axes, chosen: float) -> None:
        from matplotlib.patheffects import withStroke

        known = (0, 0.3, 0.5, 0.7, 0.9, 0.99) if self.last < 2.5 else (0, 0.5, 0.9, 0.99, 0.999, 0.9999)
        ticks = [*(tick for tick in known if 1 - tick > 3 * 10**-self.last), 1]
        axes.set_xticks(self(ticks), [f"{tick:g}" for tick in ticks])
        axes.set_xlim(*self((0, 1)))
        (place,) = self((chosen,))
        axes.axvline(place, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        late = place > 0.75 * self.last
        text = axes.annotate(
            f"γ = {chosen:g}",
            (place, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if late else 4, 0),
            textcoords="offset points",
            ha="right" if late else "left",
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="#ffffffcc")])


def _shares(sweep: GammaSweep, value: float) -> list[float]:
    sums = [0.0, 0.0, 0.0]
    found = sweep.selection("test", value)
    for site, choices in found.items():
        for choice, share in choices.items():
            sums[role_of(choice, site)] += share / len(found)
    return sums


def pulls(sweep: LambdaSweep, what: str = "Dice") -> Figure:
    """Site means over λ: test scores solid, validation dashed; the λ best on validation is a line."""
    with sheet(height=3.4, width=0.7 * WIDTH) as figure:
        axes = figure.subplots()
        tint = {f"{model} model, test": MANY[i % len(MANY)] for i, model in enumerate(sweep.models)}
        ends: dict[str, float] = {}
        for name, model in zip(tint, sweep.models, strict=True):
            found = [(one.pull, one.test[model]) for one in sweep.pulls if model in one.test]
            _level_line(axes, found, tint[name], "-")
            ends[name] = found[-1][1].mean
        valid = [(one.pull, one.valid) for one in sweep.pulls if one.valid is not None]
        if valid:
            name = f"{sweep.headline} model, validation"
            tint[name] = tint[f"{sweep.headline} model, test"]
            _level_line(axes, valid, tint[name], "--")
            ends[name] = valid[-1][1].mean
        axes.set(xlabel="λ: how much of its own model a site keeps", ylabel=f"{what}, mean over sites")
        axes.set_xticks([one.pull for one in sweep.pulls])
        axes.grid(axis="y")
        if sweep.chosen is not None:
            axes.axvline(sweep.chosen, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
        side_labels(axes, ends, tint)
        return figure


def _level_line(axes: Axes, found: Sequence[tuple[float, Any]], colour: str, dash: str) -> None:
    x, y = [pull for pull, _ in found], [level.mean for _, level in found]
    sd = [level.sd or 0.0 for _, level in found]
    axes.errorbar(
        x, y, yerr=sd if any(sd) else None, color=colour, linestyle=dash, linewidth=1.8, marker="o", markersize=5,
        markerfacecolor=colour if dash == "-" else "white", capsize=3,
    )  # fmt: skip
