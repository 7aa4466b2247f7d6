"""What the firewall remembers of accepted updates. It only grows: a round adds its entries, in memory and on disk.

The rules need the whole past: an update is held against every earlier one of its site. What grows with the rounds is
one product of a matrix of sketches with a vector, 1 KB per earlier update; the exact comparison is made only with the
few that are near. Nothing is copied from round to round.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from consilium.files import append_lines
from consilium.privacy.measuring import WIDTH, units
from consilium.tree import message

NEAR = 1e-4  # what float32 may add to a cosine, with a wide margin


class AcceptedUpdate(NamedTuple):
    """One accepted update of one site to one part."""

    key: str  # phase/site/part
    length: float  # its logarithm
    turn: float | None  # the cosine with the direction before; None: it is the first
    shift: float
    sketch: Tensor  # (WIDTH,) float32
    seal: str


class Sketches:
    """A growing matrix of sketches. A longer one shares the rows of the one it was made from."""

    def __init__(self, rows: _Rows | None = None, count: int = 0) -> None:
        self._rows, self._count = rows or _Rows(), count

    def __len__(self) -> int:
        return self._count

    def plus(self, sketch: Tensor) -> Sketches:
        return Sketches(self._rows.appended(self._count, sketch), self._count + 1)

    def latest(self, count: int) -> Tensor:
        return self._rows.sketches[max(0, self._count - count) : self._count]

    def has_within(self, sketch: Tensor, distance: float) -> bool:
        """Whether a row is at most so far from a sketch."""
        apart = distance / max(sketch.double().norm().item(), 1e-300)
        least = math.sqrt(1 - apart**2) - NEAR if apart < 1 else -1.0  # the smallest cosine at that distance
        near = self._rows.sketches[: self._count][self._about(sketch) >= least]
        return bool(((near.double() - sketch.double()).square().sum(1).sqrt() <= distance).any())

    def _about(self, sketch: Tensor) -> Tensor:
        """The cosines up to float32's rounding; all 1, so that all are looked at, where one is not finite."""
        about = self._rows.units[: self._count] @ units(sketch[None])[0].float()
        return about if bool(about.isfinite().all()) else torch.ones_like(about)


class _Rows:
    """Rows shared by matrices of different lengths; whoever appends to other than the longest gets a copy."""

    def __init__(self, room: int = 8) -> None:
        self.sketches, self.units = torch.zeros(room, WIDTH), torch.zeros(room, WIDTH)
        self.used = 0

    def appended(self, count: int, sketch: Tensor) -> _Rows:
        rows = self
        if count < self.used or count == len(self.sketches):
            rows = _Rows(max(8, 2 * count))
            rows.sketches[:count], rows.units[:count] = self.sketches[:count], self.units[:count]
        rows.sketches[count] = sketch
        rows.units[count] = units(sketch[None])[0].float()
        rows.used = count + 1
        return rows


@dataclass(frozen=True)
class Trace:
    """The accepted updates of one site to one part, in one phase."""

    lengths: tuple[float, ...] = ()  # logarithms
    turns: tuple[float, ...] = ()  # cosines with the direction before
    shifts: tuple[float, ...] = ()
    sketches: Sketches = field(default_factory=Sketches)
    seals: tuple[str, ...] = ()

    def plus(self, entry: AcceptedUpdate) -> Trace:
        return Trace(
            (*self.lengths, entry.length),
            self.turns if entry.turn is None else (*self.turns, entry.turn),
            (*self.shifts, entry.shift),
            self.sketches.plus(entry.sketch),
            (*self.seals, entry.seal),
        )


@dataclass(frozen=True)
class History:
    """Everyone's past: saved as rounds are committed, so that a resumed run decides alike."""

    traces: Mapping[str, Trace] = field(default_factory=dict)  # by phase/site/part
    count: int = 0  # of entries
    latest: tuple[
        Sequence[AcceptedUpdate], ...
    ] = ()  # of the last two rounds: the last but one may be being saved only now

    def of(self, phase: str, site: str, part: str) -> Trace:
        return self.traces.get(f"{phase}/{site}/{part}", Trace())

    def with_entries(self, entries: Sequence[AcceptedUpdate]) -> History:
        """The history of one round more."""
        traces = dict(self.traces)
        for entry in entries:
            traces[entry.key] = traces.get(entry.key, Trace()).plus(entry)
        return History(traces, self.count + len(entries), (*self.latest[-1:], tuple(entries)))

    def since(self, count: int) -> list[AcceptedUpdate]:
        """The entries after the first `count`."""
        latest = [entry for entries in self.latest for entry in entries]
        assert self.count - len(latest) <= count <= self.count
        return latest[len(latest) - (self.count - count) :]


EMPTY = History()


# ---------------------------------------------------------------------------------------------- on disk


def append_entries(entries: Iterable[AcceptedUpdate], path: Path, size: int) -> int:
    """Write entries after the first `size` bytes of a file; returns its new size. They are on the disk then."""
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)  # of rounds that were not committed
    text = "".join(_line(entry) for entry in entries)
    if text:
        append_lines(text, path, durable=True)
    return path.stat().st_size if path.exists() else 0


def read_entries(path: Path, size: int) -> tuple[History, int]:
    """The history in the first `size` bytes of a file, and how many of its lines are damaged and left out."""
    text = path.read_bytes()[:size] if path.exists() else b""
    entries = [_entry(line) for line in text.split(b"\n")[:-1]]
    sound = [entry for entry in entries if entry is not None]
    lost = len(entries) - len(sound) + (len(text) < size)
    return History(EMPTY.with_entries(sound).traces, len(sound)), lost


def _line(entry: AcceptedUpdate) -> str:
    sketch = base64.b64encode(entry.sketch.numpy().astype("<f4").tobytes()).decode()
    text = json.dumps([*entry[:4], sketch, entry.seal])
    return f"{_sum(text.encode())} {text}\n"


def _entry(line: bytes) -> AcceptedUpdate | None:
    digest, _, text = line.partition(b" ")
    if digest != _sum(text).encode():
        return None
    key, length, turn, shift, *_, sketch, seal = json.loads(text)  # until 0.2 a likeness came before the sketch
    values = torch.from_numpy(np.frombuffer(base64.b64decode(sketch), "<f4").astype(np.float32))
    return AcceptedUpdate(key, length, turn, shift, values, seal)


def _sum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- version 0.1


@message
class _OldTrace:
    lengths: tuple[float, ...]
    turns: tuple[float, ...]
    shifts: tuple[float, ...]
    likenesses: tuple[float, ...]
    sketches: Tensor  # (updates, WIDTH)
    seals: tuple[str, ...]


@message
class OldHistory:
    """The whole history, as version 0.1 saved it with every state."""

    traces: Mapping[str, _OldTrace]

    def renewed(self) -> History:
        """The same history; all of it is to be saved."""
        entries = [
            AcceptedUpdate(key, length, (None, *old.turns)[i], old.shifts[i], sketch, old.seals[i])
            for key, old in self.traces.items()
            for i, (length, sketch) in enumerate(zip(old.lengths, old.sketches))
        ]
        return EMPTY.with_entries(entries)


OldHistory.__qualname__ = "History"  # in its files
