"""What several analyses try a model on: a site's first training cases as training cuts them, but not augmented."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from consilium.analysis.opening import OpenRun
from consilium.data.cases import Cases
from consilium.errors import RunError
from consilium.learning.fit import placed
from consilium.site import Batch, Site, Task
from consilium.weights import SiteName, Weights


def training_batches(site: Site, cases: int) -> list[Batch]:
    """Batches of about so many training cases, the same for every model; patches where the study trains on them."""
    assert isinstance(site.data, Cases)
    data, found = replace(site.data, augmentations=()), list[Batch]()
    for batch in data.batches(min(cases, site.local.batch_size), 0, 0):
        if sum(len(one.cases) for one in found) >= cases:
            break
        found.append(placed(batch, site))
    if not found:
        raise RunError(f"site '{site.card.name}' has no training cases to try models on; choose another --site.")
    return found


def network_of(task: Task, weights: Weights) -> nn.Module:
    """A network of one's own with these weights, as it predicts: running statistics stay as they are."""
    network = task.network().to(task.device)
    network.load_state_dict(dict(weights))
    return network.eval()


def mean_loss(task: Task, network: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Over the cases, with a graph."""
    total = sum(len(batch.cases) for batch in batches)
    parts = [task.loss(network(batch.images), batch) * (len(batch.cases) / total) for batch in batches]
    return torch.stack(parts).sum()


def loss_at(task: Task, batches: Sequence[Batch]) -> Callable[[Weights], float]:
    """The loss on these cases as a function of the weights."""
    network = task.network().to(task.device).eval()

    def loss(weights: Weights) -> float:
        network.load_state_dict(dict(weights))
        with torch.no_grad():
            return float(mean_loss(task, network, batches))

    return loss


def models_at(runs: Sequence[OpenRun], site: SiteName) -> Iterator[tuple[str, Site, Weights]]:
    """Every model that serves this site, by what figures call it, and the site to try it at."""
    for run in runs:
        worker = run.worker(site)
        models = run.models(worker)
        for kind, model in models.items():
            yield run.name if len(models) == 1 else f"{run.name}: {kind} model", worker.site, model.weights
