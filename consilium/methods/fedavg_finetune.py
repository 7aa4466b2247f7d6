"""FedAvg-FT: federated averaging, then each site fine-tunes the result on its own cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from consilium.learning.fit import Job
from consilium.methods.finetuned import FineTuned
from consilium.site import Site
from consilium.weights import Weights


@dataclass(frozen=True)
class FedAvgFinetune(FineTuned):
    """w_g by FedAvg; w_k = E local epochs from the best w_g with a fresh optimiser."""

    paper: ClassVar[str] = "Wang et al., Federated evaluation of on-device personalization (2019)"
    private: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (
        "The adaptation starts from the round that is best on validation; papers that use it do not say.",
    )

    def job(self, site: Site, got: Weights) -> Job:
        return Job(got)
