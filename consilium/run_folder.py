"""A run on disk: what was asked, what happened, and enough state to go on after a crash at any instant."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from consilium import __version__, tree
from consilium.errors import RunError, StudyError, WorkError, not_a_run
from consilium.files import read_json, write_json, write_text
from consilium.machine import origin
from consilium.method import Best, Method, Valid
from consilium.privacy.firewall import EMPTY, History
from consilium.scores import COLUMNS, Row, read_rows, write_rows
from consilium.site import Round
from consilium.store import Store
from consilium.study import Study, load_study
from consilium.weights import SiteName

Event = Mapping[str, Any]
FORMAT = 1  # of the run folder; a change keeps older ones readable or refuses them in words


@dataclass(frozen=True)
class State:
    """Where a run stands: the server after `done` rounds, the last round merged from each site."""

    server: Any
    done: int
    merged: Mapping[SiteName, int]
    history: History = EMPTY  # what the firewall has seen
    seconds: float = 0.0  # of its last round


class RunFolder:
    """`runs/<name>-s<seed>-<hash>/`; states are committed by renaming, the journal and the scores only grow."""

    def __init__(self, path: Path, study: Study, watch: Callable[[Event], None] | None = None) -> None:
        self.path, self.study, self._watch = path, study, watch
        self._store = Store(path / "store")
        self._states = path / "server"

    # ------------------------------------------------------------------------------------ opening

    @classmethod
    def create(cls, study: Study, runs: Path, watch: Callable[[Event], None] | None = None) -> RunFolder:
        path = cls.path_of(study, runs)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(study.to_toml(), path / "study.toml")
        except OSError as error:
            raise RunError(f"cannot make the run folder {path}: {error.strerror}; name another with --runs.") from error
        return cls(path, study, watch)

    @staticmethod
    def path_of(study: Study, runs: Path) -> Path:
        return runs / f"{study.name}-s{study.plan.seed}-{study.hash}"

    @classmethod
    def open(cls, path: Path, watch: Callable[[Event], None] | None = None) -> RunFolder:
        if not (path / "study.toml").is_file():
            raise not_a_run(path)
        folder = cls(path, _own_study(path / "study.toml"), watch)
        folder._check_format()
        return folder

    @property
    def finished(self) -> bool:
        try:
            return (self.path / "summary.json").exists() and bool(read_json(self.path / "summary.json"))
        except RunError:  # a damaged summary is written again
            return False

    @property
    def begun(self) -> bool:
        return (self.path / "journal.jsonl").exists()

    def _check_format(self) -> None:
        path = self.path / "origin.json"
        if not path.exists():
            return
        facts = read_json(path)
        if facts.get("format") != FORMAT:
            made = facts.get("versions", {}).get("consilium", "an unknown version")
            raise RunError(
                f"{self.path} was made by consilium {made} in format {facts.get('format')}; this is {__version__}, "
                f"which reads format {FORMAT}. Use that version, or start the study again."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock goes with the process that holds it."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"another process is working on {self.path}; wait for it or stop it.") from error
            yield

    # ------------------------------------------------------------------------------------ journal

    def note(self, event: str, **facts: Any) -> None:
        """Append an event to the journal and show it to whoever watches."""
        self.notes([(event, facts)])

    def notes(self, events: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Append several events at once."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        lines = [{"event": event, **facts, "time": time} for event, facts in events]
        with (self.path / "journal.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        if self._watch:
            for line in lines:
                self._watch(line)

    def events(self) -> list[Event]:
        """The journal; a line cut short by a crash is dropped."""
        path = self.path / "journal.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            return [json.loads(line) for line in lines if line]
        except ValueError as error:
            raise RunError(f"{path} is damaged ({error}); restore it, or start the study again.") from error

    def mend_journal(self) -> None:
        """Remove a last line that a crash cut short, so that the next event starts on a line of its own."""
        path = self.path / "journal.jsonl"
        if path.exists():
            text = path.read_bytes()
            if text and not text.endswith(b"\n"):
                with path.open("rb+") as file:
                    file.truncate(text.rfind(b"\n") + 1)

    def check_origin(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on with other sites or other cases than the run began with."""
        if not self.begun:
            return
        before = read_json(self.path / "origin.json")
        for key in ("members", "sites"):
            old, new = before.get(key, {}), json.loads(json.dumps(facts[key]))
            for name in sorted(old.keys() | new.keys()):
                if _but_version(old.get(name)) != _but_version(new.get(name)):
                    raise RunError(
                        f"site '{name}' has other cases, labels or preprocessing than when {self.path} began; restore "
                        "its tables, or start the study again."
                    )

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def write_origin(self, facts: Mapping[str, Any]) -> None:
        write_json({"format": FORMAT, **origin(), **facts}, self.path / "origin.json")

    # ------------------------------------------------------------------------------------ state

    def commit(
        self,
        round: Round,
        server: Any,
        merged: Mapping[SiteName, int],
        history: History = EMPTY,
        last: bool = False,
        seconds: float = 0.0,
    ) -> Any:
        """Make a round last; returns the server as it will be read again, so that going on equals resuming.

        `last`: it is the last of the paper's rounds, whose state is kept beside what later phases make of it.
        """
        self._states.mkdir(parents=True, exist_ok=True)
        document = self._store.put(server)
        if last:
            write_json({"server": document, "merged": dict(merged)}, self._states / "last.json")
        facts = {"round": round.index, "merged": dict(merged), "server": document, "seconds": seconds}
        if history.traces:
            facts["firewall"] = self._store.put(history)
        write_json(facts, self._state_path(round.index))
        if self.study.plan.keep_rounds != "all":
            for index in self._rounds()[:-2]:
                self._state_path(index).unlink()
        self._store.sweep(self._documents())
        return self._store.get(document, type(server))

    def keep(self, best: Best) -> Best:
        document = self._store.put(best.server)
        valid = {key: [mark.value, mark.round] for key, mark in best.valid.items()}
        facts = {"server": document, "valid": valid, "merged": dict(best.merged)}
        write_json(facts, self._states / "best.json")
        return replace(best, server=self._store.get(document, type(best.server)))

    def resume(self, method: Method) -> State | None:
        """The last committed state, or None before the first round."""
        rounds = self._rounds()
        events = self.events()
        told = any(event["event"] == "round" for event in events)
        if (told and not rounds) or (rounds and not events):
            lost = self._states if told else self.path / "journal.jsonl"
            raise RunError(f"{lost} is missing or empty, but the run has made rounds; restore it, or delete the run.")
        if not rounds:
            return None
        facts = read_json(self._state_path(rounds[-1]))
        server = self._read(facts["server"], method)
        history = self._store.get(facts["firewall"], History) if "firewall" in facts else EMPTY
        return State(server, facts["round"] + 1, facts.get("merged", {}), history, facts.get("seconds", 0.0))

    def states(self, method: Method) -> Iterator[tuple[int, Any]]:
        """The server after every round whose state was kept, with the round's index."""
        for index in self._rounds():
            yield index, self._read(read_json(self._state_path(index))["server"], method)

    def best(self, method: Method) -> Best | None:
        path = self._states / "best.json"
        if not path.exists():
            return None
        facts = read_json(path)
        valid = {key: Valid(value, round) for key, (value, round) in facts["valid"].items()}
        return Best(self._read(facts["server"], method), valid, facts.get("merged", {}))

    def best_is_last(self) -> bool:
        """Whether the best state is the last one, memories included."""
        best, last = read_json(self._states / "best.json"), read_json(self._states / "last.json")
        return bool(best["server"] == last["server"] and best["merged"] == last["merged"])

    def last(self, method: Method) -> Best:
        """The server after the last of the paper's rounds, and the memories that go with it."""
        facts = read_json(self._states / "last.json")
        return Best(self._read(facts["server"], method), {}, facts["merged"])

    def _read(self, document: Mapping[str, Any], method: Method) -> Any:
        try:
            return self._store.get(document, method.Server)
        except (tree.PacketError, KeyError) as error:
            raise RunError(f"the saved state of {self.path} cannot be used: {error}.") from error

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self._states.glob("[0-9]*.json"))

    def _state_path(self, index: int) -> Path:
        return self._states / f"{index:05d}.json"

    def _documents(self) -> Iterator[Mapping[str, Any]]:
        for path in self._states.glob("*.json"):
            facts = read_json(path)
            yield facts["server"]
            if "firewall" in facts:
                yield facts["firewall"]

    # ------------------------------------------------------------------------------------ scores

    def add_scores(self, rows: Iterable[Row]) -> None:
        path = self.path / "scores.csv"
        head = "" if path.exists() else ",".join(COLUMNS) + "\n"
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(head + write_rows(rows))

    def scored(self) -> set[tuple[int, str]]:
        """The (round, phase) pairs whose scores are complete."""
        return {(event["round"], event["phase"]) for event in self.events() if event["event"] == "score"}

    def mend_scores(self) -> None:
        """Drop scores of a round that a crash interrupted; they are taken again."""
        path = self.path / "scores.csv"
        if not path.exists() and not self.scored():
            return
        expected = {(e["round"], e["phase"]): e["rows"] for e in self.events() if e["event"] == "score"}
        kept = [row for row in read_rows(path) if (row.round, row.phase) in expected]
        found = Counter((row.round, row.phase) for row in kept)
        for place, number in expected.items():
            if found[place] != number:
                raise RunError(f"{path} has lost scores of round {place[0]}; restore it, or start the study again.")
        write_text(",".join(COLUMNS) + "\n" + write_rows(kept), path)

    def rows(self) -> list[Row]:
        path = self.path / "scores.csv"
        return read_rows(path) if path.exists() else []

    # ------------------------------------------------------------------------------------ the end

    def finish(self, method: Method, summary: Mapping[str, Any]) -> None:
        """Write the two states in full, then the summary, whose presence says that the run is finished."""
        best = self.best(method)
        assert best is not None
        tree.save(best.server, self.path / "best.safetensors")
        tree.save(self.last(method).server, self.path / "last.safetensors")
        write_json(summary, self.path / "summary.json")

    def summary(self) -> Mapping[str, Any]:
        if not self.finished:
            raise RunError(f"{self.path} is not finished; go on with `consilium resume {self.path}`.")
        facts: Mapping[str, Any] = read_json(self.path / "summary.json")
        return facts

    def server(self, method: Method) -> Any:
        """The state to use: the best, of a finished run from its own file."""
        if (self.path / "best.safetensors").exists():
            return tree.load(self.path / "best.safetensors", method.Server)
        best = self.best(method)
        if best is None:
            raise RunError(f"{self.path} has no scored round yet; go on with `consilium resume {self.path}`.")
        return best.server


def _own_study(path: Path) -> Study:
    """The study a run was made with. It ends with all its facts; one cut short would go on with other settings."""
    try:
        study = load_study(path)
        told = tomllib.loads(path.read_text(encoding="utf-8")).get("facts", {})
        if told.keys() >= {field.name for field in fields(study.facts)}:
            return study
        fault = "it is cut short"
    except StudyError as error:
        fault = str(error).removeprefix(f"{path} ").rstrip(".")
    raise RunError(f"{path} is not as the run wrote it ({fault}); restore it, or start the study again.")


def _but_version(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A newer version may go on with a run of the same format."""
    return None if facts is None else {key: value for key, value in facts.items() if key != "version"}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A failing disk stops the work with a sentence that says what to do; what was committed is safe."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "When the cause is mended,")
        raise WorkError(
            f"{error.strerror or error} ({error.filename or path}): the run stopped; everything committed is saved. "
            f"{remedy} `consilium resume {path}`."
        ) from error


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room, then"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Allow reading and writing there, then"),
}

__all__ = ["Event", "RunFolder", "State", "disk_errors"]
