"""Clocks, memory and medians, and the line a benchmark prints."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol, Self

import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Measured:
    """One comparison and its limit."""

    name: str
    what: str
    ours: float
    against: str  # what the baseline is
    baseline: float
    unit: str
    ratio: float  # the median over repeats of ours / baseline, or baseline / ours where a gain is asked for
    limit: float
    gain: bool = False  # True: the ratio says how much faster we are, and must be at least the limit
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.ratio >= self.limit if self.gain else self.ratio <= self.limit

    def line(self) -> str:
        sign = "≥" if self.gain else "≤"
        facts = ", ".join(f"{key} {_short(value)}" for key, value in self.facts.items())
        return (
            f"{self.what}: {_short(self.ours)} {self.unit} | {self.against} {_short(self.baseline)} {self.unit} | "
            f"{self.ratio:.2f} × | limit {sign} {self.limit:.2f} | {'ok' if self.ok else 'OVER'}"
            + (f"   ({facts})" if facts else "")
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


@dataclass(frozen=True)
class Spent:
    """What a stretch of work took."""

    seconds: float
    chain: float  # processor time of this process and of the busiest other: the seconds a quiet machine would need
    own: float = 0.0  # processor time of this process


Repeat = Sequence[Spent]  # the rounds of one repeat


class Clock:
    """Wall and processor time of this process and of others."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._others = [psutil.Process(pid) for pid in pids]
        self.start()

    def start(self) -> None:
        self._own, self._each, self._wall = time.process_time(), self._now(), time.perf_counter()

    def stop(self) -> Spent:
        wall, own = time.perf_counter() - self._wall, time.process_time() - self._own
        most = max((now - then for now, then in zip(self._now(), self._each)), default=0.0)
        return Spent(wall, own + most, own)

    def _now(self) -> list[float]:
        times = [process.cpu_times() for process in self._others]
        return [t.user + t.system for t in times]


def median_ratio(ours: Sequence[Repeat], theirs: Sequence[Repeat], of: str = "seconds") -> float:
    """A ratio is taken within each repeat: a busy minute then counts for both."""
    return median(typical(a, of) / typical(b, of) for a, b in zip(ours, theirs, strict=True))


def typical(repeat: Repeat, of: str = "seconds") -> float:
    """The median round of a repeat."""
    return float(median(getattr(spent, of) for spent in repeat))


def timed(step: Callable[[], object], pids: Sequence[int] = ()) -> Spent:
    clock = Clock(pids)
    step()
    return clock.stop()


def load() -> float:
    """Processes that wanted a core in the last minute: with more of them than cores, seconds mean little."""
    return round(os.getloadavg()[0], 1)


class Laps:
    """Watches a run: what every round but the first took, from one event to the next, so that nothing is left out.

    The run is told not to score before its end.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._clock = Clock(pids)
        self._seen: list[Spent] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "round":
            self._seen.append(self._clock.stop())
            self._clock.start()

    @property
    def rounds(self) -> Repeat:
        return self._seen[1:]


class Rival(Protocol):
    """Who does the same rounds another way."""

    @property
    def pids(self) -> Sequence[int]: ...
    def restart(self) -> None: ...
    def round(self, index: int) -> None: ...


@dataclass(frozen=True)
class Interleaved:
    """Our run and the rival's rounds in turn, so that both meet the same weather; the first round of each is not
    timed."""

    ours: Sequence[Repeat]
    theirs: Sequence[Repeat]

    @classmethod
    def of(cls, run: Callable[[Laps], object], pids: Sequence[int], rival: Rival, rounds: int, repeats: int) -> Self:
        """`run` makes a whole run of 1 + `rounds` rounds."""
        ours, theirs = [], []
        for _ in range(repeats):
            laps = Laps(pids)
            run(laps)
            ours.append(laps.rounds)
            rival.restart()
            rival.round(0)
            theirs.append([timed(partial(rival.round, index), rival.pids) for index in range(1, 1 + rounds)])
        return cls(ours, theirs)

    def ratio(self, of: str = "seconds") -> float:
        return median_ratio(self.ours, self.theirs, of)

    @property
    def seconds(self) -> tuple[float, float]:
        """Our median round and the rival's."""
        return median(map(typical, self.ours)), median(map(typical, self.theirs))


# ---------------------------------------------------------------------------------------------------- memory


def anonymous(pid: int) -> int:
    """Bytes of memory that is a process's own: not pages of files, which the system may drop."""
    return _status(pid, "RssAnon")


def resident(pid: int) -> int:
    """Bytes in memory, mapped files included."""
    return _status(pid, "VmRSS")


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no {key}")


class Peak:
    """The largest values seen."""

    def __init__(self) -> None:
        self.server = self.anonymous = self.resident = 0

    def look(self, pids: Sequence[int]) -> None:
        me = os.getpid()
        own = anonymous(me)
        self.server = max(self.server, own)
        self.anonymous = max(self.anonymous, own + sum(map(anonymous, pids)))
        self.resident = max(self.resident, sum(map(resident, (me, *pids))))


@contextmanager
def peak_of(pids: Sequence[int], every: float = 0.001) -> Iterator[Peak]:
    """Look at this process and others all the time."""
    peak, over = Peak(), threading.Event()

    def look() -> None:
        while not over.wait(every):
            peak.look(pids)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


@contextmanager
def peak_of_tree(pid: int, every: float = 0.02) -> Iterator[Callable[[], int]]:
    """The most memory of their own that a process and all its children had together, however long others take."""
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(every):
            with suppress(OSError, psutil.Error):  # a process that has ended
                children = psutil.Process(pid).children(recursive=True)
                seen[0] = max(seen[0], sum(anonymous(each) for each in (pid, *(child.pid for child in children))))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield lambda: seen[0]
    finally:
        over.set()
        watcher.join()
