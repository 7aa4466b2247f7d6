"""FedAvg*: FedAvg on each site's annotation and the pseudo labels of the other sites' teachers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from consilium.learning.fit import Job, fit
from consilium.methods.pseudo_labelled import PAPER, LabelBatch, PseudoLabelled, model_of
from consilium.site import Round, Site


@dataclass(frozen=True)
class FedAvgPL(PseudoLabelled):
    """FedAvg for sites that annotate different organs: teachers label the organs that a site does not annotate."""

    paper: ClassVar[str] = PAPER
    private: ClassVar[bool] = True

    def learn(
        self, site: Site, memory: PseudoLabelled.Memory, got: PseudoLabelled.Downlink, teach: LabelBatch, round: Round
    ) -> tuple[PseudoLabelled.Uplink, PseudoLabelled.Memory]:
        def loss(output: Any, batch: Any) -> Any:
            return site.task.loss(output, teach(batch).batch)

        fits = fit(site, {"global": Job(model_of(got), loss=loss)}, round, memory.states)
        done = fits["global"]
        return self.reply(done.weights, done.loss, done.steps), replace(memory, states=fits.states)
