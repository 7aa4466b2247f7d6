"""The features of FedSM's selector, projected to two dimensions, as in figure 3 of the paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consilium.analysis.figures import MANY, SPLIT_WORDS
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import OpenRun, Runs
from consilium.errors import UserError
from consilium.reports.style import FAINT, sheet
from consilium.wording import are, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Points = NDArray[np.float64]
SPLITS = ("train", "valid", "test")
WAYS = ("tsne", "pca")
_MARKERS = {"train": "o", "valid": "s", "test": "^"}
_WAYS = {"tsne": "t-SNE", "pca": "principal components"}


@dataclass(frozen=True)
class FeaturePoint:
    """One case and its place in the figure."""

    site: str
    outside: bool
    split: str
    case: str


@dataclass(frozen=True, eq=False)
class Features:
    """The selector's features (cases, features); rows in the order of `seen`."""

    values: Points
    seen: tuple[FeaturePoint, ...]


def selector_features(run: OpenRun) -> Features:
    """Features of all cases of all sites, guests included."""
    rows: list[Tensor] = []
    seen: list[FeaturePoint] = []
    for name in run.sites:
        worker = run.worker(name)
        model = run.super_model(worker)
        for split in SPLITS:
            for batch in worker.site.data.whole(split, 16):
                rows.append(model.router.seen(batch.images))
                seen += [FeaturePoint(name, name in run.guests, split, case) for case in batch.cases]
    return Features(torch.cat(rows).double().numpy(), tuple(seen))


def laid_out(values: Points, way: str = "tsne", seed: int = 0) -> Points:
    """Features (n, features) as points (n, 2): t-SNE started from the principal components, or these alone."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    if way not in WAYS:
        raise UserError(f"features can be laid out by {' or '.join(WAYS)}, not by '{way}'.")
    if len(values) < 4:
        raise UserError(f"{counted(len(values), 'case')} {are(len(values))} too few to lay out; at least 4 are needed.")
    if not np.ptp(values, axis=0).any():  # the features of all cases are equal
        return np.zeros((len(values), 2))
    if values.shape[1] < 2:
        values = np.pad(values, ((0, 0), (0, 2 - values.shape[1])))
    perplexity = min(30.0, (len(values) - 1) / 3)  # about as many neighbours; it must stay below the number of cases
    with threadpool_limits(1):  # sums of several threads differ in their last bits, and t-SNE amplifies them
        if way == "pca":
            points = PCA(2, svd_solver="full").fit_transform(values)
        else:
            points = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(values)
    return np.asarray(points, dtype=np.float64)


def separation(values: Points, sites: Sequence[str]) -> float | None:
    """The silhouette of the sites in the features, from −1 to 1: 1 is far apart, 0 overlapping."""
    from sklearn.metrics import silhouette_score

    if not 1 < len(set(sites)) < len(sites):
        return None
    return float(silhouette_score(values, list(sites)))


def to_json(features: Features, points: Points, way: str) -> dict[str, Any]:
    return {
        "way": way,
        "features": int(features.values.shape[1]),
        "separation": separation(features.values, [seen.site for seen in features.seen]),
        "cases": [
            {**vars(seen), "x": float(x), "y": float(y)} for seen, (x, y) in zip(features.seen, points, strict=True)
        ],
    }


def feature_map(points: Points, seen: Sequence[FeaturePoint], way: str) -> Figure:
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
                Line2D([], [], linestyle="", marker=_MARKERS[s], color=FAINT, label=f"{SPLIT_WORDS[s]} cases")
                for s in there
            ],
            loc="outside lower center", ncols=3, frameon=False,
        )  # fmt: skip
        return figure


def _above(points: Points) -> tuple[float, float]:
    """The position of a name: above the middle half of a cloud."""
    low, middle, high = np.percentile(points[:, 0], [25, 50, 75])
    return float(middle), float(points[(points[:, 0] >= low) & (points[:, 0] <= high), 1].max())


def analyse_features(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    # without a run that has a selector, the first raises the error
    for run in [run for run in runs.opened if run.selects] or runs.opened[:1]:
        say(f"selector features of {run.name}")
        found = selector_features(run)
        points = laid_out(found.values, options.layout, options.seed)
        facts = to_json(found, points, options.layout)
        apart = facts["separation"]
        many = f"{counted(len(found.seen), 'case')} of {counted(len(run.sites), 'site')}"
        yield Finding(
            "features",
            "What the selector sees",
            f"{many} by the features the selector decides by"
            + ("" if apart is None else f"; silhouette of the sites {apart:.2f}"),
            facts,
            {"features": feature_map(points, found.seen, options.layout)},
            run=run.path,
        )
