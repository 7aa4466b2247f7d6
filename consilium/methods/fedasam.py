"""FedASAM: FedAvg with sharpness-aware local steps, which lead to flat minima."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.gradients import GradientNetwork, Stepper, Tally, seeded_batches
from consilium.learning.sharpness import moved, perturbation
from consilium.method import GlobalModel, OptimizerState
from consilium.methods.shares import WithShares
from consilium.site import Round, Site
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class FedASAM(WithShares, GlobalModel):
    """FedAvg with ASAM steps: a site takes the gradient at w + ε, the worst point near w, and steps from w."""

    rho: float = 0.7  # ρ, how far the ascent goes, in multiples of the weights; 0 is FedAvg
    eta: float = 0.001  # η, how far a weight of zero may be moved

    paper: ClassVar[str] = "Caldarola et al., Improving generalization in federated learning by flat minima (ECCV 2022)"
    differences: ClassVar[tuple[str, ...]] = (
        "Averaging over rounds on the server is a part of the study, [release] swa_from, and works with other methods.",
        "The learning rate does not cycle while releases are averaged; it follows [local] schedule.",
        "Running statistics of normalisation layers are those of the first pass, at w.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ascent(self.rho, self.eta)

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        weights, loss, steps, states = sharp_round(site, got.global_, self.rho, self.eta, round, memory.states)
        return self.Uplink(weights, loss, steps), self.Memory(states=states)

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        models = {name: reply.global_ for name, reply in replies.items()}
        return self.Server(self.average(models, server.n, server.global_), server.n)


def check_ascent(rho: float, eta: float, section: str = "method") -> None:
    """Reject a radius ρ or an η below 0 (StudyError)."""
    for name, value in (("rho", rho), ("eta", eta)):
        if not 0 <= value < math.inf:
            raise StudyError(f"[{section}] {name} = {value}: it must be a number from 0 up.")


def sharp_round(
    site: Site,
    weights: Weights,
    rho: float,
    eta: float,
    round: Round,
    states: Mapping[str, OptimizerState] | None = None,
    labelled: Callable[[Batch], Batch] | None = None,
) -> tuple[Weights, float, int, dict[str, OptimizerState]]:
    """One local pass of ASAM steps; `labelled` adds labels to each batch, if they are not the site's own.

    Returns the weights, the mean loss at w (as other methods report it), the number of steps and the states to keep.
    """
    network = GradientNetwork(site, weights)
    stepper = Stepper(site, network.parameters, round, states)
    tally = Tally()
    for batch in seeded_batches(site, round):
        batch = batch if labelled is None else labelled(batch)
        gradient, loss = network.gradient(batch)
        with moved(network.module, perturbation(network.parameters, gradient, rho, eta)):
            gradient, _ = network.gradient(batch)
        stepper.step(gradient)
        tally.add(loss, batch)
    return network.weights(), tally.loss, tally.steps, stepper.states
