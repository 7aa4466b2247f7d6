"""FedASAM*: FedASAM on the annotation of each site and the labels of the others' teachers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from consilium.methods.fedasam import check_ascent, sharp_round
from consilium.methods.pseudo_labelled import DIFFERENCES, PAPER, PseudoLabelled, Teach
from consilium.site import Round, Site


@dataclass(frozen=True)
class FedASAMPL(PseudoLabelled):
    """FedASAM over sites that annotate different organs: teachers label what a site does not annotate."""

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

    def learn(self, site: Site, memory: Any, got: Any, teach: Teach, round: Round) -> tuple[Any, Any]:
        weights, loss, steps, states = sharp_round(
            site, got.global_, self.rho, self.eta, round, memory.states, labelled=lambda batch: teach(batch).batch
        )
        return self.reply(weights, loss, steps), replace(memory, states=states)
