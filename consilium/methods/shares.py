"""The share of each site in the average of the sites' models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from consilium.errors import StudyError
from consilium.learning.aggregation import Aggregation
from consilium.method import Method
from consilium.methods.selector import check_fields
from consilium.weights import SiteName, Weights

SHARES = ("cases", "uniform")


@dataclass(frozen=True)
class WithShares:
    """A method that averages models by numbers of training cases, or with the same share for every site."""

    aggregation: ClassVar[Aggregation] = Aggregation()  # `[study] aggregation`

    shares: str = field(default="cases", kw_only=True)  # w = Σ (n_k / n) w_k; "uniform": w = Σ w_k / K

    def __post_init__(self) -> None:
        check_fields(shares=(self.shares, SHARES))

    def shares_of(self, n: Mapping[SiteName, int]) -> Mapping[SiteName, int]:
        """The sites' shares, not normalised; `n` are their numbers of training cases."""
        return n if self.shares == "cases" else dict.fromkeys(n, 1)

    def average(
        self, models: Mapping[SiteName, Weights], n: Mapping[SiteName, int], start: Weights | None = None
    ) -> Weights:
        """One model from those of the sites that answered: their mean by `shares`, or the rule `[study] aggregation`.

        `start` is the model that all sites started from, if there is one.
        """
        return self.aggregation.of(models, self.shares_of(n), start)


def with_aggregation(name: str, method: Method, how: Aggregation) -> Method:
    """The method with another rule in place of the mean; StudyError if the method takes no mean of models."""
    if how == Aggregation():
        return method
    if not isinstance(method, WithShares):
        raise StudyError(
            f"[study] aggregation = '{how.rule}' is for methods that average models by shares, such as fedavg, fedprox "
            f"and the global model of fedsm; '{name}' does not: leave it at 'mean'."
        )
    changed = copy.copy(method)
    object.__setattr__(changed, "aggregation", how)  # of the study, not one of the method's own fields
    return changed
