"""The similarity of two models: linear centred kernel alignment by layer (Kornblith et al., ICML 2019; UFPS, S3).

Examples are positions in the feature maps, evenly spread, with a maximum per case. 1 means equal up to a rotation and
a factor, 0 means nothing in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from consilium.analysis.figures import model_tints, side_labels
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import OpenRun, Runs
from consilium.analysis.probing import models_at, network_of, training_batches
from consilium.batch import Batch
from consilium.errors import RunError
from consilium.reports.style import WIDTH, sheet
from consilium.site import Site
from consilium.timeline import timeline
from consilium.weights import SiteName, Weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """The similarity of every other model with the first, on a site's training cases."""
    batches = training_batches(here, cases)
    ours = features(network_of(here.task, first), batches)
    found: Similarities = {}
    for name, weights in others.items():
        theirs = features(network_of(here.task, weights), batches)
        found[name] = {layer: linear_cka(x, theirs[layer]) for layer, x in ours.items()}
    return found


def between_runs(runs: Sequence[OpenRun], site: SiteName, cases: int) -> tuple[str, Similarities]:
    """The similarity of the first run's model with those of the others; returns the first name and the results."""
    first, *rest = models_at(runs, site)
    shapes = {name: tensor.shape for name, tensor in first.weights.items()}
    for other in rest:
        if {name: tensor.shape for name, tensor in other.weights.items()} != shapes:
            raise RunError(f"{first.name} and {other.name} are different networks; their layers cannot be compared.")
    return first.name, alike(first.site, first.weights, {other.name: other.weights for other in rest}, cases)


def after_a_round(run: OpenRun, site: SiteName, cases: int, say: Callable[[str], None]) -> Similarities:
    """The similarity of the shared model with each site's model after one more round, on one site's cases.

    Uplinks are not stored, so the sites train one more round from the best state; nothing of it is saved.
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
            raise RunError(f"{run.name}: its sites train no shared model to compare with theirs.")
        made[f"trained at {name}"] = uplink.global_
    here = run.worker(site)
    shared = run.models(here).get("global")
    if shared is None:
        raise RunError(f"{run.name} has no shared model; give several runs to compare their models.")
    return alike(here.site, shared.weights, made, cases)


def similarity(found: Similarities, beside: str) -> Figure:
    """Linear CKA by layer, a line per model."""
    layers = list(next(iter(found.values())))
    tint = model_tints(list(found))
    with sheet(height=3.4, width=WIDTH) as figure:
        axes = figure.subplots()
        for name, by in found.items():
            axes.plot(range(len(layers)), list(by.values()), "o-", color=tint[name], linewidth=1.3, markersize=3)
        axes.set(title=f"Likeness to {beside}, layer by layer", ylabel="linear CKA", ylim=(0, 1.02))
        axes.set_xlabel("layer, from input to output")
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y")
        side_labels(axes, {name: list(by.values())[-1] for name, by in found.items()}, tint)
        return figure


def analyse_similarity(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """Compare the first of several runs with the others, or one run's model with the sites' after one more round."""
    site = options.site or runs.opened[0].members[0]
    if len(runs.opened) > 1:
        beside, found = between_runs(runs.opened, site, options.cases)
    else:
        beside, found = "the shared model", after_a_round(runs.opened[0], site, options.cases, say)
    least = {name: min(by, key=by.__getitem__) for name, by in found.items()}
    words = "; ".join(f"{name} least in {layer} ({found[name][layer]:.2f})" for name, layer in least.items())
    yield Finding(
        f"similarity-{site}",
        f"Layer by layer beside {beside}, on {site}'s cases",
        f"Linear CKA; 1 is the same up to a rotation. {words}",
        {"site": site, "beside": beside, "layers": found},
        {f"similarity-{site}": similarity(found, beside)},
    )
