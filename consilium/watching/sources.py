"""Where a page's figures come from: a run folder on this machine, or a job of a federation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consilium.errors import RunError, UserError, not_a_run
from consilium.files import read_line
from consilium.run_files.lock import at_work
from consilium.watching.status import RunStatus, status_of


@dataclass(frozen=True)
class CurrentExamples:
    """Predictions of the best state so far."""

    pictures: tuple[tuple[str, bytes], ...] = ()  # captions and PNG files
    legend: tuple[tuple[str, str], ...] = ()  # labels and the colours of their outlines


class StatusSource(Protocol):
    """A run that can be looked at."""

    def status(self) -> RunStatus: ...
    def examples(self) -> CurrentExamples: ...


class RunSource:
    """A run folder; reading it disturbs nobody."""

    def __init__(self, path: Path) -> None:
        if not (path / "study.toml").is_file():
            raise not_a_run(path)
        self.path = path
        self._size = -1
        self._events: list[Mapping[str, Any]] = []
        self._pictures = (-1, CurrentExamples())  # of a number of scored rounds
        self._drawing = threading.Lock()

    def status(self) -> RunStatus:
        return status_of(self.events(), self.path.resolve().name, self.state())

    def events(self) -> list[Mapping[str, Any]]:
        """The journal; it is read again only when it has grown."""
        journal = self.path / "journal.jsonl"
        size = journal.stat().st_size if journal.exists() else 0
        if size != self._size:
            lines = journal.read_text(encoding="utf-8").split("\n")[:-1] if size else []
            try:
                self._events = [read_line(line) for line in lines if line]
            except ValueError as error:
                raise RunError(f"{journal} is damaged ({error}); restore it, or start the study again.") from error
            self._size = size
        return self._events

    def state(self) -> str:
        if (self.path / "summary.json").exists():
            return "finished"
        if not (self.path / "journal.jsonl").exists():
            return "starting" if at_work(self.path) else "not begun"
        return "running" if at_work(self.path) else "interrupted"

    def examples(self) -> CurrentExamples:
        """One validation case per site by the best state so far; drawn once per scored round."""
        scored = sum(event["event"] == "score" for event in self.events())
        with self._drawing:
            if scored and scored != self._pictures[0]:
                from consilium.reporting import live_examples

                with contextlib.suppress(UserError, OSError):  # no data here, or the state was replaced meanwhile
                    self._pictures = scored, CurrentExamples(*live_examples(self.path))
        return self._pictures[1]


class JobSource:
    """A job of a federation, asked through the administrator's connection; its data are elsewhere."""

    def __init__(
        self, job: str, journal: Callable[[int], Sequence[Mapping[str, Any]]], over: Callable[[], bool]
    ) -> None:
        """`journal(after)` gives the events from number `after` on, `over()` whether the job has ended, well or not."""
        self.job, self._journal, self._over = job, journal, over
        self._events: list[Mapping[str, Any]] = []
        self._asking = threading.Lock()  # one question at a time on one connection

    def status(self) -> RunStatus:
        with self._asking:
            self._events.extend(self._journal(len(self._events)))
            over = self._over()
        if any(event["event"] == "finish" for event in self._events):
            known = "finished"
        elif over:
            known = "interrupted"  # stopped, failed, or too few sites
        else:
            known = "running" if self._events else "not begun"
        return status_of(self._events, self.job, known)

    def examples(self) -> CurrentExamples:
        return CurrentExamples()
