"""The average of the sites' models: the share of each site, and the rule in place of the mean."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.learning.aggregation import Aggregation
from consilium.method import Method
from consilium.weights import SiteName, Weights

SHARES = ("cases", "uniform")


@dataclass(frozen=True)
class WithAggregation:
    """A method whose server makes one model of the sites' models, by the mean or by another rule."""

    aggregation: ClassVar[Aggregation] = Aggregation()  # `[study] aggregation`

    def also_averages(self) -> str:
        """What is averaged where no rule can replace the mean, with the remedy; empty: nothing."""
        return ""

    def alike_average(self, models: Mapping[SiteName, Weights], start: Weights) -> Weights:
        """One model from those of the sites that answered, all with the same share; `start` as below."""
        return self.aggregation.of(models, dict.fromkeys(models, 1.0), start)


@dataclass(frozen=True)
class WithShares(WithAggregation):
    """A method that averages models by numbers of training cases, or with the same share for every site."""

    shares: str = field(default="cases", kw_only=True)  # w = Σ (n_k / n) w_k; "uniform": w = Σ w_k / K

    def __post_init__(self) -> None:
        check_choices(self, "method", shares=SHARES)

    def shares_of(self, n: Mapping[SiteName, int]) -> Mapping[SiteName, int]:
        """The sites' shares, not normalised; `n` are their numbers of training cases."""
        return n if self.shares == "cases" else dict.fromkeys(n, 1)

    def average(self, models: Mapping[SiteName, Weights], n: Mapping[SiteName, int], start: Weights) -> Weights:
        """One model from those of the sites that answered: their mean by `shares`, or the rule `[study] aggregation`.

        `start` is the server's model before the round: rules measure the sites' updates from it.
        """
        return self.aggregation.of(models, self.shares_of(n), start)


def with_aggregation(name: str, method: Method, how: Aggregation) -> Method:
    """The method with another rule in place of the mean; StudyError if the method takes no mean of models."""
    if how == Aggregation():
        return method
    if not isinstance(method, WithAggregation):
        raise StudyError(
            f"[study] aggregation = '{how.rule}' is for methods that average the sites' models, such as fedavg, "
            f"scaffold and the global model of fedsm; '{name}' does not: leave it at 'mean'."
        )
    if also := method.also_averages():
        raise StudyError(f"[study] aggregation = '{how.rule}': '{name}' also averages {also}.")
    changed = copy.copy(method)
    object.__setattr__(changed, "aggregation", how)  # of the study, not one of the method's own fields
    return changed
