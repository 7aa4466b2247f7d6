"""A network whose parameters are a mixture of several models: one forward and one backward pass give both gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from consilium.learning.loss_scaling import gradients_of
from consilium.weights import Weights


class Mixture:
    """w = Σ_j p_j w_j; one w_i (the core) and p are trained.

    The models are the rows of one matrix W (models, parameters). The mixture is pᵀ W and the gradient of p is W g; each
    reads the matrix once. Parameters are mixed, not outputs, so any network works. The statistics of normalisation
    layers are those of the mixture's own passes: p may be negative and sum to anything, so a mixture of variances need
    not be a variance.
    """

    def __init__(self, module: nn.Module, models: Sequence[Mapping[str, Tensor]], own: int, p: Sequence[float]) -> None:
        first = next(module.parameters())
        self.module, self.own = module, own
        length = sum(parameter.numel() for parameter in module.parameters())
        self._matrix = torch.empty(len(models), length, dtype=first.dtype, device=first.device)
        for row, model in zip(self._matrix, models, strict=True):
            for name, part in self._parts(row).items():
                part.copy_(model[name])
        self.core = nn.Parameter(self._matrix[own])  # not a copy: a step of the core changes its row
        self.p = nn.Parameter(torch.tensor(p, dtype=first.dtype, device=first.device))
        mixed, self._slope = torch.empty_like(self.core.data), torch.empty_like(self.core.data)
        self._mixed = mixed
        self._leaves = {name: part.requires_grad_() for name, part in self._parts(mixed).items()}
        self._slopes = list(self._parts(self._slope).values())

    def __call__(self, images: Tensor) -> Tensor:
        """The network's output at the current mixture."""
        return functional_call(self.module, dict(self.parameters()), (images,))  # type: ignore[no-any-return]

    def parameters(self) -> Mapping[str, Tensor]:
        """The current mixture, by the network's names."""
        with torch.no_grad():
            torch.mv(self._matrix.t(), self.p, out=self._mixed)
        return self._leaves

    def backward(self, loss: Tensor, clip: float = 0.0, precision: str = "float32") -> None:
        """Set the gradients of `core` and `p`; with `clip`, the mixture's gradient is clipped to this norm first."""
        self.take(gradients_of(loss, list(self._leaves.values()), precision), clip)

    def take(self, grads: Sequence[Tensor], clip: float = 0.0) -> None:
        """The same from a known gradient of the mixture, one tensor per parameter."""
        with torch.no_grad():
            torch._foreach_copy_(self._slopes, list(grads))
            if clip:
                self._slope.mul_(min(1.0, clip / (self._slope.norm().item() + 1e-6)))
            self.p.grad = torch.mv(self._matrix, self._slope)  # ∂F/∂p_j = ⟨g, w_j⟩
            self.core.grad = self._slope.mul_(self.p[self.own])  # ∂F/∂w_i = p_i g

    def core_weights(self) -> Weights:
        return Weights(self._parts(self.core))

    def _parts(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters as views of a vector, each in the memory layout it has in the network."""
        parts, start = {}, vector.storage_offset()
        for name, parameter in self.module.named_parameters():
            parts[name] = vector.detach().as_strided(parameter.shape, parameter.stride(), start)
            start += parameter.numel()
        return parts
