"""Networks for training: built once per process, loaded with new weights for each use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from consilium.learning.optimizers import begin_again, optimizer
from consilium.local_training import Local
from consilium.task import Task
from consilium.weights import Weights


class TrainingNetwork:
    """A network for training, built once per process. Each use loads all of its weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        self.parameters = dict(module.named_parameters())
        self._tensors = dict(module.state_dict())  # the module's own, not copies
        self._optimizer: tuple[Local, torch.optim.Optimizer] | None = None

    def load(self, weights: Weights) -> None:
        weights.copy_into(self._tensors)
        self.clear()

    def optimizer(self, local: Local, lr: float) -> torch.optim.Optimizer:
        """The study's optimiser of these parameters, as at its first step; the last one is taken back."""
        if self._optimizer is not None and self._optimizer[0] == local:
            begin_again(self._optimizer[1], lr)
        else:
            self._optimizer = local, optimizer(list(self.parameters.values()), local, lr)
        return self._optimizer[1]

    @cached_property
    def compiled(self) -> Any:
        """The module by torch.compile, on the same parameters; compiled at its first batch, once per process."""
        return torch.compile(self.module)

    def clear(self) -> None:
        """Drop the gradients. This is faster than `Optimizer.zero_grad`, which takes a hundredth of a small step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def weights(self, changed: Mapping[str, Tensor] | None = None) -> Weights:
        """A copy of the current weights, with `changed` in place of its own."""
        return Weights({**self._tensors, **(changed or {})})


@lru_cache(maxsize=16)
def training_network(task: Task, kind: str, labels: tuple[str, ...] | None, slot: int, device: str) -> TrainingNetwork:
    module = task.network(kind, labels).to(device)
    if task.dimensions == 2:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return TrainingNetwork(module)
