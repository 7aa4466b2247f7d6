"""A run on disk: what was asked, what happened, and enough state to go on after a crash at any instant."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from consilium import __version__, tree
from consilium.data.profile import DataProfile, read_profile
from consilium.errors import RunError, StudyError, WorkError, not_a_run
from consilium.files import append_lines, make_folder, read_json, write_json, write_text
from consilium.machine import origin
from consilium.method import Best, Method, Valid
from consilium.privacy.past import EMPTY, History, OldHistory, append_entries, read_entries
from consilium.scores import COLUMNS, Row, read_rows, unscored, write_rows
from consilium.site import Round
from consilium.store import DamagedError, Store, names_in, read_document, say_once, write_document
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
        self._uses: Counter[str] | None = None  # how many documents refer to a file of the store; None: not counted yet
        self._scored: set[tuple[int, str]] | None = None
        self._past = path / "firewall.jsonl"  # what the firewall remembers
        self._past_count = self._past_size = 0  # entries and bytes of it that are committed

    # ------------------------------------------------------------------------------------ opening

    @classmethod
    def create(cls, study: Study, runs: Path, watch: Callable[[Event], None] | None = None) -> RunFolder:
        """The folder of a study's first run."""
        return cls.create_at(cls.path_of(study, runs), study, watch)

    @classmethod
    def create_at(cls, path: Path, study: Study, watch: Callable[[Event], None] | None = None) -> RunFolder:
        try:
            make_folder(path, durable=True)
            write_text(study.to_toml(), path / "study.toml", durable=True)
        except OSError as error:
            raise RunError(f"cannot make the run folder {path}: {error.strerror}; name another with --runs.") from error
        return cls(path, study, watch)

    @staticmethod
    def path_of(study: Study, runs: Path, attempt: int = 1) -> Path:
        """`<name>-s<seed>-<hash>`, and with `-2`, `-3` the runs made again after its data or plug-ins changed."""
        return runs / f"{study.name}-s{study.plan.seed}-{study.hash}{f'-{attempt}' if attempt > 1 else ''}"

    @classmethod
    def attempts(cls, study: Study, runs: Path) -> list[Path]:
        """The runs of a study that are there, the oldest first."""
        found: list[Path] = []
        while (path := cls.path_of(study, runs, len(found) + 1)).joinpath("study.toml").is_file():
            found.append(path)
        return found

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
    def lacking(self) -> list[SiteName]:
        """Sites without whose scores or release a run ended; `resume` asks them again."""
        if not self.finished:
            return []
        summary = self.summary()
        return sorted({*summary.get("unscored", ()), *summary.get("undelivered", ())})

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

    def notes(self, events: Iterable[tuple[str, Mapping[str, Any]]], durable: bool = False) -> None:
        """Append several events at once."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        lines = [{"event": event, **facts, "time": time} for event, facts in events]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        append_lines(text, self.path / "journal.jsonl", durable)
        if self._scored is not None:
            self._scored |= {_place(line) for line in lines if line["event"] == "score"}
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
        """Remove what a crash cut short at the end, or a power cut left there that is no event."""
        path = self.path / "journal.jsonl"
        if path.exists():
            text = path.read_bytes()
            sound = text.rfind(b"\n") + 1
            while sound and not _is_event(text[text.rfind(b"\n", 0, sound - 1) + 1 : sound]):
                sound = text.rfind(b"\n", 0, sound - 1) + 1
            if sound < len(text):
                os.truncate(path, sound)

    def check_origin(self, facts: Mapping[str, Any], new: Collection[SiteName] = ()) -> None:
        """Refuse to go on with other sites, cases or plug-in files than the run began with; `new` sites may differ."""
        if not self.begun:
            return
        before = read_json(self.path / "origin.json") if new else {}
        kept = {
            key: {**facts[key], **{name: before[key][name] for name in new if name in before[key]}}
            for key in ("members", "sites")
            if new
        }
        if changed := differences(self.path, {**facts, **kept}):
            raise RunError(
                f"what {self.path} began with has changed: {'; '.join(changed)}. Restore it, or start the study again "
                "with `consilium run STUDY.toml --again`."
            )

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def trained_on(self) -> DataProfile | None:
        """What the training images were like; None of a run of 0.1, which did not note it."""
        path = self.path / "origin.json"
        return read_profile(read_json(path).get("distribution")) if path.exists() else None

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
        self._count_uses()
        make_folder(self._states, durable=True)
        document = self._store.put(server)
        if last:
            self._write({"server": document, "merged": dict(merged)}, self._states / "last.json")
        facts = {"round": round.index, "merged": dict(merged), "server": document, "seconds": seconds}
        if history.count:
            facts["firewall_bytes"] = self._save(history)
        self._write(facts, self._state_path(round.index))
        if self.study.plan.keep_rounds != "all":
            for index in self._rounds()[:-2]:
                self._remove(self._state_path(index))
        return self._store.get(document, type(server))

    def _count_uses(self) -> None:
        """Once: look through all documents, and delete what none refers to. Later every document counts its own."""
        if self._uses is None:
            documents = {path: _stored(path) for path in self._states.glob("*.json")}
            if None not in documents.values():  # what a damaged one refers to is not known: everything stays
                self._store.sweep(document for found in documents.values() for document in found or ())
            self._uses = Counter(name for found in documents.values() for name in _names(found or ()))

    def _write(self, facts: Mapping[str, Any], path: Path) -> None:
        """Write a document about states, and delete what only the one it replaces referred to."""
        before = _names(_stored(path) or ()) if path.exists() else []
        write_document(facts, path)
        if self._uses is not None:
            self._uses.update(_names(_documents(facts)))
        self._let_go(before)

    def _remove(self, path: Path) -> None:
        before = _names(_stored(path) or ())
        path.unlink()
        self._let_go(before)

    def _let_go(self, names: Iterable[str]) -> None:
        if self._uses is not None:
            names = list(names)
            self._uses.subtract(names)
            unused = {name for name in names if self._uses[name] <= 0}
            self._store.drop(unused)
            for name in unused:
                del self._uses[name]

    def keep(self, best: Best) -> Best:
        document = self._store.put(best.server)
        valid = {key: [mark.value, mark.round] for key, mark in best.valid.items()}
        facts = {"server": document, "valid": valid, "merged": dict(best.merged)}
        self._write(facts, self._states / "best.json")
        return replace(best, server=self._store.get(document, type(best.server)))

    def resume(self, method: Method) -> State | None:
        """The last committed state that is sound, or None before the first round.

        Where the last is damaged, the one before is taken, and the journal says so: its round is made again.
        """
        rounds = self._rounds()
        events = self.events()
        told = any(event["event"] == "round" for event in events)
        if (told and not rounds) or (rounds and not events):
            lost = self._states if told else self.path / "journal.jsonl"
            raise RunError(f"{lost} is missing or empty, but the run has made rounds; restore it, or delete the run.")
        if not rounds:
            return None
        faults: list[RunError] = []
        for index in reversed(rounds):
            try:
                state = self._state(index, method)
            except RunError as error:
                faults.append(error)
                continue
            for fault in faults:
                self.note("warning", text=f"{fault.__cause__}; the run goes on from the state of round {index + 1}.")
            return state
        raise faults[0]

    def _state(self, index: int, method: Method) -> State:
        facts = self._facts(self._state_path(index))
        server = self._read(facts["server"], method)
        history = self._history(facts)
        return State(server, facts["round"] + 1, facts.get("merged", {}), history, facts.get("seconds", 0.0))

    def _save(self, history: History) -> int:
        """Add what is new to the firewall's file; returns its size, which the state remembers."""
        self._past_size = append_entries(history.since(self._past_count), self._past, self._past_size)
        self._past_count = history.count
        return self._past_size

    def _history(self, facts: Mapping[str, Any]) -> History:
        """What the firewall knew when a state was committed; what is damaged of it is left out, and said."""
        if "firewall" in facts:  # version 0.1: all of it with every state; it is written anew with the next one
            self._past_count = self._past_size = 0
            return self._store.get(facts["firewall"], OldHistory).renewed()
        size = int(facts.get("firewall_bytes", 0))
        history, lost = read_entries(self._past, size)
        self._past_count, self._past_size = history.count, size if not lost else min(size, _size(self._past))
        if lost:
            self.note("warning", text=f"{self._past}: {lost} damaged entries; the firewall goes on without them.")
        return history

    def _facts(self, path: Path) -> dict[str, Any]:
        try:
            return read_document(path)
        except DamagedError as error:
            raise self._unusable(error) from error

    def states(self, method: Method) -> Iterator[tuple[int, Any]]:
        """The server after every round whose state was kept, with the round's index."""
        for index in self._rounds():
            yield index, self._read(self._facts(self._state_path(index))["server"], method)

    def best(self, method: Method) -> Best | None:
        path = self._states / "best.json"
        if not path.exists():
            return None
        facts = self._facts(path)
        valid = {key: Valid(value, round) for key, (value, round) in facts["valid"].items()}
        return Best(self._read(facts["server"], method), valid, facts.get("merged", {}))

    def best_is_last(self) -> bool:
        """Whether the best state is the last one, memories included."""
        best, last = self._facts(self._states / "best.json"), self._facts(self._states / "last.json")
        return bool(best["server"] == last["server"] and best["merged"] == last["merged"])

    def last(self, method: Method) -> Best:
        """The server after the last of the paper's rounds, and the memories that go with it."""
        facts = self._facts(self._states / "last.json")
        return Best(self._read(facts["server"], method), {}, facts["merged"])

    def _read(self, document: Mapping[str, Any], method: Method) -> Any:
        try:
            return self._store.get(document, method.Server)
        except (tree.PacketError, KeyError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> RunError:
        again = f"`consilium run {self.path / 'study.toml'} --runs ELSEWHERE`"
        return RunError(
            f"a saved state of {self.path} cannot be used: {str(error).rstrip('.')}; restore the file from a copy, or "
            f"start the study again with {again}."
        )

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self._states.glob("[0-9]*.json"))

    def _state_path(self, index: int) -> Path:
        return self._states / f"{index:05d}.json"

    # ------------------------------------------------------------------------------------ scores

    def add_scores(self, rows: Iterable[Row]) -> None:
        path = self.path / "scores.csv"
        head = "" if path.exists() else ",".join(COLUMNS) + "\n"
        append_lines(head + write_rows(rows), path, durable=True)  # before the journal says that they are there

    def scored(self) -> set[tuple[int, str]]:
        """The (round, phase) pairs whose scores are complete."""
        if self._scored is None:
            self._scored = {_place(event) for event in self.events() if event["event"] == "score"}
        return self._scored

    def unscored(self) -> dict[str, list[SiteName]]:
        """By final state: the sites whose scores of it are missing."""
        return unscored(self.events())

    def mend_scores(self) -> None:
        """Drop scores of a round that a crash interrupted; they are taken again."""
        path = self.path / "scores.csv"
        if not path.exists() and not self.scored():
            return
        expected = {(e["round"], e["phase"]): e["rows"] for e in self.events() if e["event"] == "score"}
        found: Counter[tuple[int, str]] = Counter()
        kept = []
        for row in read_rows(path):
            place = row.round, row.phase
            if found[place] < expected.get(place, 0):  # more are of a site that was scored later, and not sealed
                kept.append(row)
                found[place] += 1
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
        tree.save(best.server, self.path / "best.safetensors", durable=True)
        tree.save(self.last(method).server, self.path / "last.safetensors", durable=True)
        write_json(summary, self.path / "summary.json")

    def summary(self) -> Mapping[str, Any]:
        if not self.finished:
            raise RunError(f"{self.path} is not finished; go on with `consilium resume {self.path}`.")
        facts: Mapping[str, Any] = read_json(self.path / "summary.json")
        return facts

    def server(self, method: Method) -> Any:
        """The state to use: the best, of a finished run from its own file."""
        path = self.path / "best.safetensors"
        if path.exists():
            try:
                return self._checked(path, method)
            except tree.PacketError as error:
                return self._mended(path, method, error)
        best = self.best(method)
        if best is None:
            raise RunError(f"{self.path} has no scored round yet; go on with `consilium resume {self.path}`.")
        return best.server

    def _checked(self, path: Path, method: Method) -> Any:
        """The best state from its own file. Version 0.1 wrote no digest into it: then the store's are compared."""
        packet = tree.read(path)
        server: Any = tree.unflatten(packet, method.Server)
        if tree.digest_of(packet) is None:
            if not (self._states / "best.json").exists():
                say_once(f"{path} was written by version 0.1, without a digest: it is used unchecked.")
                return server
            kept, found = self._facts(self._states / "best.json")["server"], tree.split(server)
            if found.shape != kept["shape"] or {p: w.digest for p, w in found.weights.items()} != kept["weights"]:
                raise tree.PacketError(f"{path} is damaged: it is not the run's best state")
        return server

    def _mended(self, path: Path, method: Method, error: tree.PacketError) -> Any:
        """The best state from the store, and its own file written again."""
        best = self.best(method)  # checked by its digests
        if best is None:
            raise RunError(f"{error}; copy it again from where the run was made.") from error
        with contextlib.suppress(OSError):  # the folder may be read-only
            tree.save(best.server, path)
        say_once(f"{error}; it has been written again from the run's store.")
        return best.server


def _stored(path: Path) -> list[Mapping[str, Any]] | None:
    """What a document about states refers to in the store; None if it is damaged."""
    try:
        return _documents(read_document(path))
    except DamagedError:
        return None


def _documents(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [facts[key] for key in ("server", "firewall") if key in facts]


def _names(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    return [name for document in documents for name in names_in(document)]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _place(event: Event) -> tuple[int, str]:
    return event["round"], event["phase"]


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


def differences(run: Path, now: Mapping[str, Any]) -> list[str]:
    """What a run began with and is other now, in words: `sites` with their facts, `members`, `plugins` by file.

    Only what both know is compared. A run of 0.1 did not note its plug-in files; a run that has not begun nothing.
    """
    path = run / "origin.json"
    if not path.exists():
        return []
    before, now = read_json(path), json.loads(json.dumps(now))
    found = _site_changes(before.get("sites", {}), now["sites"])
    if not found and "members" in now:
        found = _site_changes(before.get("members", {}), now["members"])
    old, new = before.get("plugins"), now.get("plugins", {})
    if old is not None:
        changed = sorted(file for file in old.keys() | new.keys() if old.get(file) != new.get(file))
        found += [f"the plug-in file {file} {'is another' if file in new else 'is gone'}" for file in changed]
    return found


def same_site(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> bool:
    """Whether a site says what it said before; a newer version may go on, and may say more."""
    if old is None or new is None:
        return old is new
    return not _site_changes({"": old}, {"": json.loads(json.dumps(new))})


def _site_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = [f"site '{name}' is new" for name in sorted(new.keys() - old.keys())]
    found += [f"site '{name}' is gone" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, now = ({"unlabelled": 0, **facts[name]} for facts in (old, new))
        both = (before.keys() & now.keys()) - {"version", "study"}  # a newer version may go on, and may say more
        keys = {key for key in both if before[key] != now[key]}
        if keys:
            found.append(f"site '{name}' has other {_kind_of_change(keys, before, now)}")
    return found


def _kind_of_change(keys: set[str], old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if "cases" in keys:
        return f"cases ({new['cases']}, it had {old['cases']})"
    if "table" in keys:
        return "cases, patients or splits in its table"
    if "labels" in keys:
        return f"labels ({', '.join(new['labels'])}, it had {', '.join(old['labels'])})"
    return "images or masks" if "arrays" in keys else "cases, labels or preprocessing"


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

__all__ = ["Event", "RunFolder", "State", "differences", "disk_errors"]
