"""FedASAM*: FedASAM on each site's annotation and the pseudo labels of the other sites' teachers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from consilium.methods.fedasam import check_ascent, sharp_round
from consilium.methods.pseudo_labelled import DIFFERENCES, PAPER, LabelBatch, PseudoLabelled, model_of
from consilium.site import Round, Site


@dataclass(frozen=True)
class FedASAMPL(PseudoLabelled):
    """FedASAM for sites that annotate different organs: teachers label the organs that a site does not annotate."""

    rho: float = 0.7  # ρ, how far the ascent goes, in multiples of the weights
    eta: float = 0.001  # η, how far a weight of zero may be moved

    paper: ClassVar[str] = PAPER
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "Averaging over rounds on the server is a part of the study: [release] swa_from = 0.75, swa_cycle = 2.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ascent(self.rho, self.eta)

    def learn(
        self, site: Site, memory: PseudoLabelled.Memory, got: PseudoLabelled.Downlink, teach: LabelBatch, round: Round
    ) -> tuple[PseudoLabelled.Uplink, PseudoLabelled.Memory]:
        weights, loss, steps, states = sharp_round(
            site, model_of(got), self.rho, self.eta, round, memory.states, labelled=lambda batch: teach(batch).batch
        )
        return self.reply(weights, loss, steps), replace(memory, states=states)
