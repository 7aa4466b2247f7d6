"""An optimiser step on the server, from the average of the sites' gradients."""

from __future__ import annotations

import torch

from consilium.learning.eager import without_compiler
from consilium.learning.optimizers import load_state, read_state
from consilium.method import OptimizerState
from consilium.weights import Weights


def adam_step(
    weights: Weights, gradient: Weights, state: OptimizerState | None, lr: float
) -> tuple[Weights, OptimizerState | None]:
    """One step of Adam; the new weights and the new state."""
    names = list(gradient)
    parameters = [torch.nn.Parameter(weights[name].clone()) for name in names]
    for name, parameter in zip(names, parameters):
        parameter.grad = gradient[name].clone()
    without_compiler()
    adam = torch.optim.Adam(parameters, lr)
    if state is not None:
        load_state(adam, names, parameters, state)
    adam.step()
    stepped = dict(zip(names, (p.detach() for p in parameters)))
    return Weights({name: stepped.get(name, weights[name]) for name in weights}), read_state(adam, names, parameters)
