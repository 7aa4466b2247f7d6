"""FedASAM: FedAvg whose sites step from the steepest point nearby, so that they end in flat places."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.errors import StudyError
from consilium.learning.fit import learning_rate, optimizer
from consilium.learning.gradients import Bench, seeded_batches
from consilium.learning.sharpness import moved, perturbation
from consilium.method import GlobalModel
from consilium.site import Batch, Round, Site
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class FedASAM(GlobalModel):
    """FedAvg whose sites take the gradient at w + ε, the worst point near w, and step from w with it (ASAM)."""

    rho: float = 0.7  # ρ, how far the ascent goes, in multiples of the weights; 0 is FedAvg
    eta: float = 0.001  # η, how far a weight of zero may be moved

    paper: ClassVar[str] = "Caldarola et al., Improving generalization in federated learning by flat minima (ECCV 2022)"
    differences: ClassVar[tuple[str, ...]] = (
        "Averaging over rounds on the server is a part of the study, [release] swa_from, and works with other methods.",
        "The learning rate does not cycle while releases are averaged; it follows [local] schedule.",
        "Running statistics of normalisation layers are those of the first pass, at w.",
    )

    def __post_init__(self) -> None:
        check_ascent(self.rho, self.eta)

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        weights, loss, steps = sharp_round(site, got.global_, self.rho, self.eta, round)
        return self.Uplink(weights, loss, steps), memory

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        return self.Server(mean({name: reply.global_ for name, reply in replies.items()}, server.n), server.n)


def check_ascent(rho: float, eta: float) -> None:
    for name, value in (("rho", rho), ("eta", eta)):
        if not 0 <= value < math.inf:
            raise StudyError(f"[method] {name} = {value}: it must be a number from 0 up.")


def sharp_round(
    site: Site, weights: Weights, rho: float, eta: float, round: Round, labelled: Callable[[Batch], Batch] | None = None
) -> tuple[Weights, float, int]:
    """One local pass of two-step updates; the loss is that at w, as other methods tell it.

    `labelled` gives every batch its labels, where they are not the site's own.
    """
    bench = Bench(site, weights)
    stepper = optimizer(list(bench.parameters.values()), site.local, learning_rate(site.local, round))
    total, cases, steps = 0.0, 0, 0
    for batch in seeded_batches(site, round):
        batch = batch if labelled is None else labelled(batch)
        gradient, loss = bench.gradient(batch)
        with moved(bench.module, perturbation(bench.parameters, gradient, rho, eta)):
            gradient, _ = bench.gradient(batch)
        for name, parameter in bench.parameters.items():
            parameter.grad = gradient[name]
        stepper.step()
        total, cases, steps = total + loss * len(batch.cases), cases + len(batch.cases), steps + 1
    return bench.weights(), total / max(1, cases), steps
