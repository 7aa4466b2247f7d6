"""Gradients per patient: the mean over a patient's cases, clipped to one length, then summed over patients.

The network runs on all cases of a batch at once. The loss of a patient uses that patient's outputs alone. Its gradient
with respect to each output goes back through the network for each case, vectorised by `torch.func.vmap`. Opacus's
modes (hooks, functorch, expanded weights, ghost clipping) are slower or do not support these networks: see
`python -m benchmarks dp`. A network with dropout, or one that vmap does not support, runs for each patient separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.networks.plain_unet import Supervised

LossOf = Callable[[Any, Batch], Tensor]  # of an output and the cases it is of: a mean over them


@dataclass(frozen=True)
class ClippedSum:
    """The sum over the drawn patients."""

    gradient: Tensor  # (parameters,): the sum of the patients' gradients, each clipped
    loss: float  # summed over cases
    cases: int


class PatientGradients:
    """Computes the clipped gradients of patients at any parameters of a network."""

    def __init__(self, module: nn.Module) -> None:
        refuse_mixing(module)
        self.module = module
        self.vectorised = not any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())

    def summed(
        self, parameters: Mapping[str, Tensor], batches: Iterable[Batch], loss: LossOf, clip: float
    ) -> ClippedSum:
        """The sum over patients; the cases of one patient may fill several consecutive batches.

        A patient's gradient is that of the mean loss over all drawn cases of the patient.
        """
        values = {name: tensor.detach() for name, tensor in parameters.items()}
        total = torch.zeros(sum(t.numel() for t in values.values()), device=next(iter(values.values())).device)
        owner, own, count, lost, cases = -1, torch.zeros_like(total), 0, 0.0, 0
        for batch in batches:
            rows, found = self._by_part(values, batch, loss)
            for (patient, part), gradient, value in zip(rows, *found):
                if patient != owner:
                    total += _clipped(own, count, clip)
                    owner, own, count = patient, torch.zeros_like(total), 0
                size = part.stop - part.start
                own = own + size * gradient
                count, lost, cases = count + size, lost + size * float(value), cases + size
        return ClippedSum(total + _clipped(own, count, clip), lost, cases)

    def _by_part(
        self, values: Mapping[str, Tensor], batch: Batch, loss: LossOf
    ) -> tuple[list[tuple[int, slice]], tuple[Tensor, list[Tensor]]]:
        """The patients of the rows, and the gradient and the loss of each patient."""
        rows = list(_rows(batch))
        if self.vectorised:
            try:
                return rows, self._vectorised(values, batch, loss, rows)
            except RuntimeError:  # the network has an operation that vmap does not support
                self.vectorised = False
        return rows, self._one_by_one(values, batch, loss, rows)

    def _vectorised(
        self, values: Mapping[str, Tensor], batch: Batch, loss: LossOf, rows: list[tuple[int, slice]]
    ) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad():
            output = functional_call(self.module, dict(values), (batch.images,))
        leaf = _mapped(lambda t: t.detach().requires_grad_(), output)
        losses = [loss(_mapped(lambda t, part=part: t[part], leaf), batch.part(part)) for _, part in rows]  # type: ignore[misc]
        leaves = _tensors(leaf)
        slopes = torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True)
        pulls = [torch.zeros_like(t) if s is None else s for t, s in zip(leaves, slopes)]

        def of_case(image: Tensor, *pull: Tensor) -> Any:
            def run(at: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
                return tuple(_tensors(functional_call(self.module, dict(at), (image[None],))))

            back = vjp(run, dict(values))[1]
            return back(tuple(p[None] for p in pull))[0]

        each = vmap(of_case)(batch.images, *pulls)
        flat = torch.cat([each[name].flatten(1) for name in values], dim=1)
        if len(rows) < len(flat):
            owners = torch.tensor([i for i, (_, part) in enumerate(rows) for _ in range(part.start, part.stop)])
            flat = flat.new_zeros(len(rows), flat.shape[1]).index_add_(0, owners.to(flat.device), flat)
        return flat, [value.detach() for value in losses]

    def _one_by_one(
        self, values: Mapping[str, Tensor], batch: Batch, loss: LossOf, rows: list[tuple[int, slice]]
    ) -> tuple[Tensor, list[Tensor]]:
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        gradients, losses = [], []
        for _, part in rows:
            own = batch.part(part)
            value = loss(functional_call(self.module, leaves, (own.images,)), own)
            slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            gradients.append(
                torch.cat(
                    [(torch.zeros_like(t) if s is None else s).flatten() for t, s in zip(leaves.values(), slopes)]
                )
            )
            losses.append(value.detach())
        return torch.stack(gradients), losses


def refuse_mixing(module: nn.Module) -> None:
    """Reject a network in which one patient's images change the outputs of another's (StudyError)."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            raise StudyError(
                f"[privacy] unit = 'patient' cannot train a network with batch normalisation ('{name}'), which mixes "
                "patients; use [task] norm = 'instance' or 'group'."
            )
        if getattr(part, "track_running_stats", False):
            raise StudyError(
                f"[privacy] unit = 'patient' cannot train a network that keeps statistics of images ('{name}'), which "
                "no noise covers; build that layer with track_running_stats = False."
            )


def _rows(batch: Batch) -> Iterator[tuple[int, slice]]:
    """The patients of a batch, with the rows of each."""
    assert batch.patients is not None
    start = 0
    for patient, group in groupby(batch.patients):
        stop = start + len(list(group))
        yield patient, slice(start, stop)
        start = stop


def _clipped(total: Tensor, count: int, clip: float) -> Tensor:
    """The mean gradient of a patient's cases, clipped to a length; zero if it is not finite."""
    if not count:
        return total
    mean = total / count
    length = mean.norm().item()
    if not length < float("inf"):
        return torch.zeros_like(mean)  # clipping cannot bound a value that is not finite
    return mean * min(1.0, clip / length) if length else mean


def _mapped(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """The same output with every tensor of it changed."""
    if isinstance(output, Supervised):
        return Supervised(change(output.main), tuple((weight, change(aside)) for weight, aside in output.asides))
    return tree_map(change, output)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Supervised):
        return [output.main, *(aside for _, aside in output.asides)]
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
