"""How the server merges the sites' models into one: by the mean, or by a rule that limits the effect of false models.

Norm bounding: Sun et al., Can you really backdoor federated learning? (2019). Coordinate-wise median and trimmed mean:
Yin et al. (ICML 2018). Krum and multi-Krum: Blanchard et al. (NeurIPS 2017). Centred clipping: Karimireddy, He & Jaggi
(ICML 2021). FLTrust: Cao et al. (NDSS 2021), with a trusted site in place of images at the server. The mean, norm
bounding, centred clipping and multi-Krum use the sites' shares. The other rules look at single values, choose one site
or weigh by likeness, and use no shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.weights import SiteName, Weights, mean

RULES = ("mean", "norm-bounding", "median", "trimmed-mean", "krum", "multi-krum", "centred-clipping", "fltrust")
STEPS = 3  # of centred clipping: each moves the centre towards the honest mean


@dataclass(frozen=True)
class Aggregation:
    """`[study] aggregation`: a table, or the name of a rule."""

    rule: str = "mean"
    liars: int = 1  # f, the number of sites that may send false models: of trimmed mean, Krum, multi-Krum
    length: float = 0.0  # of norm bounding and centred clipping: the longest update that counts in full; 0: the median
    trusted: str = ""  # of FLTrust: the site whose update the others are held against

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise StudyError(f"[study] aggregation = {self.rule!r}: it must be one of {', '.join(RULES)}.")
        if self.liars < 0:
            raise StudyError(f"[study] aggregation.liars = {self.liars}: it must be a number from 0 up.")
        if not 0 <= self.length < math.inf:
            raise StudyError(f"[study] aggregation.length = {self.length}: it must be a number from 0 up.")
        if (self.rule == "fltrust") != bool(self.trusted):
            raise StudyError(
                "[study] aggregation: the rule 'fltrust' needs a site that is trusted, and no other rule has one; "
                'write aggregation = {rule = "fltrust", trusted = "SITE"}.'
            )

    def of(
        self, models: Mapping[SiteName, Weights], shares: Mapping[SiteName, float], start: Weights | None = None
    ) -> Weights:
        """Merge several models into one; `start` is the model that all sites started from; None: models are changes.

        With too few sites for the rule (Krum needs three, and two more for every false model) a smaller f is used.
        """
        names = sorted(models)
        if self.rule == "fltrust":
            return trusted_mean({name: models[name] for name in names}, start, self.trusted)
        if self.rule == "mean" or len(names) < 3:
            return mean(models, shares)
        ordered = {name: models[name] for name in names}
        if self.rule == "median":
            return by_value(ordered, lambda values: values.quantile(0.5, dim=0))
        if self.rule == "trimmed-mean":
            return by_value(ordered, lambda values: trimmed(values, min(self.liars, (len(names) - 1) // 2)))
        if self.rule in ("krum", "multi-krum"):
            liars = max(0, min(self.liars, (len(names) - 3) // 2))
            chosen = nearest(ordered, liars, 1 if self.rule == "krum" else len(names) - liars)
            return mean({name: models[name] for name in chosen}, shares)
        centre = start if start is not None else by_value(ordered, lambda values: values.quantile(0.5, dim=0))
        for _ in range(STEPS if self.rule == "centred-clipping" else 1):
            centre = clipped_mean(ordered, shares, centre, self.length)
        return centre


def by_value(models: Mapping[SiteName, Weights], join: Callable[[Tensor], Tensor]) -> Weights:
    """Merge every value separately: `join` maps (sites, ...) to (...). Integer tensors are those of the first site."""
    first, *others = models.values()
    joined: dict[str, Tensor] = {}
    for key, tensor in first.items():
        if not tensor.is_floating_point():
            joined[key] = tensor.clone()
            continue
        joined[key] = join(torch.stack([tensor, *(other[key] for other in others)]).double()).to(tensor.dtype)
    return Weights.over(joined)


def trimmed(values: Tensor, liars: int) -> Tensor:
    """The mean (...) over sites of (sites, ...) without the largest and the smallest values of each coordinate."""
    kept = values.sort(dim=0).values
    return kept[liars : len(kept) - liars].mean(0)


def nearest(models: Mapping[SiteName, Weights], liars: int, count: int) -> list[SiteName]:
    """Sites whose models have the least squared distance to their K − f − 2 nearest others; ties go to the first."""
    names = list(models)
    squared = torch.zeros(len(names), len(names), dtype=torch.float64)
    for key, tensor in models[names[0]].items():
        if tensor.is_floating_point():
            rows = torch.stack([models[name][key].reshape(-1).double() for name in names])
            squared += (rows[:, None] - rows[None]).square().sum(2) if rows.numel() < 1 << 20 else _apart(rows)
    near = max(1, len(names) - liars - 2)
    scores = [sum(sorted(row[j] for j in range(len(names)) if j != i)[:near]) for i, row in enumerate(squared.tolist())]
    return sorted(sorted(names, key=lambda name: scores[names.index(name)])[:count])


def _apart(rows: Tensor) -> Tensor:
    """Squared distances between all pairs of large rows."""
    return torch.stack([torch.stack([(a - b).square().sum() for b in rows]) for a in rows])


def clipped_mean(
    models: Mapping[SiteName, Weights], shares: Mapping[SiteName, float], centre: Weights, most: float
) -> Weights:
    """The centre plus the mean of the models' differences from it, each clipped to a length; 0: the median length."""
    moved = {name: model - centre for name, model in models.items()}
    lengths = {name: change.norm() for name, change in moved.items()}
    most = most or median(lengths.values())
    short = {name: change * min(1.0, most / max(lengths[name], 1e-300)) for name, change in moved.items()}
    return centre + mean(short, shares)


def trusted_mean(models: Mapping[SiteName, Weights], start: Weights | None, trusted: SiteName) -> Weights:
    """The start plus the mean of all updates at the length of the trusted one, each weighted by its cosine with it.

    Updates that point the other way have no weight. While the trusted site is away, the model stays as it was.
    """
    before = start if start is not None else next(iter(models.values())).zeros()
    if trusted not in models:
        return before
    moved = {name: model - before for name, model in models.items()}
    root, lengths = moved[trusted], {name: change.norm() for name, change in moved.items()}
    if not lengths[trusted]:
        return before
    likeness = {name: max(0.0, change.dot(root)) / max(lengths[name], 1e-300) for name, change in moved.items()}
    level = {name: change * (lengths[trusted] / max(lengths[name], 1e-300)) for name, change in moved.items()}
    return before + mean(level, likeness)


__all__ = ["RULES", "Aggregation", "by_value", "clipped_mean", "nearest", "trimmed", "trusted_mean"]
