"""A linear discriminant in closed form, from sums that sites can send: number, mean and scatter of features.

Each site is a class with the same prior. All classes share one covariance, shrunk towards its own diagonal because
there are often fewer cases than features. The shrinkage is chosen on validation cases. Without any, it is that of
Chen, Wiesel, Eldar & Hero (2010, "OAS"), which follows from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from statistics import NormalDist
from typing import Annotated

import torch
from torch import Tensor

from consilium.ranges import Items, Range
from consilium.site import Count
from consilium.tree import message
from consilium.weights import SiteName, sum_of_tensors

# tried on validation cases: shrinkage towards the diagonal, and temperature of the softmax
SHRINKAGES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
TEMPERATURES = tuple(2.0**i for i in range(-4, 13))
_DOUBT = 1e-3  # the uniform part of every probability, which bounds the log loss of one case
FARTHEST = 100.0  # bound on the absolute logarithm of a distance
MOST_SURPRISE = 50.0  # bound on the log loss of a case


@message
class FeatureSums:
    """Sums of the features of a site's training images. They contain no single image, unless there is only one."""

    n: Count
    mean: Tensor  # (features,) float64
    scatter: Tensor  # (features · (features + 1) / 2,) float64: the upper triangle of Σ (x − mean)(x − mean)ᵀ

    def contradiction(self) -> str:
        """Why the sums cannot belong to any images; empty if they can."""
        if self.n < 1:
            return "features of no image have no mean"
        diagonal = symmetric(self.scatter, len(self.mean)).diagonal()
        return "a scatter is negative" if bool((diagonal < 0).any()) else ""


def sums_of(features: Tensor) -> FeatureSums:
    """The sums of features (n, features)."""
    rows = features.double()
    mean = rows.mean(0)
    centred = rows - mean
    return FeatureSums(len(rows), mean, upper(centred.T @ centred))


@dataclass(frozen=True)
class BoundedSums:
    """Sums over patients' features, each clipped to length 1: one patient changes `values` by at most √2."""

    values: Tensor  # (2 · features,) float64: Σ x and Σ x²
    patients: int


def bounded_sums(features: Iterable[Tensor], most: float) -> BoundedSums:
    """The sums over patients of their mean features (features,), in units of `most`, the clipping length."""
    totals: list[Tensor] = []
    for own in features:
        scaled = own.double() / most
        length = scaled.norm().item()
        part = scaled / max(1.0, length) if length < math.inf else torch.zeros_like(scaled)
        totals.append(torch.cat([part, part.square()]))
    return BoundedSums(torch.stack(totals).sum(0), len(totals))


def from_noised(values: Tensor, most: float, n: int, patients: int) -> FeatureSums:
    """The sums that a site sends, from noised `BoundedSums.values`: without products of different features.

    Scatter is not negative. `n` is the public number of images, so that shares do not change.
    """
    first, second = (values / patients).chunk(2)
    spread = (second - first.square()).clamp_min(1e-6)
    return FeatureSums(n, first * most, upper(torch.diag(spread * most**2 * n)))


def added(one: FeatureSums, other: FeatureSums) -> FeatureSums:
    """The sums of both sets of images together (Chan, Golub & LeVeque 1979)."""
    n = one.n + other.n
    gap = other.mean - one.mean
    between = upper(torch.outer(gap, gap)) * (one.n * other.n / n)
    return FeatureSums(n, one.mean + gap * (other.n / n), one.scatter + other.scatter + between)


def summed(batches: Iterable[Tensor]) -> FeatureSums | None:
    """The sums of features over batches; None without any batch."""
    parts = [sums_of(batch) for batch in batches]
    return reduce(added, parts) if parts else None


def upper(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def symmetric(triangle: Tensor, side: int) -> Tensor:
    """The symmetric matrix (side, side) of an upper triangle; exactly symmetric."""
    matrix = triangle.new_zeros(side, side)
    rows, columns = torch.triu_indices(side, side)
    matrix[rows, columns] = triangle
    matrix[columns, rows] = triangle
    return matrix


@message
class Discriminant:
    """Gives the probability of each site for an image, and its distance from each."""

    means: Mapping[SiteName, Tensor]  # (features,) each
    covariance: Tensor  # the upper triangle of the shared covariance
    shrinkage: float  # towards its diagonal, 0 to 1
    temperature: float  # of the softmax
    limits: Mapping[SiteName, float]  # beyond this distance an image does not belong to the site; empty: no limits

    @property
    def sites(self) -> list[SiteName]:
        return list(self.means)


def discriminant(sums: Mapping[SiteName, FeatureSums]) -> Discriminant:
    """The discriminant from the sums of every site, with OAS shrinkage, temperature 1 and no limits."""
    names = sorted(sums)
    free = max(1, sum(sums[name].n for name in names) - len(names))
    within = sum_of_tensors([sums[name].scatter for name in names]) / free
    found = Discriminant({name: sums[name].mean for name in names}, within, 1.0, 1.0, {})
    return replace(found, shrinkage=oas_shrinkage(Space(found).correlation, free))


def oas_shrinkage(covariance: Tensor, n: int) -> float:
    """The shrinkage, 0 to 1, for a covariance (p, p) estimated with n degrees of freedom."""
    side = len(covariance)
    square = covariance.square().sum().item()
    trace = covariance.diagonal().sum().item()
    spread = (n + 1 - 2 / side) * (square - trace**2 / side)
    if not spread > 0:
        return 1.0
    return min(1.0, ((1 - 2 / side) * square + trace**2) / spread)


class Space:
    """Mahalanobis distances to every site in a discriminant's feature space, at any shrinkage."""

    def __init__(self, found: Discriminant) -> None:
        self.found = found
        self.means = torch.stack(list(found.means.values()))

    @cached_property
    def _within(self) -> Tensor:
        return symmetric(self.found.covariance, self.means.shape[1])

    @cached_property
    def scale(self) -> Tensor:
        """Each feature's standard deviation, with a floor for features that are constant inside sites."""
        between = self.means.var(0, unbiased=False)
        return (self._within.diagonal() + 1e-6 * between + 1e-12).sqrt()

    @cached_property
    def correlation(self) -> Tensor:
        return self._within / torch.outer(self.scale, self.scale)

    @cached_property
    def _axes(self) -> tuple[Tensor, Tensor]:
        """The correlation's eigenvalues and eigenvectors; shrinkage changes only the eigenvalues."""
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


Sums = Annotated[tuple[Annotated[float, Range(-1e12, 1e12)], ...], Items(1000)]


@message
class RoutingSums:
    """Sums over a site's validation cases."""

    cases: Count
    surprise: Sums  # −log of its own probability, for every shrinkage and temperature
    log_distance: Sums  # of the cases to their own site, for every shrinkage
    log_distance_squared: Sums

    def contradiction(self) -> str:
        """Why the sums cannot be true of so many cases; empty if they can."""
        n = self.cases
        if any(not -1e-6 <= total <= MOST_SURPRISE * n for total in self.surprise):
            return f"the surprise of {n} cases cannot be so large"
        for total, square in zip(self.log_distance, self.log_distance_squared):
            if abs(total) > FARTHEST * n or not 0 <= square <= FARTHEST**2 * n:
                return f"the distances of {n} cases cannot be so large"
        return ""


NO_CASES = RoutingSums(
    0, (0.0,) * (len(SHRINKAGES) * len(TEMPERATURES)), (0.0,) * len(SHRINKAGES), (0.0,) * len(SHRINKAGES)
)


def routing_sums(space: Space, features: Tensor, own: SiteName) -> RoutingSums:
    """The sums of validation cases with these features (cases, features), all of the site `own`."""
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
    """The discriminant with the shrinkage and temperature of the least log loss on validation cases, and with limits.

    All sites have equal shares. Ties go to the shrinkage nearest to the first one, then to the temperature nearest
    to 1. Without validation cases nothing changes.
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
    """The distance limit of each site: a quantile of the site's own validation distances.

    `logs`: by site the number, the sum and the sum of squares of the logarithms of distances. They are modelled as
    normal, with the site's own mean and a standard deviation that all sites share. So sums are enough, and a site with
    few cases gets no narrow limit. A site without validation cases gets the mean of the others. There are no limits at
    quantile 1, or with too few cases.
    """
    free = sum(n for n, _, _ in logs.values()) - len(logs)
    if quantile >= 1 or free < 1:
        return {}
    means = {name: total / n for name, (n, total, _) in logs.items()}
    squares = math.fsum(square - n * means[name] ** 2 for name, (n, _, square) in logs.items())
    common = math.fsum(means.values()) / len(means)
    reach = NormalDist().inv_cdf(quantile) * math.sqrt(max(0.0, squares / free))
    return {site: math.exp(min(700.0, means.get(site, common) + reach)) for site in sites}
