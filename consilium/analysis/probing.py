"""Batches on which several analyses test a model: a site's first training cases, in patches but not augmented."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from consilium.analysis.opening import OpenRun
from consilium.batch import Batch
from consilium.data.cases import Cases
from consilium.errors import RunError
from consilium.learning.fit import placed
from consilium.method import LossOfBatch
from consilium.site import Site
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class Probe:
    """A batch to test models on, and its training loss."""

    batch: Batch
    loss: Callable[[Any], Tensor]  # of a network's output


def training_batches(site: Site, cases: int) -> list[Batch]:
    """Batches of about this many training cases, the same for every model; patches if the study trains on them."""
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
    """A separate network with these weights in evaluation mode: running statistics do not change."""
    network = task.network().to(task.device)
    network.load_state_dict(dict(weights))
    return network.eval()


def mean_loss(network: nn.Module, probes: Sequence[Probe]) -> Tensor:
    """The mean loss over the cases, with a graph for gradients."""
    total = sum(len(probe.batch.cases) for probe in probes)
    parts = [probe.loss(network(probe.batch.images)) * (len(probe.batch.cases) / total) for probe in probes]
    return torch.stack(parts).sum()


def loss_at(task: Task, probes: Sequence[Probe]) -> Callable[[Weights], float]:
    """The loss on these cases as a function of the weights."""
    network = task.network().to(task.device).eval()

    def loss(weights: Weights) -> float:
        network.load_state_dict(dict(weights))
        with torch.no_grad():
            return float(mean_loss(network, probes))

    return loss


class ProbedModel(NamedTuple):
    """A model that a site can use, and its training loss there."""

    name: str  # in figures
    site: Site
    weights: Weights
    loss: LossOfBatch  # that its run minimised there, with pseudo labels, weights and other terms

    def probes(self, cases: int) -> list[Probe]:
        """Probes of about this many training cases."""
        return [Probe(batch, self.loss(batch)) for batch in training_batches(self.site, cases)]


def models_at(runs: Sequence[OpenRun], site: SiteName) -> Iterator[ProbedModel]:
    """Every model that this site can use."""
    for run in runs:
        worker = run.worker(site)
        models = run.models(worker)
        loss = run.trained_loss(worker)
        for kind, model in models.items():
            name = run.name if len(models) == 1 else f"{run.name}: {kind} model"
            yield ProbedModel(name, worker.site, model.weights, loss)
