"""FedProx*: FedProx on each site's annotation and the pseudo labels of the other sites' teachers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.learning.fit import fit
from consilium.methods.fedprox import proximal_job
from consilium.methods.pseudo_labelled import PAPER, LabelBatch, PseudoLabelled, model_of
from consilium.site import Round, Site


@dataclass(frozen=True)
class FedProxPL(PseudoLabelled):
    """FedProx for sites that annotate different organs: teachers label the organs that a site does not annotate."""

    mu: float = 0.01  # μ, the strength of the pull to the shared model
    squares: str = "sum"  # (μ/2) times the sum of squares, as in FedProx; "mean": μ times their mean, as in UFPS

    paper: ClassVar[str] = PAPER
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise StudyError(f"[method] mu = {self.mu}: it cannot be negative; 0 is fedavg-pl.")
        check_choices(self, "method", squares=("sum", "mean"))

    def learn(
        self, site: Site, memory: PseudoLabelled.Memory, got: PseudoLabelled.Downlink, teach: LabelBatch, round: Round
    ) -> tuple[PseudoLabelled.Uplink, PseudoLabelled.Memory]:
        def loss(output: Any, batch: Any) -> Any:
            return site.task.loss(output, teach(batch).batch)

        job = replace(proximal_job(site, model_of(got), self.mu, self.squares == "mean"), loss=loss)
        fits = fit(site, {"global": job}, round, memory.states)
        done = fits["global"]
        return self.reply(done.weights, done.loss, done.steps), replace(memory, states=fits.states)
