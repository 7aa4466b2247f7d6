"""When a run restarts as a new job to include a returned site: at once the first time, later with growing pauses.

A new job costs every site a new process. So a site that crashes repeatedly is away most of the time.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

STEADY = 5  # merged updates after a return until the next return counts as a first one
PAUSE = 30.0  # seconds after a return that did not last; doubled with every further one
MOST = 6  # doublings


def may_return(events: Iterable[Mapping[str, Any]], site: str, now: datetime.datetime) -> bool:
    """Whether the run should restart as a new job for this site.

    Args:
        events: the run's journal, oldest first.
        site: a site that has started again and waits.
        now: the time, with its zone.
    """
    returns, merged, rounds = 0, 0, 0
    last = now
    for event in events:
        if event["event"] == "going on" and site in event.get("sites", ()):
            returns = 1 if merged >= STEADY else returns + 1
            merged, rounds, last = 0, 0, datetime.datetime.fromisoformat(event["time"])
        elif event["event"] == "round":
            rounds += 1
        elif event["event"] == "train" and event["site"] == site:
            merged += 1
    if not returns or merged >= STEADY:
        return True
    doublings = min(returns, MOST)
    pause = PAUSE * float(2 ** (doublings - 1))
    return rounds >= 2**doublings and (now - last).total_seconds() >= pause
