"""The optimiser of a study: its learning rate by round, and its state as a message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from consilium.learning.eager import without_compiler
from consilium.local_training import Local
from consilium.method import OptimizerState
from consilium.site import Round
from consilium.weights import Weights


def learning_rate(local: Local, round: Round) -> float:
    """The study's learning rate in this round."""
    if local.schedule == "decay":
        return float(local.lr * local.decay**round.step)
    if local.schedule == "constant":
        return local.lr
    warm = max(1, math.ceil(local.warmup * round.total))
    if round.step < warm:
        return local.lr * (round.step + 1) / warm
    if local.schedule == "warmup-restarts":  # down to a hundredth, then a restart
        share = 0.5 * (1 + math.cos(math.pi * ((round.step - warm) % local.restart) / local.restart))
        return local.lr * (0.01 + 0.99 * share)
    done = (round.step - warm) / max(1, round.total - warm)
    return local.lr * 0.5 * (1 + math.cos(math.pi * done))


def optimizer(parameters: Sequence[nn.Parameter], local: Local, lr: float) -> torch.optim.Optimizer:
    """The study's optimiser; fused kernels step all parameters in one call."""
    without_compiler()
    fused = parameters[0].device.type in ("cpu", "cuda")
    if local.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=fused)
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr, weight_decay=local.weight_decay, fused=fused)


def begin_again(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Forget what an optimiser has gathered. Adam writes over its tensors: to make new ones costs as much as a step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.state.clear()  # its momentum begins as the first gradient, not with zeros
    elif optimizer.state:
        torch._foreach_zero_([value for state in optimizer.state.values() for value in state.values()])


def read_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> OptimizerState | None:
    kept = [optimizer.state.get(p, {}) for p in parameters]
    if not kept or not all(kept):
        return None
    slots = [key for key, value in kept[0].items() if isinstance(value, Tensor) and key != "step"]
    return OptimizerState(
        step=int(kept[0].get("step", 0)),
        slots={slot: Weights({name: part[slot] for name, part in zip(names, kept)}) for slot in slots},
    )


def load_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], parameters: Sequence[nn.Parameter], state: OptimizerState
) -> None:
    held = optimizer.state  # of steps before these: its tensors take the new values
    if not all(parameter in held for parameter in parameters):
        fused = optimizer.defaults.get("fused")  # its kernels need the step count on the parameter's device
        device = parameters[0].device if fused else "cpu"
        for parameter in parameters:
            slots = {slot: torch.empty_like(parameter) for slot in state.slots}
            held[parameter] = {"step": torch.empty((), device=device), **slots}
    with torch.no_grad():
        torch._foreach_zero_([held[parameter]["step"] for parameter in parameters])
        torch._foreach_add_([held[parameter]["step"] for parameter in parameters], state.step)
        for slot, weights in state.slots.items():
            torch._foreach_copy_([held[parameter][slot] for parameter in parameters], [weights[name] for name in names])
