"""Gradients at a site for methods that write their own local loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.learning.fit import placed, precision, seed_dropout
from consilium.learning.loss_scaling import gradients_of
from consilium.learning.optimizers import learning_rate, load_state, optimizer, read_state
from consilium.learning.training_networks import training_network
from consilium.method import OptimizerState
from consilium.site import Round, Site
from consilium.weights import Weights


class GradientNetwork:
    """A network whose parameters can be set to any point, with `gradient` at that point.

    With `learned`, only the parameters of these names are set and have a gradient; its norm, which may be clipped, is
    theirs alone.
    """

    def __init__(
        self, site: Site, weights: Weights, slot: int = 0, learned: Callable[[str], bool] | None = None
    ) -> None:
        self.site = site
        self._network = training_network(site.task, "model", None, slot, site.device)
        self._network.load(weights)
        self.module, self.parameters = self._network.module, self._network.parameters
        if learned is not None:
            self.parameters = {name: p for name, p in self.parameters.items() if learned(name)}

    def values(self) -> dict[str, Tensor]:
        """A copy of the current parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    def gradient(
        self, batch: Batch, loss_of: Callable[[Any], Tensor] | None = None, clipped: bool = True
    ) -> tuple[dict[str, Tensor], float]:
        """The gradient of a loss of the output (default: the task's) at the current parameters, and the loss.

        `clipped`: as [local] clip says.
        """
        with precision(self.site):
            output = self.module(batch.images)
            loss = self.site.task.loss(output, batch) if loss_of is None else loss_of(output)
        grads = gradients_of(loss, list(self.parameters.values()), self.site.local.precision)
        if clipped and self.site.local.clip:
            length = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
            scale = min(1.0, self.site.local.clip / (length.item() + 1e-6))
            grads = tuple(grad * scale for grad in grads)
        return dict(zip(self.parameters, grads)), loss.item()

    def weights(self, values: Mapping[str, Tensor] | None = None) -> Weights:
        """The whole state with these parameters and the current statistics."""
        return self._network.weights(values)


class Stepper:
    """The study's optimiser, for parameters whose gradients a method computes itself."""

    def __init__(
        self,
        site: Site,
        parameters: Mapping[str, nn.Parameter],
        round: Round,
        states: Mapping[str, OptimizerState] | None = None,
        name: str = "global",
    ) -> None:
        """`states` are those of the last round; this optimiser continues from the one called `name` (see `fit`)."""
        self._parameters, self._name = parameters, name
        keeps = states is not None and site.local.optimizer_state == "kept"
        self._keeps, states = keeps, states or {}
        self._optimizer = optimizer(list(parameters.values()), site.local, learning_rate(site.local, round))
        if keeps and name in states:
            load_state(self._optimizer, list(parameters), list(parameters.values()), states[name])

    def step(self, gradient: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            given = gradient[name]
            # fused steps read both as they lie in memory: a gradient in another layout would be taken in another order
            same = given.stride() == parameter.stride()
            parameter.grad = given if same else torch.empty_like(parameter).copy_(given)
        self._optimizer.step()

    @property
    def states(self) -> dict[str, OptimizerState]:
        """The states to keep for the next round, by name; empty if the study keeps none."""
        if not self._keeps:
            return {}
        state = read_state(self._optimizer, list(self._parameters), list(self._parameters.values()))
        return {} if state is None else {self._name: state}


class Tally:
    """What a local pass tells of itself: the mean loss of its cases, and its steps."""

    def __init__(self) -> None:
        self._total, self._cases, self.steps = 0.0, 0, 0

    def add(self, loss: float, batch: Batch) -> None:
        """A step on a batch with this mean loss."""
        self._total += loss * len(batch.cases)
        self._cases += len(batch.cases)
        self.steps += 1

    @property
    def loss(self) -> float:
        return self._total / max(1, self._cases)


def seeded_batches(site: Site, round: Round) -> Iterator[Batch]:
    """The round's batches on the site's device; dropout, if any, is seeded by the round."""
    with torch.random.fork_rng(devices=[]):
        seed_dropout(site.generator(round, "dropout").initial_seed(), site.device)
        for batch in site.batches(round):
            yield placed(batch, site)


def stepped(values: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> dict[str, Tensor]:
    """One plain gradient step."""
    return {name: value - lr * grads[name] for name, value in values.items()}


def mixed(a: Mapping[str, Tensor], b: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """share · a + (1 − share) · b."""
    return {name: share * value + (1 - share) * b[name] for name, value in a.items()}
