"""Sharpness-aware minimisation: the ascent before a descent (ASAM), and masks that make it sparse (UFPS, Eqs. 11–14).

A mask is one flat Boolean vector over all d parameters, in the network's own order. A packet holds it with one bit per
parameter, a thirty-second of the model. The largest values of all parameters are found in one vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from consilium.task import Task
from consilium.weights import SiteName


def perturbation(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rho: float, eta: float
) -> dict[str, Tensor]:
    """ASAM's ascent ε = ρ T² g / ‖T g‖ over all parameters; T is |w| + η on weights and 1 on biases.

    ‖ε / T‖ = ρ: the step of a weight is relative to its size, so a rescaled network takes the same ascent.
    A gradient of zero moves nothing.
    """
    scale = {name: torch.ones_like(w) if _is_bias(name) else w.detach().abs() + eta for name, w in weights.items()}
    steep = {name: scale[name] * gradient for name, gradient in gradients.items()}  # T g
    length = _norm(steep)
    factor = torch.where(length > 0, rho / length, 0.0)
    return {name: scale[name].mul_(steep[name]).mul_(factor) for name in steep}


def random_perturbation(like: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Normal noise with the norm of the perturbation `like`: an ascent in a random direction."""
    noise = {
        name: torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        for name, tensor in like.items()
    }
    factor = _norm(like) / _norm(noise)
    return {name: tensor.mul_(factor) for name, tensor in noise.items()}


@contextmanager
def moved(module: nn.Module, by: Mapping[str, Tensor]) -> Iterator[None]:
    """The network at w + ε inside the context, and at w again afterwards, bit for bit.

    Normalisation layers do not update their running statistics meanwhile: those belong to w.
    """
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        before = {name: parameters[name].clone() for name in by}
        for name, step in by.items():
            parameters[name].add_(step)
    norms = [part for part in module.modules() if isinstance(part, _NormBase) and part.track_running_stats]
    statistics = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    try:
        yield
    finally:
        with torch.no_grad():
            for name, old in before.items():
                parameters[name].copy_(old)
            for norm, kept in zip(norms, statistics):
                for name, buffer in norm.named_buffers():
                    buffer.copy_(kept[name])


# ------------------------------------------------------------------------------------------------------ masks


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All numbers in a row, in the order of the names."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def top(magnitudes: Tensor, share: float) -> Tensor:
    """M_L: the ⌊share · d⌋ largest values, exactly as many; ties go to the first."""
    return _largest(magnitudes, int(share * len(magnitudes)))


def momentum(kept: Tensor | None, gradient: Tensor, alpha: float) -> Tensor:
    """Eq. 11 on magnitudes: G ← α G + (1 − α) |∇f|, from zero.

    The paper prints ∇f. A mean of signed gradients would be small for a parameter whose gradient changes its sign.
    """
    return (1 - alpha) * gradient.abs() if kept is None else torch.lerp(gradient.abs(), kept, alpha)


def disputed(masks: Mapping[SiteName, Tensor]) -> Tensor:
    """M_G (Eq. 12): parameters chosen by some but not all of the sites that answered; with one site, none."""
    first, *rest = masks.values()
    some, every = first.clone(), first.clone()
    for mask in rest:
        some |= mask
        every &= mask
    return some & ~every


def explored(local: Tensor, disputed: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """M_E (Eq. 13): min(⌊share · d⌋, |M_G ∖ M_L|) random parameters of M_G ∖ M_L."""
    candidates = (disputed & ~local).numpy(force=True)
    places = torch.from_numpy(np.flatnonzero(candidates))  # several times faster than torch's nonzero
    wanted = min(int(share * len(local)), len(places))
    found = torch.zeros_like(local)
    found[places[_largest(torch.rand(len(places), generator=generator), wanted)].to(local.device)] = True
    return found


def masked(tensors: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """The perturbation, set to zero outside the mask. It keeps its scale, so a sparse perturbation is shorter."""
    parts = torch.split(mask, [tensor.numel() for tensor in tensors.values()])
    return {name: tensor * part.view(tensor.shape) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}


def blank_mask(task: Task) -> Tensor:
    """A mask on the meta device, for a method's `blank`."""
    shape, names = task.shape(), task.parameters()
    return torch.empty(sum(shape[name].numel() for name in names), dtype=torch.bool, device="meta")


def _largest(values: Tensor, count: int) -> Tensor:
    """Uses numpy, whose selection is eight times faster on a CPU than torch's."""
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    numbers = values.numpy(force=True)
    least = np.partition(numbers, -count)[-count]
    chosen = numbers > least
    chosen[np.flatnonzero(numbers == least)[: count - np.count_nonzero(chosen)]] = True
    return torch.from_numpy(chosen).to(values.device)


def _norm(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum().sqrt()


def _is_bias(name: str) -> bool:
    """Whether a parameter is a shift (PyTorch's name `bias`); all others, also normalisation scales, multiply."""
    return name.rpartition(".")[2] == "bias"
