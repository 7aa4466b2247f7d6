"""Which gradients does the ascent change? The relative difference of Eq. 10 of UFPS, parameter by parameter (figure 4).

r = log |(∇f at the perturbed model − ∇f) / ∇f|: above 0 the gradient changes by more than its own size, and the
parameter lies in a steep direction. The perturbation is USAM's: ASAM's ascent on a batch changed by CMIDG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilium.analysis.opening import OpenRun
from consilium.analysis.probing import mean_loss, models_at, network_of, training_batches
from consilium.learning.cmidg import cmidg
from consilium.learning.sharpness import flat, moved, perturbation
from consilium.randomness import torch_generator
from consilium.site import Batch, Task
from consilium.weights import SiteName

RHO, ETA = 0.7, 0.001  # as UFPS has them
BINS, REACH = 64, 8.0  # of the histogram; what lies farther out is in the outermost


@dataclass(frozen=True)
class Steepness:
    """The distribution of r over parameters and batches."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    steep: float  # share with r > 0
    without: int  # parameters left out: their gradient was exactly 0

    def to_json(self) -> dict[str, Any]:
        return {"edges": self.edges, "counts": self.counts, "steep": self.steep, "without": self.without}


def relative_difference(base: Tensor, changed: Tensor) -> Tensor:
    """Eq. 10 where the base is not zero; equal gradients give −∞."""
    known = base != 0
    return ((changed[known] - base[known]) / base[known]).abs().log()


def steepness(
    task: Task, network: nn.Module, batches: Sequence[Batch], generator: torch.Generator, rho: float = RHO
) -> Steepness:
    """Of every batch: the gradient at the model and at its perturbed self."""
    counts, steep, known, total = torch.zeros(BINS), 0, 0, 0
    weights = dict(network.named_parameters())
    for batch in batches:
        base = _gradient(task, network, batch)
        changed = cmidg(batch.images, generator)
        ascent = _gradient(task, network, Batch(changed, batch.truth, batch.cases, labels=batch.labels))
        with moved(network, perturbation(weights, ascent, rho, ETA)):
            perturbed = _gradient(task, network, batch)
        r = relative_difference(flat(base), flat(perturbed))
        counts += torch.histc(r.clamp(-REACH, REACH).cpu(), BINS, -REACH, REACH)
        steep, known, total = steep + int((r > 0).sum()), known + len(r), total + len(flat(base))
    edges = torch.linspace(-REACH, REACH, BINS + 1).tolist()
    return Steepness(tuple(edges), tuple(int(n) for n in counts), steep / max(1, known), total - known)


def _gradient(task: Task, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
    names, parameters = zip(*network.named_parameters())
    found = torch.autograd.grad(
        mean_loss(task, network, [batch]), parameters, allow_unused=True, materialize_grads=True
    )
    return dict(zip(names, found))


def site_steepness(
    runs: Sequence[OpenRun], sites: Sequence[SiteName], cases: int, seed: int
) -> dict[SiteName, dict[str, Steepness]]:
    """Site → model → how much the ascent changes the gradients there."""
    found: dict[SiteName, dict[str, Steepness]] = {}
    for site in sites:
        for name, here, weights in models_at(runs, site):
            network, batches = network_of(here.task, weights), training_batches(here, cases)
            found.setdefault(site, {})[name] = steepness(
                here.task, network, batches, torch_generator(seed, "cmidg", site)
            )
    return found
