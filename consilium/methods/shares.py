"""How much each site counts in the average of the sites' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from consilium.methods.selector import check_fields
from consilium.weights import SiteName, Weights, mean

SHARES = ("cases", "uniform")


@dataclass(frozen=True)
class WithShares:
    """A method that averages models by the sites' numbers of training cases, or gives every site the same share."""

    shares: str = field(default="cases", kw_only=True)  # w = Σ (n_k / n) w_k; "uniform": w = Σ w_k / K

    def __post_init__(self) -> None:
        check_fields(shares=(self.shares, SHARES))

    def shares_of(self, n: Mapping[SiteName, int]) -> Mapping[SiteName, int]:
        """The sites' shares, not normalised; `n` are their numbers of training cases."""
        return n if self.shares == "cases" else dict.fromkeys(n, 1)

    def average(self, models: Mapping[SiteName, Weights], n: Mapping[SiteName, int]) -> Weights:
        """The mean of the models of the sites that answered, by `shares`."""
        return mean(models, self.shares_of(n))
