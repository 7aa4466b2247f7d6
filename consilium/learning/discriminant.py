"""A linear discriminant in closed form, from sums that sites can send: how many, their mean, their scatter.

Every site is a class of equal prior; all share one covariance, shrunk towards its own diagonal because there are often
fewer cases than features. How much is found on validation cases; without any, it is the amount of Chen, Wiesel, Eldar &
Hero (2010, "OAS"), which follows from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import product
from statistics import NormalDist

import torch
from torch import Tensor

from consilium.tree import message
from consilium.weights import SiteName

# tried on validation cases: how much of the diagonal to take, and what to divide the certainty by
SHRINKAGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
TEMPERATURES = tuple(2.0**i for i in range(-4, 13))
_DOUBT = 1e-3  # of every probability: a case far on the right side must not outvote doubtful ones


@message
class FeatureSums:
    """The features of a site's training images, summed up: nothing of one image, unless there is only one."""

    n: int
    mean: Tensor  # (features,) float64
    scatter: Tensor  # (features · (features + 1) / 2,) float64: the upper triangle of Σ (x − mean)(x − mean)ᵀ


def sums_of(features: Tensor) -> FeatureSums:
    """The sums of features (n, features)."""
    rows = features.double()
    mean = rows.mean(0)
    centred = rows - mean
    return FeatureSums(len(rows), mean, upper(centred.T @ centred))


def added(one: FeatureSums, other: FeatureSums) -> FeatureSums:
    """The sums of both sets of images together (Chan, Golub & LeVeque 1979)."""
    n = one.n + other.n
    gap = other.mean - one.mean
    between = upper(torch.outer(gap, gap)) * (one.n * other.n / n)
    return FeatureSums(n, one.mean + gap * (other.n / n), one.scatter + other.scatter + between)


def summed(batches: Iterable[Tensor]) -> FeatureSums | None:
    """The sums of features that come in batches; None without any."""
    parts = [sums_of(batch) for batch in batches]
    return reduce(added, parts) if parts else None


def upper(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def symmetric(triangle: Tensor, side: int) -> Tensor:
    """The symmetric matrix of an upper triangle: exactly symmetric, whatever the rounding was."""
    matrix = triangle.new_zeros(side, side)
    rows, columns = torch.triu_indices(side, side)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


@message
class Discriminant:
    """Which site an image is most like, and how far it is from each."""

    means: Mapping[SiteName, Tensor]  # (features,) each
    covariance: Tensor  # the upper triangle of what all sites share
    shrinkage: float  # towards its diagonal, 0 to 1
    temperature: float  # certainty is divided by it
    limits: Mapping[SiteName, float]  # the distance from which on an image is unlike a site; empty: no limits

    @property
    def sites(self) -> list[SiteName]:
        return list(self.means)


def discriminant(sums: Mapping[SiteName, FeatureSums]) -> Discriminant:
    """From the sums of every site; shrunk by OAS, its certainty as it comes, without limits."""
    names = sorted(sums)
    free = max(1, sum(sums[name].n for name in names) - len(names))
    within = torch.stack([sums[name].scatter for name in names]).sum(0) / free
    found = Discriminant({name: sums[name].mean for name in names}, within, 1.0, 1.0, {})
    return replace(found, shrinkage=oas_shrinkage(Space(found).correlation, free))


def oas_shrinkage(covariance: Tensor, n: int) -> float:
    """How much of the diagonal to take, 0 to 1, for a covariance (p, p) found with n degrees of freedom."""
    side = len(covariance)
    square = covariance.square().sum().item()
    trace = covariance.diagonal().sum().item()
    spread = (n + 1 - 2 / side) * (square - trace**2 / side)
    if not spread > 0:
        return 1.0
    return min(1.0, ((1 - 2 / side) * square + trace**2) / spread)


class Space:
    """The features' space as a discriminant sees it: Mahalanobis distances to every site, at any shrinkage."""

    def __init__(self, found: Discriminant) -> None:
        self.found = found
        self.means = torch.stack(list(found.means.values()))

    @cached_property
    def _within(self) -> Tensor:
        return symmetric(self.found.covariance, self.means.shape[1])

    @cached_property
    def scale(self) -> Tensor:
        """Every feature's deviation; one that never varies inside a site must not decide alone."""
        between = self.means.var(0, unbiased=False)
        return (self._within.diagonal() + 1e-6 * between + 1e-12).sqrt()

    @cached_property
    def correlation(self) -> Tensor:
        return self._within / torch.outer(self.scale, self.scale)

    @cached_property
    def _axes(self) -> tuple[Tensor, Tensor]:
        """The correlation's eigenvalues and eigenvectors: shrinking changes the former only."""
        values, vectors = torch.linalg.eigh(self.correlation)
        return values.clamp_min(0.0), vectors

    def whitened(self, features: Tensor, shrinkage: float) -> Tensor:
        """Features (batch, features) along axes in which the sites' shared covariance is the identity."""
        values, vectors = self._axes
        stretch = ((1 - shrinkage) * values + shrinkage).clamp_min(1e-9).sqrt()
        return (features.double() / self.scale) @ vectors / stretch

    def squared(self, features: Tensor, shrinkage: float | None = None) -> Tensor:
        """Squared distances (batch, sites)."""
        amount = self.found.shrinkage if shrinkage is None else shrinkage
        gaps = self.whitened(features, amount)[:, None] - self.whitened(self.means, amount)[None]
        return gaps.square().sum(2)


def probabilities(squared: Tensor, temperature: float) -> Tensor:
    """The probabilities of the sites (batch, sites), equal priors, from squared distances."""
    return (-0.5 * squared / temperature).softmax(1)


# ------------------------------------------------------------------------------------------------ on validation cases


@message
class RoutingSums:
    """What a site finds on its validation cases, summed up."""

    cases: int
    surprise: tuple[float, ...]  # −log of its own probability, for every shrinkage and temperature
    log_distance: tuple[float, ...]  # of the cases to their own site, for every shrinkage
    log_distance_squared: tuple[float, ...]


NO_CASES = RoutingSums(
    0, (0.0,) * (len(SHRINKAGES) * len(TEMPERATURES)), (0.0,) * len(SHRINKAGES), (0.0,) * len(SHRINKAGES)
)


def routing_sums(space: Space, features: Tensor, own: SiteName) -> RoutingSums:
    """Of validation cases with these features (cases, features), all of the site `own`."""
    place = space.found.sites.index(own)
    surprise: list[float] = []
    logs: list[Tensor] = []
    for shrinkage in SHRINKAGES:
        squared = space.squared(features, shrinkage)
        for temperature in TEMPERATURES:
            right = probabilities(squared, temperature)[:, place]
            surprise.append(float(-((1 - _DOUBT) * right + _DOUBT / squared.shape[1]).log().sum()))
        logs.append(0.5 * squared[:, place].clamp_min(1e-30).log())
    sums, squares = [float(x.sum()) for x in logs], [float(x.square().sum()) for x in logs]
    return RoutingSums(len(features), tuple(surprise), tuple(sums), tuple(squares))


def tempered(found: Discriminant, sums: Mapping[SiteName, RoutingSums], quantile: float) -> Discriminant:
    """With the shrinkage and the temperature that surprise the validation cases least, and with distance limits.

    All sites count alike, whatever their number of cases. Of equals the shrinkage nearest to the first one wins, then
    the temperature nearest to 1. Without validation cases everything stays as it is.
    """
    known = {name: part for name, part in sorted(sums.items()) if part.cases}
    if not known:
        return found
    pairs = list(product(range(len(SHRINKAGES)), range(len(TEMPERATURES))))
    totals = [math.fsum(part.surprise[i] / part.cases for part in known.values()) for i in range(len(pairs))]
    near = [abs(SHRINKAGES[s] - found.shrinkage) for s, _ in pairs]
    equals = [i for i, total in enumerate(totals) if total <= min(totals) + 1e-3 * len(known)]
    shrinkage, temperature = pairs[min(equals, key=lambda i: (near[i], abs(math.log(TEMPERATURES[pairs[i][1]]))))]
    distances = {
        name: (part.cases, part.log_distance[shrinkage], part.log_distance_squared[shrinkage])
        for name, part in known.items()
    }
    limits = distance_limits(distances, found.sites, quantile)
    return replace(found, shrinkage=SHRINKAGES[shrinkage], temperature=TEMPERATURES[temperature], limits=limits)


def distance_limits(
    logs: Mapping[SiteName, tuple[int, float, float]], sites: Sequence[SiteName], quantile: float
) -> dict[SiteName, float]:
    """The distance beyond which an image is unlike a site: a quantile of the site's own validation distances.

    `logs`: by site the number, the sum and the sum of squares of the distances' logarithms. They are taken as normal,
    with the site's own mean and a deviation that all sites share: sums are enough, and few cases do not make a narrow
    limit. A site without validation cases gets the mean of the others. No limits at quantile 1, or with too few cases.
    """
    free = sum(n for n, _, _ in logs.values()) - len(logs)
    if quantile >= 1 or free < 1:
        return {}
    means = {name: total / n for name, (n, total, _) in logs.items()}
    squares = math.fsum(square - n * means[name] ** 2 for name, (n, _, square) in logs.items())
    common = math.fsum(means.values()) / len(means)
    reach = NormalDist().inv_cdf(quantile) * math.sqrt(max(0.0, squares / free))
    return {site: math.exp(means.get(site, common) + reach) for site in sites}
