"""What the selector of FedSM sees: the features it decides by, laid out in the plane, as in figure 3 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.errors import UserError

Points = NDArray[np.float64]
SPLITS = ("train", "valid", "test")
WAYS = ("tsne", "pca")


@dataclass(frozen=True)
class Seen:
    """One case as the selector saw it."""

    site: str
    outside: bool
    split: str
    case: str


@dataclass(frozen=True, eq=False)
class Features:
    """The features the selector decides by, (cases, features), row by row of `seen`."""

    values: Points
    seen: tuple[Seen, ...]


def selector_features(run: OpenRun) -> Features:
    """Features of all cases of all sites, guests included."""
    rows: list[Tensor] = []
    seen: list[Seen] = []
    for name in run.sites:
        worker = run.worker(name)
        model = run.super_model(worker)
        for split in SPLITS:
            for batch in worker.site.data.whole(split, 16):
                rows.append(model.router.seen(batch.images))
                seen += [Seen(name, name in run.guests, split, case) for case in batch.cases]
    return Features(torch.cat(rows).double().numpy(), tuple(seen))


def laid_out(values: Points, way: str = "tsne", seed: int = 0) -> Points:
    """Features (n, features) as points (n, 2): t-SNE started from the principal components, or these alone."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    if way not in WAYS:
        raise UserError(f"features can be laid out by {' or '.join(WAYS)}, not by '{way}'.")
    if len(values) < 4:
        raise UserError(f"{len(values)} cases are too few to lay out; at least 4 are needed.")
    if not np.ptp(values, axis=0).any():  # a selector that sees no difference at all
        return np.zeros((len(values), 2))
    if values.shape[1] < 2:
        values = np.pad(values, ((0, 0), (0, 2 - values.shape[1])))
    perplexity = min(30.0, (len(values) - 1) / 3)  # about as many neighbours; it must stay below the number of cases
    with threadpool_limits(1):  # sums of several threads differ in their last bits, and t-SNE makes much of them
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
