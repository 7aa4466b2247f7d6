"""The relative change of each parameter's gradient by the ascent: Eq. 10 and figure 4 of UFPS.

r = log |(∇f at the perturbed model − ∇f) / ∇f|: above 0 the gradient changes by more than its own size, and the
parameter has a steep direction. The perturbation is USAM's: ASAM's ascent on a batch augmented by CMIDG.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from consilium.analysis.figures import model_tints, site_panels
from consilium.analysis.finding import Finding, Options, Say, as_json, asked_sites, in_words
from consilium.analysis.opening import OpenRun, Runs
from consilium.analysis.probing import Probe, mean_loss, models_at, network_of
from consilium.learning.cmidg import cmidg
from consilium.learning.sharpness import flat, moved, perturbation
from consilium.randomness import torch_generator
from consilium.reports.style import FAINT
from consilium.weights import SiteName

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RHO, ETA = 0.7, 0.001  # as UFPS has them
BINS, REACH = 64, 8.0  # of the histogram; values beyond the range are in the outermost bins


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
    """The distribution over all probes, from the gradients at the model and at the perturbed model."""
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
    """Site → model → the relative change of the gradients."""
    found: dict[SiteName, dict[str, Steepness]] = {}
    for site in sites:
        for model in models_at(runs, site):
            network, generator = network_of(model.site.task, model.weights), torch_generator(seed, "cmidg", site)
            found.setdefault(site, {})[model.name] = steepness(network, model.probes(cases), generator)
    return found


def steep(found: Mapping[str, Mapping[str, Steepness]]) -> Figure:
    """A panel per site: the distribution of the relative difference; right of zero is steep."""
    tint = model_tints(list(dict.fromkeys(name for by in found.values() for name in by)))
    with site_panels(found, 2.4) as (figure, panels):
        for axes, (site, by) in zip(panels, found.items(), strict=True):
            for name, one in by.items():
                shares = np.array(one.counts) / max(1, sum(one.counts))
                label = f"{name}: {100 * one.steep:.0f} % steep"
                axes.stairs(shares, one.edges, color=tint[name], linewidth=1.3, label=label)
            axes.axvline(0, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
            axes.set(title=site, xlabel="r = log |(∇f′ − ∇f) / ∇f|", yticks=[])
            axes.legend(fontsize=7, frameon=False, loc="upper left")
        panels[0].set_ylabel("share of parameters")
        return figure


def analyse_steepness(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    found = site_steepness(runs.opened, asked_sites(runs, options), options.cases, options.seed)
    words = in_words(found, lambda one: f"{100 * one.steep:.0f} %")
    yield Finding(
        "steepness",
        "Which gradients the ascent changes",
        f"Share of parameters whose gradient changes by more than its own size. {words}",
        {"sites": as_json(found)},
        {"steepness": steep(found)},
    )
