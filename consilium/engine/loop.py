"""The round loop; there is no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from consilium.engine.active import ActiveRun, Wire, opened, round3, say_hello
from consilium.engine.ending import finish
from consilium.engine.rounds import Event, collect, merged_state, send
from consilium.engine.scoring import score_if_due
from consilium.errors import UserError
from consilium.machine import threads_of_torch
from consilium.method import Phase
from consilium.privacy.past import EMPTY, History
from consilium.run_folder import RunFolder, disk_errors
from consilium.site import Round
from consilium.study import Study
from consilium.tracking import tracked
from consilium.weights import SiteName


def run(study: Study, wire: Wire, folder: RunFolder) -> Mapping[str, Any]:
    """Train a study to its end, from the current state of its run folder; returns the summary."""
    with folder.locked(), disk_errors(folder.path):
        try:
            with (
                threads_of_torch(1),  # averaging is limited by memory bandwidth, and the sites need the cores
                tracked(study.plan.track, folder.path, study.tables(), folder.warn) as show,
                folder.journal.shown_to(show),
            ):
                return _to_the_end(opened(study, wire, folder))
        except UserError:
            if not folder.begun:
                folder.remove()  # a rejected study leaves no folder
            raise
        finally:
            wire.close()


def _to_the_end(active: ActiveRun) -> Mapping[str, Any]:
    state = active.folder.states.resume(active.method)
    best = active.folder.states.best(active.method)
    server: Any = state.server if state else active.method.start(active.task, active.roster)
    merged: dict[SiteName, int] = dict(state.merged) if state else {}
    merged |= dict.fromkeys(active.roll.rejoined, -1)
    done = state.done if state else 0
    history = state.history if state else EMPTY
    ended = active.folder.states.last(active.method).merged if done > active.last_counting[1].index else {}
    say_hello(active, done)
    if state:
        _make_up(active, *active.line[done - 1], state.seconds)
        best = score_if_due(active, *active.line[done - 1], server, merged, best)
    clock = _Clock()
    write: Callable[[], Any] | None = None
    for phase, round in active.line[done:]:
        if phase.from_best and round.step == 0 and best is not None:
            server, merged = best.server, dict(best.merged)  # and the matching memories
        if write is None:
            clock.start()  # scoring is not part of a round
        try:
            sent = send(active, server, phase, round, merged, [best.merged if best else {}, ended])
        finally:
            if write is not None:
                server = write()  # the round before, while the sites train this one
        replies, history, events, forgot = collect(active, sent, server, phase, round, history)
        server, computed = merged_state(active, server, replies, phase, round)
        merged.update(dict.fromkeys(replies, round.index))
        merged.update(dict.fromkeys(forgot, -1))
        if (phase, round) == active.last_counting:
            ended = dict(merged)  # it is scored at the end, with the matching memories
        write = partial(_commit, active, clock, phase, round, server, dict(merged), history, events)
        if round.step + 1 == phase.rounds or round.scored or computed:
            server, write = write(), None
            best = score_if_due(active, phase, round, server, merged, best)
    return finish(active, server, merged, best)


def _commit(
    active: ActiveRun,
    clock: _Clock,
    phase: Phase,
    round: Round,
    server: Any,
    merged: Mapping[SiteName, int],
    history: History,
    events: Sequence[Event],
) -> Any:
    """Commit a round; returns the server's state as read from disk, so that the merged one's memory can be freed."""
    # log first: a repeated event counts once, but a missing one is lost
    active.folder.journal.notes(events, durable=True)
    last, seconds = (phase, round) == active.last_counting, clock.lap()
    server = active.folder.states.commit(round, server, merged, history, last, seconds)
    _tell_round(active, phase, round, seconds)
    return server


def _tell_round(active: ActiveRun, phase: Phase, round: Round, seconds: float) -> None:
    place = {"round": round.number, "phase": phase.name, "step": round.step + 1, "steps": round.total}
    active.folder.note("round", **place, seconds=seconds)


def _make_up(active: ActiveRun, phase: Phase, round: Round, seconds: float) -> None:
    """Log the last round if its state was written but the process died before the log entry."""
    told = {(event["round"], event["phase"]) for event in active.folder.events() if event["event"] == "round"}
    if (round.number, phase.name) not in told:
        _tell_round(active, phase, round, seconds)


class _Clock:
    """Seconds of a round, counted from the end of the one before, because rounds overlap."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._since = round3(now - self._since), now
        return seconds
