"""Local passes of sharpness-aware steps (ascend, then descend): UFPS's sUSAM and the eight variants of table S8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.learning.cmidg import cmidg
from consilium.learning.gradients import GradientNetwork, Stepper, Tally, mixed, seeded_batches
from consilium.learning.sharpness import explored, flat, masked, momentum, moved, perturbation, random_perturbation, top
from consilium.method import OptimizerState
from consilium.site import Round, Site
from consilium.weights import Weights

STRATEGIES = ("susam", "usam", "asam", "random", "fused", "cmidg-both", "top-k", "cmidg")
FUSED = 0.8  # table S8 (6): the share of the plain gradient; the rest is the perturbed one

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Climb:
    """The settings of the ascent. "cmidg" has no ascent: it descends on the augmented batch."""

    strategy: str = "susam"
    rho: float = 0.7  # ρ
    eta: float = 0.001  # η
    keep: float = 0.4  # T_L
    explore: float = 0.1  # T_G
    alpha: float = 0.9  # α_mo

    @property
    def sparse(self) -> bool:
        return self.strategy in ("susam", "top-k")


@dataclass(frozen=True)
class Masks:
    """The masks of a sparse ascent before a round."""

    update: bool  # new masks for each batch; else those of the last update are used
    drawn: int  # the round of the last update: M_E stays the same until the next
    chosen: Tensor | None  # M_L of the last update
    disputed: Tensor | None  # M_G
    momentum: Tensor | None  # G_mo


@dataclass(frozen=True)
class Climbed:
    """The result of a round."""

    weights: Weights
    loss: float  # mean over cases, of the descents
    steps: int
    chosen: Tensor | None
    momentum: Tensor | None
    states: Mapping[str, OptimizerState]  # of the optimiser, if the study keeps it


def sharp_fit(
    site: Site,
    weights: Weights,
    round: Round,
    climb: Climb,
    ready: Callable[[Batch], Loss],
    masks: Masks,
    states: Mapping[str, OptimizerState] | None = None,
) -> Climbed:
    """One local pass; `ready` labels a batch once and returns its loss, used for the ascent and the descent."""
    network = GradientNetwork(site, weights)
    stepper = Stepper(site, network.parameters, round, states)
    chosen, kept = masks.chosen, masks.momentum
    held = None if masks.update or chosen is None else _joined(chosen, masks, climb, site, round, "")
    tally = Tally()
    for number, batch in enumerate(seeded_batches(site, round)):
        loss = ready(batch)
        strong = batch
        if climb.strategy not in ("asam", "random"):
            strong = replace(batch, images=cmidg(batch.images, site.generator(round, f"cmidg {number}")))
        if climb.strategy == "cmidg":
            gradient, value = network.gradient(strong, loss)
        else:
            slope, _ = network.gradient(strong, loss)
            step = perturbation(network.parameters, slope, climb.rho, climb.eta)
            if climb.strategy == "random":
                step = random_perturbation(step, site.generator(round, f"perturbation {number}"))
            if climb.sparse:
                if masks.update and climb.strategy == "susam":
                    kept = momentum(kept, flat(slope), climb.alpha)
                mask = held
                if mask is None:
                    chosen = top(flat(slope).abs(), climb.keep)
                    mask = _joined(chosen, masks, climb, site, round, f" {number}")
                step = masked(step, mask)  # after the norm was taken
            with moved(network.module, step):
                gradient, value = network.gradient(strong if climb.strategy == "cmidg-both" else batch, loss)
            if climb.strategy == "fused":
                gradient = mixed(network.gradient(batch, loss)[0], gradient, FUSED)
        stepper.step(gradient)
        tally.add(value, batch)
    return Climbed(network.weights(), tally.loss, tally.steps, chosen, kept, stepper.states)


def _joined(chosen: Tensor, masks: Masks, climb: Climb, site: Site, round: Round, number: str) -> Tensor:
    """M_L ∪ M_E."""
    if climb.strategy != "susam" or masks.disputed is None:
        return chosen
    generator = site.generator(replace(round, index=masks.drawn), f"explored{number}")
    return torch.logical_or(chosen, explored(chosen, masks.disputed.to(chosen.device), climb.explore, generator))
