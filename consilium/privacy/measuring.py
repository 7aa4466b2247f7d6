"""A reply's updates in a few numbers each: length, constant part, direction. What the firewall judges by.

Directions are kept as sketches: every value of an update, with a fixed random sign, is added to one of 256 sums. Inner
products of sketches are those of the updates up to about 1/16 of their lengths, so that a server can compare sites and
rounds without keeping anyone's model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilium import tree
from consilium.randomness import derive, numpy_generator
from consilium.weights import Weights

WIDTH = 256  # sums of a sketch
PIECE = 1 << 16  # values taken at a time, so that a large tensor needs no second one; a multiple of WIDTH


@dataclass(frozen=True)
class Update:
    """What a site did to one named part of its reply."""

    length: float  # Euclidean
    shift: float  # the constant's share of the length, from 0 to 1
    sketch: Tensor  # (WIDTH,) float32
    seal: str  # the same for parts that were sent the same: their squared length, to the last bit
    blur: float  # what rounding to float32 can do to the length
    started: bool = False  # the site began from weights that are known here; False: the part is itself a change

    @property
    def size(self) -> float:
        """The Euclidean length of what was sent."""
        return self.blur * 2.0**23


def updates_of(uplink: Any, start: Mapping[str, Weights]) -> dict[str, Update]:
    """Every model and tensor of a reply, by path, against what it was before the site trained; none that stayed.

    Whole numbers and masks are no updates: no rule fits them.
    """
    _, weights, tensors = tree.split(uplink)
    parts = weights | {path: Weights.over({"": tensor}) for path, tensor in tensors.items()}
    found = {path: _update(part, start.get(path)) for path, part in parts.items()}
    return {path: update for path, update in found.items() if update.length > 0}


def _update(part: Weights, start: Weights | None) -> Update:
    squares, total, size, count = 0.0, 0.0, 0.0, 0
    sketch = torch.zeros(WIDTH, dtype=torch.float64)
    for number, (sent, moved) in enumerate(_pieces(part, start)):
        squares += moved.dot(moved).item()
        size += sent.dot(sent).item()
        total += moved.sum().item()
        sketch += _summed(moved, number)
        count += sent.numel()
    length = math.sqrt(squares)
    shift = abs(total) / (math.sqrt(count) * length) if length else 0.0
    blur = math.sqrt(size) * 2.0**-23
    return Update(length, min(1.0, shift), sketch.float(), size.hex(), blur, start is not None)


def _pieces(part: Weights, start: Weights | None) -> Iterator[tuple[Tensor, Tensor]]:
    """What was sent and how it moved, in rows of at most `PIECE` values: small tensors are taken together."""
    rows: list[tuple[Tensor, Tensor | None]] = []
    held = 0
    for name, tensor in part.items():
        if not tensor.is_floating_point():
            continue  # counters, which nobody averages, and masks, whose length is the share of weights they choose
        after = tensor.reshape(-1)
        before = start[name].reshape(-1) if start is not None and name in start else None
        whole = after.numel()
        for first in range(0, whole, PIECE):
            many, all_of_it = min(PIECE, whole - first), whole <= PIECE
            if held + many > PIECE:
                yield _joined(rows)
                rows, held = [], 0
            place = slice(first, first + many)
            rows.append((after, before) if all_of_it else (after[place], None if before is None else before[place]))
            held += many
    if rows:
        yield _joined(rows)


def _joined(rows: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    sent = torch.cat([after for after, _ in rows]).double()
    if all(before is None for _, before in rows):
        return sent, sent
    start = torch.cat([torch.zeros_like(after) if before is None else before for after, before in rows])
    return sent, sent - start.double()


def _summed(piece: Tensor, number: int) -> Tensor:
    """A piece's share of the sketch; where its sums begin depends on its place, so that no two pieces add alike."""
    signed = piece * _signs()[: piece.numel()]
    rows = torch.nn.functional.pad(signed, (0, -piece.numel() % WIDTH)).view(-1, WIDTH)
    return rows.sum(0).roll(derive(0, "sketch", number) % WIDTH)


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    return torch.from_numpy(numpy_generator(0, "sketch").choice(np.array([-1.0, 1.0]), PIECE))


def cosines(sketches: Tensor, other: Tensor) -> list[float]:
    """Of every sketch (a row) with the other, from −1 to 1; 0 if one is nothing."""
    found: list[float] = (units(sketches) * units(other[None])).sum(1).clamp(-1, 1).tolist()
    return found


def sum_of_units(sketches: Tensor) -> Tensor:
    """The sketches' common direction, each counting alike."""
    return units(sketches).sum(0)


def units(sketches: Tensor) -> Tensor:
    rows = sketches.double()
    return rows / rows.square().sum(1, keepdim=True).sqrt().clamp_min(1e-300)
