"""Repairs a site's damaged memory: the site repeats the round that made it, if the state before it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from consilium.engine.active import ActiveRun
from consilium.errors import RunError
from consilium.messages import Envelope, Reply
from consilium.timeline import called
from consilium.tree import flatten
from consilium.weights import SiteName


def trained_again(active: ActiveRun, name: SiteName, server: Any, head: Envelope) -> Reply | None:
    """The reply of a site after its damaged memory was repaired; None if that was not possible."""
    if not memory_made_again(active, name, head.merged.get(name, -1)):
        return None
    order = active.method.send(server, active.roster[name], head.round)
    return dict(active.wire.train({name: flatten(order)}, head)).get(name)


def memory_made_again(active: ActiveRun, name: SiteName, index: int) -> bool:
    """Repeat at one site the round that made its memory, if the state before it is kept; the update is dropped.

    Not in a private study: two different updates with the same noise would reveal what the noise hides.
    """
    before = _state_before(active, index) if index >= 0 and not active.study.privacy.on else None
    if before is None:
        return False
    server, merged = before
    phase, round = active.line[index]
    order = active.method.send(server, active.roster[name], round)
    if order is None:
        return False
    best = active.folder.states.best(active.method)
    wanted = {name: [best.merged[name]] if best and name in best.merged else []}
    head = Envelope(active.folder.path.name, active.study.method_name, round, merged, wanted)
    reply = dict(active.wire.train({name: flatten(order)}, head)).get(name)
    if reply is None or reply.packet is None:
        return False
    where = called(phase, round)
    active.folder.note(
        "warning", text=f"the memory of {name} was damaged; {where} was repeated there to make it again."
    )
    return True


def _state_before(active: ActiveRun, index: int) -> tuple[Any, Mapping[SiteName, int]] | None:
    """The server's state at the start of a round, and the rounds merged from each site; None if it is not kept."""
    phase, round = active.line[index]
    if phase.from_best and round.step == 0:
        best = active.folder.states.best(active.method)
        return None if best is None else (best.server, best.merged)
    if index == 0:
        return active.method.start(active.task, active.roster), {}
    return active.folder.states.server_after(index - 1, active.method)


def stop_without_memory(active: ActiveRun, reply: Reply) -> None:
    """Stop a simulation whose memory cannot be repaired, so that a person can restore it; a federation continues."""
    if reply.error == "memory" and not (active.wire.closes_early or active.study.plan.rejoin):
        raise RunError(reply.lost)
