"""What a study will send: counted on messages without values, so nothing is trained and no data are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consilium.engine.rounds import flattened
from consilium.errors import StudyError
from consilium.method import Maybe
from consilium.site import Roster, SiteCard
from consilium.study import Study
from consilium.timeline import timeline
from consilium.tree import Packet, flatten, unflatten
from consilium.weights import Weights
from consilium.wires import held
from consilium.wires.flare import PART


@dataclass(frozen=True)
class Exchange:
    """One round at one site."""

    phase: str
    counts: bool
    down: int
    up: int
    spool: int  # of all sites, at the server: orders that differ, and replies


@dataclass(frozen=True)
class Forecast:
    """Bytes by round of one site, and of one release when scores are taken."""

    exchanges: tuple[Exchange, ...]
    release: int
    scorings: int
    sites: int
    state: int  # of the server, after the last round

    @property
    def down(self) -> int:
        return sum(exchange.down for exchange in self.exchanges)

    @property
    def up(self) -> int:
        return sum(exchange.up for exchange in self.exchanges)

    def lines(self, mbit: float) -> Iterator[str]:
        """A few lines to read; `mbit` is the speed of one site's link."""
        alike: dict[tuple[str, str, str], list[int]] = {}  # rounds that read the same
        for e in self.exchanges:
            alike.setdefault((e.phase, size_text(e.down), size_text(e.up)), []).append(e.down + e.up)
        for (phase, down, up), totals in alike.items():
            count, seconds = len(totals), max(totals) * 8 / (mbit * 1e6)
            yield (
                f"{phase}: {count} round{'s' if count > 1 else ''}, per round and site {down} down, {up} up; "
                f"{seconds:.1f} s at {mbit:g} Mbit/s"
            )
        largest = max((exchange.down + exchange.up for exchange in self.exchanges), default=0)
        message = max((max(exchange.down, exchange.up) for exchange in self.exchanges), default=0)
        spool = max((exchange.spool for exchange in self.exchanges), default=0)
        flying = self.sites * min(message, PART)
        yield f"memory for messages at a site: at most {size_text(largest)}"
        yield (
            f"at the server: at most {size_text(spool)} of messages, in files of its run folder (spool); in memory the "
            f"parts under way, {size_text(flying)} if all sites send at once, a few times over while the engine copies "
            f"them; its state is {size_text(self.state)}, in files too, of which a merge holds a few models in memory"
        )
        scoring = self.release * self.scorings
        yield f"scores: {self.scorings} times a release of {size_text(self.release)} down per site"
        total = self.down + self.up + scoring
        minutes = total * 8 / (mbit * 1e6) / 60
        yield (
            f"in all, per site: {size_text(self.down + scoring)} down, {size_text(self.up)} up, "
            f"{f'{minutes:.1f} min' if minutes < 100 else f'{minutes / 60:.1f} h'} at {mbit:g} Mbit/s; "
            f"the server carries {self.sites} times as much"
        )


def forecast_study(study: Study, sites: int | None = None, known: Sequence[str] = ()) -> Forecast:
    """Bytes as the journal counts them, for a site that is there in every round.

    Args:
        study: with `[facts]` where its data are not at hand.
        sites: how many; by default those the study names, those of its federation's folder, or `known`.
        known: the sites of a consortium, by name.

    The server is taken through the first and the last round of every phase, with replies of nothing but ones: then
    it has what it sends only once, and knows who got it.
    """
    roster = roster_of(study, sites, known)
    card = next(iter(roster.values()))
    method, task = study.method, study.task
    halved = study.plan.transport != "exact"

    def travelling(packet: Packet) -> int:
        """As the journal counts it; what is saved by packing is not known before."""
        floats = sum(tensor.nbytes for tensor in packet.tensors.values() if tensor.dtype == torch.float32)
        return packet.nbytes() - halved * floats // 2

    server = method.start(task, roster)
    exchanges = []
    spool = 0
    scorings = 2  # the best state and the last, in full
    for phase, round in timeline(method, study.plan.rounds, study.plan.score_every):
        order = method.send(server, card, round)
        up = 0
        if order is not None:
            up = travelling(flatten(_usual(method.blank(task, roster, card, round), order)))
        down = travelling(flatten(order)) if order is not None else 0
        if round.step == 0 or round.step + 1 == phase.rounds:
            orders = {other: method.send(server, roster[other], round) for other in roster}
            different, _ = held.shared(flattened(orders))
            distinct = {id(packet): packet for packet in different.values()}.values()
            spool = sum(map(travelling, distinct))
            spool += study.plan.compress * sum(
                packet.nbytes() for packet in distinct
            )  # whole: messages are changes of it
            spool += up * len(different)
            replies = {
                other: _ones(_usual(method.blank(task, roster, roster[other], round), got))
                for other, got in orders.items()
                if got is not None
            }
            merged = flatten(_weightless(method.merge(server, replies, round)))
            server = unflatten(merged, method.Server)  # as it is read from its file: what sites sent is whole
        exchanges.append(Exchange(phase.name, phase.counts, down, up, spool))
        scorings += int(round.scored)
    release = travelling(flatten(method.release(server, card)))
    return Forecast(tuple(exchanges), release, scorings, len(roster), flatten(server).nbytes())


def _usual(blank: Any, order: Any) -> Any:
    """A reply as a site makes it that lacks nothing."""
    sent = {
        name: None if part.once and not order.wanted else part.like
        for name, part in vars(blank).items()
        if isinstance(part, Maybe)
    }
    return _with_digits(dataclasses.replace(blank, **sent))


def _with_digits(part: Any) -> Any:
    """A message whose numbers have all their digits, as measured ones have."""
    if dataclasses.is_dataclass(part) and not isinstance(part, type) and not isinstance(part, Weights):
        return dataclasses.replace(part, **{name: _with_digits(value) for name, value in vars(part).items()})
    if isinstance(part, tuple):
        return tuple(map(_with_digits, part))
    return 1 / 3 if isinstance(part, float) else part


def _ones(part: Any) -> Any:
    """A message without values, with ones in it that take no memory."""
    return _filled(part, lambda value: 1 if isinstance(value, int) and not isinstance(value, bool) else value)


def _weightless(part: Any) -> Any:
    """The same message with tensors of ones that take no memory: a server's models are large together."""
    return _filled(part, lambda value: value)


def _filled(part: Any, plain: Callable[[Any], Any]) -> Any:
    """A message with ones in its tensors, and what `plain` makes of its numbers and texts."""
    if isinstance(part, Weights):
        return Weights.over({name: _filled(tensor, plain) for name, tensor in part.like.items()})
    if isinstance(part, Tensor):
        return torch.ones((), dtype=part.dtype).expand(part.shape)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return dataclasses.replace(part, **{name: _filled(value, plain) for name, value in vars(part).items()})
    if isinstance(part, Mapping):
        return {key: _filled(value, plain) for key, value in part.items()}
    if isinstance(part, tuple):
        return tuple(_filled(value, plain) for value in part)
    return plain(part)


def roster_of(study: Study, sites: int | None = None, known: Sequence[str] = ()) -> Roster:
    """The sites of a study by name, or so many of them, with made-up numbers of cases."""
    names = tuple(study.plan.sites) or _names(study, sites, known)
    return {name: SiteCard(name, i, 100, study.facts.labels) for i, name in enumerate(sorted(names))}


def _names(study: Study, sites: int | None, known: Sequence[str]) -> tuple[str, ...]:
    if sites is not None:
        return tuple(f"site{i}" for i in range(sites))
    here = bool(study.data.federation) and Path(study.data.federation).is_dir()
    names = study.federation().sites if here else known
    members = tuple(name for name in names if name not in study.plan.leave_out)
    if not members:
        raise StudyError(
            "the study names no sites, and neither a folder of them nor an admin kit is here; say how many with "
            "--sites, or name the kit with --kit."
        )
    return members


def size_text(count: int) -> str:
    if count < 100:
        return f"{count} B"
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
