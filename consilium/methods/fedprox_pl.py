"""FedProx*: FedProx on the annotation of each site and the labels of the others' teachers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from consilium.errors import StudyError
from consilium.learning.fit import fit
from consilium.methods.fedprox import proximal_job
from consilium.methods.pseudo_labelled import PAPER, PseudoLabelled, Teach
from consilium.site import Round, Site


@dataclass(frozen=True)
class FedProxPL(PseudoLabelled):
    """FedProx over sites that annotate different organs: teachers label what a site does not annotate."""

    mu: float = 0.01  # μ, the strength of the pull to the shared model

    paper: ClassVar[str] = PAPER

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise StudyError(f"[method] mu = {self.mu}: it cannot be negative; 0 is fedavg-pl.")

    def learn(self, site: Site, memory: Any, got: Any, teach: Teach, round: Round) -> tuple[Any, Any]:
        def loss(output: Any, batch: Any) -> Any:
            return site.task.loss(output, teach(batch).batch)

        job = replace(proximal_job(site, got.global_, self.mu), loss=loss)
        fits = fit(site, {"global": job}, round, memory.states)
        done = fits["global"]
        return self.reply(done.weights, done.loss, done.steps), replace(memory, states=fits.states)
