"""Weights of models: an immutable state_dict with arithmetic."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

SiteName = str
SMALL = 1 << 18  # bytes; below, gathering tensors costs less than handling each
HELD = 1 << 26  # bytes of new models that a server holds in memory; beyond, they are computed when they are read


class Weights(Mapping[str, Tensor]):
    """The weights of a model: named tensors that never change, with arithmetic.

    `x + y`, `x - y`, `0.5 * x` and `x / 2` act on each floating-point tensor; integer buffers are those of the left
    operand. The constructor copies its tensors to the CPU.

    Args:
        tensors: name → tensor, for instance `network.state_dict()`.

    >>> import torch
    >>> from consilium import Weights
    >>> x = Weights({"a": torch.tensor([1.0, 2.0])})
    >>> (0.5 * x + x)["a"].tolist()
    [1.5, 3.0]
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors: Mapping[str, Tensor] = {
            name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }

    @classmethod
    def over(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Take tensors that nobody else writes to, or a mapping that reads them from a file, without a copy."""
        weights = cls.__new__(cls)
        weights._tensors = tensors
        return weights

    @property
    def computed(self) -> bool:
        """Its tensors are computed whenever they are read: write it to a file before it is read often."""
        return isinstance(self._tensors, Computed)

    @property
    def like(self) -> Mapping[str, Tensor]:
        """Tensors of the same names, types and shapes, for those who need no values."""
        return self._tensors.like if isinstance(self._tensors, Computed) else self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @torch.no_grad()
    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights into a network's own tensors; faster than `load_state_dict`, which walks its modules."""
        if self.keys() != tensors.keys():
            raise ValueError(f"weights of another network: {sorted(self.keys() ^ tensors.keys())[:3]}")
        for name, tensor in tensors.items():
            given = self[name]
            if given.shape != tensor.shape:
                raise ValueError(f"'{name}' is {tuple(given.shape)}, where the network has {tuple(tensor.shape)}")
            tensor.copy_(given)

    def forget(self, name: str) -> None:
        """Free the memory of a large tensor that can be read from its file again."""
        if forget := getattr(self._tensors, "forget", None):
            forget(name)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Weights({len(self)} tensors, {self.numel():,} numbers)"

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """Change every floating tensor."""
        return Weights.over({k: change(t) if t.is_floating_point() else t for k, t in self.items()})

    def _zip(self, other: Weights, combine: Callable[[Tensor, Tensor], Tensor]) -> Weights:
        if self.keys() != other.keys():
            raise ValueError(f"weights of different networks: {sorted(self.keys() ^ other.keys())[:3]} in one only")
        return Weights.over({k: combine(t, other[k]) if t.is_floating_point() else t for k, t in self.items()})

    def __add__(self, other: Weights) -> Weights:
        return self._zip(other, torch.add)

    def __sub__(self, other: Weights) -> Weights:
        return self._zip(other, torch.sub)

    def __mul__(self, factor: float) -> Weights:
        return self.map(lambda tensor: tensor * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Weights:
        return self.map(lambda tensor: tensor / divisor)

    def zeros(self) -> Weights:
        return self.map(torch.zeros_like)

    def dot(self, other: Weights) -> float:
        """The inner product over floating tensors, summed in double precision in name order."""
        pairs = ((t, other[k]) for k, t in self.items() if t.is_floating_point())
        return math.fsum((a.double() * b.double()).sum().item() for a, b in pairs)

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.values())

    def split(self, where: Callable[[str], bool]) -> tuple[Weights, Weights]:
        """Those whose name satisfies `where`, and the rest."""
        chosen = {name for name in self if where(name)}
        return (
            Weights.over({k: t for k, t in self.items() if k in chosen}),
            Weights.over({k: t for k, t in self.items() if k not in chosen}),
        )

    @cached_property
    def digest(self) -> str:
        """A hash of names, types, shapes and values: equal weights have equal digests."""
        hasher = hashlib.sha256()
        for name, tensor in self.items():
            hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return hasher.hexdigest()[:32]


class Computed(Mapping[str, Tensor]):
    """Tensors that are computed whenever they are read and kept nowhere."""

    def __init__(self, like: Mapping[str, Tensor], compute: Callable[[str], Tensor]) -> None:
        self.like, self._compute = like, compute  # `like` has the same names, types and shapes

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:
        return name in self.like

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def sum_of_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape; large ones are added one by one, so that memory holds the sum only."""
    if sum(tensor.nbytes for tensor in tensors) <= HELD:
        return torch.stack(list(tensors)).sum(0)
    added = tensors[0].clone()
    for tensor in tensors[1:]:
        added.add_(tensor)
    return added


def join(*parts: Weights) -> Weights:
    """One model from parts with disjoint names."""
    joined: dict[str, Tensor] = {}
    for part in parts:
        both = joined.keys() & part.keys()
        if both:
            raise ValueError(f"parts share the names {sorted(both)[:3]}")
        joined.update(part.items())
    return Weights.over(joined)


def normalised(shares: Mapping[SiteName, float]) -> dict[SiteName, float]:
    """Shares that sum to one."""
    total = math.fsum(shares.values())
    if not total > 0:
        raise ValueError(f"shares must have a positive sum, not {total}")
    return {name: share / total for name, share in shares.items()}


def mean(weights: Mapping[SiteName, Weights], shares: Mapping[SiteName, float]) -> Weights:
    """The average by shares (normalised over the given weights), tensor by tensor in site-name order.

    The order makes the result independent of the order of answers. One tensor is read at a time, so that memory holds
    the result and one tensor if the weights are in files.
    """
    names = sorted(weights)
    part = normalised({name: shares[name] for name in names})
    models = [(part[name], weights[name]) for name in names]
    first = models[0][1]
    averaged: dict[str, Tensor] = {}
    for key, tensor in first.items():
        if not tensor.is_floating_point():
            averaged[key] = tensor.clone()
            continue
        total = tensor * models[0][0]
        for share, model in models[1:]:
            total.add_(model[key], alpha=share)
        if total.nbytes >= SMALL:
            for _, model in models:
                model.forget(key)
        averaged[key] = total
    return Weights.over(averaged)
