"""How alike do two models see? Linear centred kernel alignment, layer by layer (Kornblith et al., ICML 2019; UFPS, S3).

Examples are places in the feature maps, at most so many per case, evenly spread. One is "the same up to a rotation and
a factor", zero "nothing in common".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from consilium.analysis.opening import OpenRun
from consilium.analysis.probing import models_at, network_of, training_batches
from consilium.errors import RunError
from consilium.method import timeline
from consilium.site import Batch, Site
from consilium.weights import SiteName, Weights

PLACES = 2048  # per case and layer

Similarities = dict[str, dict[str, float]]  # pair of models → layer → CKA


def linear_cka(x: Tensor, y: Tensor) -> float:
    """‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of centred features (examples, channels)."""
    x, y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    own = (x.T @ x).norm() * (y.T @ y).norm()
    return float((y.T @ x).square().sum() / own) if own > 0 else 0.0


@torch.no_grad()
def features(network: nn.Module, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The output of every convolution and linear layer, (examples, channels), in the order of the network."""
    found: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, given: Any, output: Tensor) -> None:
            spread = output.flatten(2) if output.dim() > 2 else output[..., None]
            few = spread[..., :: max(1, spread.shape[-1] // PLACES)]
            found.setdefault(name, []).append(few.transpose(1, 2).flatten(0, 1).float().cpu())

        return hook

    layers = [(name, m) for name, m in network.named_modules() if isinstance(m, (_ConvNd, nn.Linear))]
    handles = [module.register_forward_hook(note(name)) for name, module in layers]
    for batch in batches:
        network(batch.images)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(found[name]) for name, _ in layers if name in found}


def alike(here: Site, first: Weights, others: Mapping[str, Weights], cases: int) -> Similarities:
    """Every other model beside the first, on a site's training cases."""
    batches = training_batches(here, cases)
    ours = features(network_of(here.task, first), batches)
    found: Similarities = {}
    for name, weights in others.items():
        theirs = features(network_of(here.task, weights), batches)
        found[name] = {layer: linear_cka(x, theirs[layer]) for layer, x in ours.items()}
    return found


def between_runs(runs: Sequence[OpenRun], site: SiteName, cases: int) -> tuple[str, Similarities]:
    """The first run's model beside those of the others; the name of the first, and what was found."""
    first, *rest = models_at(runs, site)
    shapes = {name: tensor.shape for name, tensor in first.weights.items()}
    for other in rest:
        if {name: tensor.shape for name, tensor in other.weights.items()} != shapes:
            raise RunError(
                f"{first.name} and {other.name} are different networks; their layers cannot be set side by side."
            )
    return first.name, alike(first.site, first.weights, {other.name: other.weights for other in rest}, cases)


def after_a_round(run: OpenRun, site: SiteName, cases: int, say: Callable[[str], None]) -> Similarities:
    """The shared model beside what every site makes of it in one more round, on one site's cases.

    The uplinks of a run are not kept; the sites train once more from its best state, and nothing of it is saved.
    """
    method = run.study.method
    round = [round for phase, round in timeline(method, run.study.plan.rounds) if phase.counts][-1]
    made: dict[str, Weights] = {}
    for name in run.members:
        say(f"one more round at {name}")
        worker = run.worker(name)
        kept = worker.kept(run.merged.get(name, -1))
        memory = kept.memory if kept else method.remember(worker.site)
        uplink, _ = method.train(worker.site, memory, method.send(run.server, run.roster[name], round), round)
        if getattr(uplink, "global_", None) is None:
            raise RunError(f"{run.name}: its sites do not train a shared model that could be set beside theirs.")
        made[f"trained at {name}"] = uplink.global_
    here = run.worker(site)
    shared = run.models(here).get("global")
    if shared is None:
        raise RunError(f"{run.name} has no shared model; give several runs, to set their models side by side.")
    return alike(here.site, shared.weights, made, cases)
