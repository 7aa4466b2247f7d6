"""FedAvg*: FedAvg on the annotation of each site and the labels of the others' teachers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from consilium.learning.fit import Job, fit
from consilium.methods.pseudo_labelled import PAPER, PseudoLabelled, Teach
from consilium.site import Round, Site


@dataclass(frozen=True)
class FedAvgPL(PseudoLabelled):
    """FedAvg over sites that annotate different organs: teachers label what a site does not annotate."""

    paper: ClassVar[str] = PAPER

    def learn(self, site: Site, memory: Any, got: Any, teach: Teach, round: Round) -> tuple[Any, Any]:
        def loss(output: Any, batch: Any) -> Any:
            return site.task.loss(output, teach(batch).batch)

        fits = fit(site, {"global": Job(got.global_, loss=loss)}, round, memory.states)
        done = fits["global"]
        return self.reply(done.weights, done.loss, done.steps), replace(memory, states=fits.states)
