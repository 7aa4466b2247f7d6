"""A run's journal, its log: one event per line; lines are only added."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consilium.errors import RunError
from consilium.files import append_lines, checked_line, read_line

Event = Mapping[str, Any]


class Journal:
    """`journal.jsonl` of a run folder."""

    def __init__(self, path: Path, watch: Callable[[Event], None] | None = None) -> None:
        self.path = path
        self._watchers = [watch] if watch else []
        self._scored: set[tuple[int, str]] | None = None

    def note(self, event: str, **facts: Any) -> None:
        """Append an event to the journal and pass it to the watchers."""
        self.notes([(event, facts)])

    def notes(self, events: Iterable[tuple[str, Mapping[str, Any]]], durable: bool = False) -> None:
        """Append several events at once."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        lines = [{"event": event, **facts, "time": time} for event, facts in events]
        text = "".join(checked_line(line) + "\n" for line in lines)
        append_lines(text, self.path, durable)
        if self._scored is not None:
            self._scored |= {_place(line) for line in lines if line["event"] == "score"}
        for line in lines:
            for watch in self._watchers:
                watch(line)

    @contextmanager
    def shown_to(self, watch: Callable[[Event], None]) -> Iterator[None]:
        """Add a watcher inside the context."""
        self._watchers.append(watch)
        try:
            yield
        finally:
            self._watchers.remove(watch)

    def events(self) -> list[Event]:
        """The events of the journal; a line that a crash cut short is dropped."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            return [read_line(line) for line in lines if line]
        except ValueError as error:
            raise RunError(f"{self.path} is damaged ({error}); restore it, or start the study again.") from error

    def scored(self) -> set[tuple[int, str]]:
        """The (round, phase) pairs whose scores are complete."""
        if self._scored is None:
            self._scored = {_place(event) for event in self.events() if event["event"] == "score"}
        return self._scored

    def mend(self) -> None:
        """Remove an incomplete or invalid end after a crash or a power cut."""
        if self.path.exists():
            text = self.path.read_bytes()
            sound = text.rfind(b"\n") + 1
            while sound and not _is_event(text[text.rfind(b"\n", 0, sound - 1) + 1 : sound]):
                sound = text.rfind(b"\n", 0, sound - 1) + 1
            if sound < len(text):
                os.truncate(self.path, sound)


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _place(event: Event) -> tuple[int, str]:
    return event["round"], event["phase"]
