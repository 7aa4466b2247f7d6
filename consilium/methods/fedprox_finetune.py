"""FedProx-FT: FedProx, then each site fine-tunes the result on its own cases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from consilium.errors import StudyError
from consilium.learning.fit import Job
from consilium.methods.fedprox import proximal_job
from consilium.methods.finetuned import FineTuned
from consilium.site import Site
from consilium.weights import Weights


@dataclass(frozen=True)
class FedProxFinetune(FineTuned):
    """w_g by FedProx; w_k = E local epochs from the best w_g, without the proximal term."""

    mu: float = 0.01  # μ, the strength of the pull to the shared model

    paper: ClassVar[str] = "Luo & Wu, Adapt to adaptation (IJCAI 2022), where it is a baseline"
    private: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (
        "The adaptation starts from the round that is best on validation; papers that use it do not say.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise StudyError(f"[method] mu = {self.mu}: it cannot be negative; 0 is FedAvg-FT.")

    def job(self, site: Site, got: Weights) -> Job:
        return proximal_job(site, got, self.mu)
