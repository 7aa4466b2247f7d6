"""Which figures a page shows of its runs: from scores to pictures with words for those who cannot see them."""

from __future__ import annotations

import statistics
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from consilium.reports import figures
from consilium.reports.figures import BOUND, LOCAL, Cost, Dot
from consilium.reports.grouping import Group
from consilium.reports.reading import Curve, Headline, RunView, lower_is_better
from consilium.reports.tables import SITE_MEAN, Comparison, called, cells, site_mean_interval
from consilium.reports.tables import elsewhere as local_elsewhere
from consilium.scores import CHOSEN, Row, selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tints = Mapping[str, str]  # group name → colour

_PARTS = {"global": "global model", "personal": "personal models", "super": "super model", "ensemble": "ensemble"}


@dataclass(frozen=True)
class Picture:
    """An image inside the page."""

    uri: str
    alt: str
    width: int  # pixels
    caption: str = ""


@dataclass(frozen=True)
class Overlay:
    """A case to show: image (H, W) or (H, W, 3), masks (H, W) by label, and the Dice of each label."""

    image: NDArray[Any]
    truth: Mapping[str, NDArray[np.bool_]]
    prediction: Mapping[str, NDArray[np.bool_]]
    site: str
    case: str
    model: str
    dice: Mapping[str, float]


def tints(every: Sequence[Group], comparison: Comparison | None) -> Tints:
    """Grey for local training, ink for the bound, the palette for federated methods, the leader first."""
    leaders = comparison.best(SITE_MEAN) if comparison else frozenset()
    federated = sorted((g.name for g in every if g.kind == "federated"), key=lambda name: name not in leaders)
    fixed = {group.name: BOUND if group.kind == "bound" else LOCAL for group in every}
    return fixed | figures.colours(federated)


def gap(comparison: Comparison, tint: Tints) -> Picture | None:
    """Every method's site mean, and those of a federated method's several models."""
    dots = [dot for group in comparison.groups for dot in _dots(group, tint[group.name])]
    if len(dots) < 2:
        return None
    dots.sort(key=lambda dot: dot.value, reverse=not lower_is_better(comparison.metric))
    bounds = {group.name for group in comparison.groups if group.kind == "bound"}
    bound = next((dot.value for dot in dots if dot.name in bounds), None)
    figure = figures.gap(dots, called(comparison.metric), bound)
    return _picture(figure, "Site means: " + ", ".join(f"{dot.name} {dot.value:.3f}" for dot in dots))


def curves(every: Sequence[Group], tint: Tints) -> Picture | None:
    """Validation over rounds; pooled training only as a line, as in the paper."""
    drawn = {g.name: c for g in every if g.kind != "bound" and (c := _mean_curve([r.curve for r in g.runs])).rounds}
    if not drawn or all(len(curve.rounds) < 2 for curve in drawn.values()):
        return None
    about = next(run.headline for group in every for run in group.runs if run.headline and run.curve.rounds)
    lower = lower_is_better(about.metric)
    bounds = [found for group in every if group.kind == "bound" for run in group.runs if (found := _bound(run, lower))]
    level, by_site = bounds[0] if bounds else (None, {})
    figure = figures.learning_curves(drawn, tint, level, by_site, called(about.metric), lower)
    ends = ", ".join(f"{n} {figures.best_so_far(c.site_mean, lower)[-1]:.3f}" for n, c in drawn.items())
    pooled = "" if level is None else f"; pooled training's best is {level:.3f}"
    return _picture(figure, f"Validation {called(about.metric)} over rounds, best so far at the end: {ends}{pooled}")


def site_matrix(comparison: Comparison) -> Picture | None:
    """Methods by sites, the numbers on their shade."""
    columns = [column for column in comparison.columns if column.kind in ("site", "outside")]
    lines = [line for line in comparison.lines if line.kind != "elsewhere"]
    if len(lines) < 2 or len(columns) < 2:
        return None
    values = {line.name: {c.title: line.cells[c].value for c in columns if c in line.cells} for line in lines}
    titles = [column.title for column in columns]
    figure = figures.heat(values, titles, lower=lower_is_better(comparison.metric))
    return _picture(figure, f"Test {called(comparison.metric)} of each method at each site, as in the table above")


def elsewhere(group: Group) -> Picture | None:
    """Each site's local model at every other site."""
    found = local_elsewhere(group) if group.kind == "local" else {}
    if not found:
        return None
    sites = sorted({site for means in found.values() for site in means})
    metric = group.runs[0].headline.metric if group.runs[0].headline else ""
    figure = figures.heat(
        found, sites, [(name, name) for name in found], "trained at", "tested at", lower_is_better(metric)
    )
    worst = min((value, of, site) for of, means in found.items() for site, value in means.items() if of != site)
    return _picture(figure, f"Local models elsewhere; the lowest is {worst[1]}'s model at {worst[2]}: {worst[0]:.3f}")


def selected(group: Group) -> Picture | None:
    """What the selector of a group's first run chose at each site."""
    frequencies = selection(group.runs[0].best_rows, "test")
    if not frequencies:
        return None
    own = {site: sum(v for k, v in found.items() if k == f"personal/{site}") for site, found in frequencies.items()}
    words = ", ".join(f"{site} {100 * share:.0f} %" for site, share in own.items())
    alt = f"Share of test cases sent to the site's own personal model: {words}"
    caption = "; ".join([f"Selector of {group.name}", *_selector_notes(group.runs[0].best_rows, frequencies)])
    return _picture(figures.selection_bars(frequencies), alt, caption=caption)


def _selector_notes(rows: Sequence[Row], frequencies: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What a reader must know of a selector besides its choices."""
    notes = []
    if all(set(found) == {"global"} for found in frequencies.values()):
        notes.append("its threshold sends every image to the global model, so the super model is the global model here")
    known = {row.site for row in rows if row.metric == "routed"}
    members = {row.site for row in rows if row.metric.startswith(CHOSEN) and not row.outside}
    if known and members - known:
        notes.append(f"it cannot name {', '.join(sorted(members - known))}, away when it was made")
    return notes


def relations(group: Group) -> Picture | None:
    """How much each site of an APPLE run takes from each other's core; a run from a real federation cannot say.

    What `consilium analyse` left of it says more, and is shown in its place.
    """
    if group.runs[0].method != "apple" or any((group.runs[0].folder / "analysis").glob("relationships*.json")):
        return None
    from consilium.reports.relationships import has_relationships, read_relationships  # here: it needs torch

    if not has_relationships(group.runs[0]):
        return None
    found = read_relationships(group.runs[0])
    words = ", ".join(f"{site} most from {found.friend(site)}" for site in found.p)
    figure = figures.relation_map(found.matrix(), found.sites)
    return _picture(figure, f"Of the others' cores {words}", caption=f"p of {group.name}, last round")


def example(overlay: Overlay) -> Picture:
    scores = ", ".join(f"{label} {value:.3f}" for label, value in overlay.dice.items())
    what = f"case {overlay.case} of {overlay.site}"
    alt = f"Outlines of the truth and of the {overlay.model} model's prediction, {what}; Dice {scores}"
    figure = figures.overlay(overlay.image, overlay.truth, overlay.prediction)
    return _picture(figure, alt, "png", f"{overlay.site}, {overlay.case}, {overlay.model} model")


def costs(every: Sequence[Group]) -> list[Cost]:
    """Means over a group's seeds."""
    return [_cost(group) for group in every]


def cost_picture(every: Sequence[Group], tint: Tints) -> Picture:
    found = costs(every)
    words = [f"{c.name}: {c.up_mb:.0f} MB up, {c.down_mb:.0f} MB down, {c.minutes:.1f} minutes" for c in found]
    return _picture(figures.cost_bars(found, tint), "; ".join(words))


def _dots(group: Group, colour: str) -> list[Dot]:
    about = group.runs[0].headline
    if about is None:
        return []
    dots = [_dot(group, about, group.name, colour, part=False)]
    if group.kind == "federated":
        models = group.runs[0].summary["best"]["scores"] if group.runs[0].summary else {}
        for model in (model for model in models if model != about.model):
            name = f"{group.name}: {_PARTS.get(model, model)}"
            dots.append(_dot(group, Headline(model, about.metric, about.label), name, colour, part=True))
    return [dot for dot in dots if dot]


def _dot(group: Group, about: Headline, name: str, colour: str, part: bool) -> Dot | None:
    found = cells(run.entry(about.model, about.metric, about.label) for run in group.runs).get(SITE_MEAN)
    if found is None:
        return None
    if found.sd is not None:
        return Dot(name, found.value, found.value - found.sd, found.value + found.sd, colour, part)
    low, high = site_mean_interval(group.runs[0], about) or (None, None)
    return Dot(name, found.value, low, high, colour, part)


def _mean_curve(found: Sequence[Curve]) -> Curve:
    """Over seeds, at the rounds all of them have scored."""
    if len(found) == 1:
        return found[0]
    rounds = sorted(set.intersection(*(set(curve.rounds) for curve in found)))
    at = [[curve.rounds.index(round_) for round_ in rounds] for curve in found]

    def mean(series: Sequence[Sequence[float]]) -> tuple[float, ...]:
        picked = [[values[i] for i in places] for values, places in zip(series, at, strict=True)]
        return tuple(statistics.fmean(values) for values in zip(*picked, strict=True))

    names = sorted(set.intersection(*(set(curve.sites) for curve in found)))
    sites = {name: mean([curve.sites[name] for curve in found]) for name in names}
    return Curve(tuple(rounds), mean([curve.site_mean for curve in found]), sites)


def _bound(run: RunView, lower: bool) -> tuple[float, dict[str, float]] | None:
    """Validation scores of pooled training at its best round."""
    curve = run.curve
    if not curve.rounds:
        return None
    best = (min if lower else max)(range(len(curve.rounds)), key=lambda i: curve.site_mean[i])
    return curve.site_mean[best], {site: values[best] for site, values in curve.sites.items()}


def _cost(group: Group) -> Cost:
    summaries = [run.summary for run in group.runs if run.summary]

    def mean(key: str) -> float:
        return statistics.fmean(float(summary.get(key) or 0) for summary in summaries)

    up, down = mean("bytes_up") / 1e6, mean("bytes_down") / 1e6
    turns = mean("rounds") * statistics.fmean(len(summary["headline"]["sites"]) for summary in summaries) or 1
    return Cost(group.name, up, down, mean("seconds") / 60, mean("peak_memory_mb"), up / turns, down / turns)


def _picture(figure: Figure, alt: str, kind: Literal["svg", "png"] = "svg", caption: str = "") -> Picture:
    data = b64encode(figures.to_bytes(figure, kind)).decode()
    media = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    width = round(96 * float(figure.get_size_inches()[0]))
    return Picture(f"data:{media};base64,{data}", alt, width, caption)
