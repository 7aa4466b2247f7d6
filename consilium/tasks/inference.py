"""Networks for inference: built once per process, loaded only when the weights change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from consilium.task import Task
from consilium.weights import Weights


class _LoadedNetwork:
    """One network and its current weights."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.tensors = dict(network.state_dict())  # the network's own, not copies
        self.held: Weights | None = None


@lru_cache(maxsize=16)
def inference_network(task: Task, kind: str, labels: tuple[str, ...] | None) -> _LoadedNetwork:
    network = task.network(kind, labels).to(task.device).eval()
    if task.dimensions == 2:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return _LoadedNetwork(network)


def loaded(task: Task, weights: Weights, kind: str, labels: Sequence[str] | None) -> nn.Module:
    """The task's network in evaluation mode with these weights."""
    place = inference_network(task, kind, None if labels is None else tuple(labels))
    if place.held is not weights:
        place.held = None  # until all of it is there
        weights.copy_into(place.tensors)
        place.held = weights
    return place.network


def averaged(probabilities: Sequence[Tensor], shares: Tensor) -> Tensor:
    """Σ_k share_k p_k, with a share per image and model."""
    spread = (-1, *[1] * (probabilities[0].dim() - 1))
    total = probabilities[0] * shares[:, 0].reshape(spread)
    for k in range(1, len(probabilities)):
        total = total + probabilities[k] * shares[:, k].reshape(spread)
    return total
