"""Which figures a page shows of its runs: from scores to pictures with words for those who cannot see them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.reports import figures, outlines, style
from consilium.reports.comparing import cells, site_mean_interval
from consilium.reports.comparing import elsewhere as local_elsewhere
from consilium.reports.costs import cost_of
from consilium.reports.curves import best_so_far, learning_curves
from consilium.reports.embedding import MEDIA, EmbeddedImage, data_uri, embedded
from consilium.reports.figures import Cost, Dot
from consilium.reports.grouping import Group
from consilium.reports.reading import Curve, Headline, RunView, lower_is_better
from consilium.reports.style import BOUND, LOCAL
from consilium.reports.tables import SITE_MEAN, Comparison, TextCell, called
from consilium.scores.rows import CHOSEN, ScoreRow
from consilium.scores.views import selection

Tints = Mapping[str, str]  # group name → colour

_PARTS = {"global": "global model", "personal": "personal models", "super": "super model", "ensemble": "ensemble"}


@dataclass(frozen=True)
class Overlay:
    """A case to show: image (H, W) or (H, W, 3), masks (H, W) by label, and the Dice of each label."""

    image: NDArray[Any]
    truth: Mapping[str, NDArray[np.bool_]]
    prediction: Mapping[str, NDArray[np.bool_]]
    site: str
    case: str
    model: str
    dice: Mapping[str, float]  # of the whole case, also where one slice is shown
    rank: str = ""  # among the site's test cases: "worst", "typical", "best"


def tints(every: Sequence[Group], comparison: Comparison | None) -> Tints:
    """Grey for local training, ink for the bound, the palette for federated methods, the leader first."""
    leaders = comparison.best(SITE_MEAN) if comparison else frozenset()
    federated = sorted((g.name for g in every if g.kind == "federated"), key=lambda name: name not in leaders)
    fixed = {group.name: BOUND if group.kind == "bound" else LOCAL for group in every}
    return fixed | style.colours(federated)


def gap(comparison: Comparison, tint: Tints) -> EmbeddedImage | None:
    """Every method's site mean, and those of a federated method's several models."""
    dots = [dot for group in comparison.groups for dot in _dots(group, tint[group.name])]
    if len(dots) < 2:
        return None
    dots.sort(key=lambda dot: dot.value, reverse=not lower_is_better(comparison.metric))
    bounds = {group.name for group in comparison.groups if group.kind == "bound"}
    bound = next((dot.value for dot in dots if dot.name in bounds), None)
    figure = figures.gap(dots, called(comparison.metric), bound)
    return embedded(figure, "Site means: " + ", ".join(f"{dot.name} {dot.value:.3f}" for dot in dots))


def curves(every: Sequence[Group], tint: Tints) -> EmbeddedImage | None:
    """Validation over rounds; pooled training only as a line, as in the paper."""
    every_curve = {g.name: _mean_curve([r.curve for r in g.runs]) for g in every if g.kind != "bound"}
    shown = {name: f"{name}: its {c.model} model" if c.model else name for name, c in every_curve.items() if c.rounds}
    drawn = {shown[name]: every_curve[name] for name in shown}
    if not drawn or all(len(curve.rounds) < 2 for curve in drawn.values()):
        return None
    about = next(run.headline for group in every for run in group.runs if run.headline and run.curve.rounds)
    lower = lower_is_better(about.metric)
    bounds = [found for group in every if group.kind == "bound" for run in group.runs if (found := _bound(run, lower))]
    level, by_site = bounds[0] if bounds else (None, {})
    figure = learning_curves(
        drawn, {shown[name]: tint[name] for name in shown}, level, by_site, called(about.metric), lower
    )
    ends = ", ".join(f"{n} {best_so_far(c.site_mean, lower)[-1]:.3f}" for n, c in drawn.items())
    pooled = "" if level is None else f"; pooled training's best is {level:.3f}"
    return embedded(figure, f"Validation {called(about.metric)} over rounds, best so far at the end: {ends}{pooled}")


def site_matrix(comparison: Comparison) -> EmbeddedImage | None:
    """Methods by sites, the numbers on their shade."""
    columns = [column for column in comparison.columns if column.kind in ("site", "outside")]
    lines = [line for line in comparison.lines if line.kind != "elsewhere"]
    if len(lines) < 2 or len(columns) < 2:
        return None
    values = {line.name: {c.title: line.cells[c].value for c in columns if c in line.cells} for line in lines}
    titles = [column.title for column in columns]
    figure = figures.heat(values, titles, lower=lower_is_better(comparison.metric))
    return embedded(figure, f"Test {called(comparison.metric)} of each method at each site, as in the table above")


def elsewhere(group: Group) -> EmbeddedImage | None:
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
    return embedded(
        figure, f"Local models at other sites; the lowest is {worst[1]}'s model at {worst[2]}: {worst[0]:.3f}"
    )


def selected(group: Group) -> EmbeddedImage | None:
    """What the selector of a group's first run chose at each site."""
    frequencies = selection(group.runs[0].best_rows, "test")
    if not frequencies:
        return None
    own = {site: sum(v for k, v in found.items() if k == f"personal/{site}") for site, found in frequencies.items()}
    words = ", ".join(f"{site} {100 * share:.0f} %" for site, share in own.items())
    alt = f"Share of test cases sent to the site's own personal model: {words}"
    caption = "; ".join([f"Selector of {group.name}", *_selector_notes(group.runs[0].best_rows, frequencies)])
    return embedded(figures.selection_bars(frequencies), alt, caption=caption)


def _selector_notes(rows: Sequence[ScoreRow], frequencies: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What a reader must know of a selector besides its choices."""
    notes = []
    if all(set(found) == {"global"} for found in frequencies.values()):
        notes.append("its threshold sends every image to the global model, so the super model is the global model here")
    known = {row.site for row in rows if row.metric == "routed"}
    members = {row.site for row in rows if row.metric.startswith(CHOSEN) and not row.outside}
    if known and members - known:
        notes.append(f"it cannot name {', '.join(sorted(members - known))}, away when it was made")
    return notes


def relations(group: Group) -> EmbeddedImage | None:
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
    return embedded(figure, f"Of the others' cores {words}", caption=f"p of {group.name}, last round")


@dataclass(frozen=True)
class SiteExamples:
    """Cases of one site, the worst first."""

    site: str
    pictures: tuple[EmbeddedImage, ...]


def examples(overlays: Sequence[Overlay]) -> list[SiteExamples]:
    """Example cases by site, in the order given."""
    sites = dict.fromkeys(overlay.site for overlay in overlays)
    return [SiteExamples(site, tuple(_example(o) for o in overlays if o.site == site)) for site in sites]


def _example(overlay: Overlay) -> EmbeddedImage:
    scores = ", ".join(f"{label} {value:.3f}" for label, value in overlay.dice.items())
    what = f"case {overlay.case} of {overlay.site}"
    alt = f"Outlines of the truth and of the {overlay.model} model's prediction, {what}; Dice {scores}"
    rank = f"{overlay.rank.capitalize()}: " if overlay.rank else ""
    caption = f"{rank}{overlay.case}, {overlay.model} model; Dice {scores}"
    made = outlines.overlay(overlay.image, overlay.truth, overlay.prediction)
    return EmbeddedImage(data_uri(made, MEDIA["svg"]), alt, outlines.WIDTH, caption, photograph=True)


def legend(overlays: Sequence[Overlay]) -> list[tuple[str, str]]:
    """Labels and their colours, of what the pictures show."""
    names = dict.fromkeys(label for overlay in overlays for label in overlay.truth)
    return [(label, style.label_colour(i)) for i, label in enumerate(names)]


def costs(every: Sequence[Group]) -> list[Cost]:
    """Means over a group's seeds."""
    return [cost_of(group.name, group.runs) for group in every]


def cost_grid(every: Sequence[Group]) -> list[list[TextCell]]:
    """What each method cost, with units."""
    heads = [
        "method", "passes per case", "a site sends per round, MB", "a site gets per round, MB", "both ways in all, MB",
        "time, min", "peak memory, MB",
    ]  # fmt: skip
    rows = [
        [
            cost.name, "–" if cost.passes is None else f"{cost.passes:g}", f"{cost.up_turn_mb:,.2f}",
            f"{cost.down_turn_mb:,.2f}", f"{cost.up_mb + cost.down_mb:,.1f}", f"{cost.minutes:,.1f}",
            f"{cost.memory_mb:,.0f}",
        ]
        for cost in costs(every)
    ]  # fmt: skip
    return [[TextCell(text) for text in row] for row in (heads, *rows)]


def cost_picture(every: Sequence[Group], tint: Tints) -> EmbeddedImage | None:
    """Methods side by side; one alone has nothing to be compared with."""
    if len(every) < 2:
        return None
    found = costs(every)
    words = [f"{c.name}: {c.up_mb:.0f} MB up, {c.down_mb:.0f} MB down, {c.minutes:.1f} minutes" for c in found]
    return embedded(figures.cost_bars(found, tint), "; ".join(words))


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
    return Curve(tuple(rounds), mean([curve.site_mean for curve in found]), sites, found[0].model)


def _bound(run: RunView, lower: bool) -> tuple[float, dict[str, float]] | None:
    """Validation scores of pooled training at its best round."""
    curve = run.curve
    if not curve.rounds:
        return None
    best = (min if lower else max)(range(len(curve.rounds)), key=lambda i: curve.site_mean[i])
    return curve.site_mean[best], {site: values[best] for site, values in curve.sites.items()}
