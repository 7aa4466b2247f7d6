"""How long one piece of work may take: looked at before every batch, wherever it is in a method's loop."""

from __future__ import annotations

import time


class OverTime(Exception):
    """A piece of work took longer than it may."""


class Stopwatch:
    """Measures one piece of work after the other against the same number of seconds; 0: no limit."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._start = time.monotonic()

    def start(self) -> None:
        self._start = time.monotonic()

    def look(self) -> None:
        """`OverTime` if the time is up."""
        if self._seconds and time.monotonic() - self._start > self._seconds:
            raise OverTime(f"[limits] round_seconds = {self._seconds:g}, and this took longer.")
