"""Which gradients does the ascent change? The relative difference of Eq. 10 of UFPS, parameter by parameter (figure 4).

r = log |(∇f at the perturbed model − ∇f) / ∇f|: above 0 the gradient changes by more than its own size, and the
parameter lies in a steep direction. The perturbation is USAM's: ASAM's ascent on a batch changed by CMIDG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from consilium.analysis.opening import OpenRun
from consilium.analysis.probing import Probe, mean_loss, models_at, network_of
from consilium.learning.cmidg import cmidg
from consilium.learning.sharpness import flat, moved, perturbation
from consilium.randomness import torch_generator
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


def steepness(network: nn.Module, probes: Sequence[Probe], generator: torch.Generator, rho: float = RHO) -> Steepness:
    """Of every probe: the gradient at the model and at its perturbed self."""
    counts, steep, known, total = torch.zeros(BINS), 0, 0, 0
    weights = dict(network.named_parameters())
    for probe in probes:
        base = _gradient(network, probe)
        images = cmidg(probe.batch.images, generator)
        ascent = _gradient(network, replace(probe, batch=replace(probe.batch, images=images)))
        with moved(network, perturbation(weights, ascent, rho, ETA)):
            perturbed = _gradient(network, probe)
        r = relative_difference(flat(base), flat(perturbed))
        counts += torch.histc(r.clamp(-REACH, REACH).cpu(), BINS, -REACH, REACH)
        steep, known, total = steep + int((r > 0).sum()), known + len(r), total + len(flat(base))
    edges = torch.linspace(-REACH, REACH, BINS + 1).tolist()
    return Steepness(tuple(edges), tuple(int(n) for n in counts), steep / max(1, known), total - known)


def _gradient(network: nn.Module, probe: Probe) -> dict[str, Tensor]:
    names, parameters = zip(*network.named_parameters())
    found = torch.autograd.grad(mean_loss(network, [probe]), parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found))


def site_steepness(
    runs: Sequence[OpenRun], sites: Sequence[SiteName], cases: int, seed: int
) -> dict[SiteName, dict[str, Steepness]]:
    """Site → model → how much the ascent changes the gradients there."""
    found: dict[SiteName, dict[str, Steepness]] = {}
    for site in sites:
        for model in models_at(runs, site):
            network, generator = network_of(model.site.task, model.weights), torch_generator(seed, "cmidg", site)
            found.setdefault(site, {})[model.name] = steepness(network, model.probes(cases), generator)
    return found
