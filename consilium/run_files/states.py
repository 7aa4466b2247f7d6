"""The server's states in a run folder: committed by renaming, stored by content, checked on reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilium import tree
from consilium.errors import RunError
from consilium.files import make_folder
from consilium.method import Best, Method, Valid
from consilium.privacy.past import EMPTY, History, OldHistory, append_entries, read_entries
from consilium.run_files.journal import Journal
from consilium.site import Round
from consilium.store import DamagedError, Store, names_in, read_document, write_document
from consilium.weights import SiteName
from consilium.wording import command


@dataclass(frozen=True)
class State:
    """The progress of a run: the server after `done` rounds, and the last round merged from each site."""

    server: Any
    done: int
    merged: Mapping[SiteName, int]
    history: History = EMPTY  # of the firewall
    seconds: float = 0.0  # of its last round


class States:
    """`server/` and `store/` of a run folder, and the firewall's history."""

    def __init__(self, run: Path, keep_rounds: str, journal: Journal) -> None:
        self._run, self._keep_rounds, self._journal = run, keep_rounds, journal
        self._store = Store(run / "store")
        self._folder = run / "server"
        self._uses: Counter[str] | None = None  # how many documents refer to a file of the store; None: not counted yet
        self._past = run / "firewall.jsonl"  # the firewall's history
        self._past_count = self._past_size = 0  # entries and bytes of it that are committed

    def commit(
        self,
        round: Round,
        server: Any,
        merged: Mapping[SiteName, int],
        history: History = EMPTY,
        last: bool = False,
        seconds: float = 0.0,
    ) -> Any:
        """Commit a round; returns the server as read from disk, so that continuing equals resuming.

        `last`: it is the last of the paper's rounds, whose state is kept beside those of later phases.
        """
        self._count_uses()
        make_folder(self._folder, durable=True)
        document = self._store.put(server)
        if last:
            self._write({"server": document, "merged": dict(merged)}, self._folder / "last.json")
        facts = {"round": round.index, "merged": dict(merged), "server": document, "seconds": seconds}
        if history.count:
            facts["firewall_bytes"] = self._save(history)
        self._write(facts, self._state_path(round.index))
        if self._keep_rounds != "all":
            for index in self._rounds()[:-2]:
                self._remove(self._state_path(index))
        return self._store.get(document, type(server))

    def _count_uses(self) -> None:
        """Once: read all documents and delete files that none refers to. Later every document counts its own."""
        if self._uses is None:
            documents = {path: _stored(path) for path in self._folder.glob("*.json")}
            if None not in documents.values():  # the references of a damaged document are unknown: keep everything
                self._store.sweep(document for found in documents.values() for document in found or ())
            self._uses = Counter(name for found in documents.values() for name in _names(found or ()))

    def _write(self, facts: Mapping[str, Any], path: Path) -> None:
        """Write a document about states, and delete files that only its predecessor referred to."""
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
        self._write(facts, self._folder / "best.json")
        return replace(best, server=self._store.get(document, type(best.server)))

    def resume(self, method: Method) -> State | None:
        """The last intact committed state, or None before the first round.

        If the last is damaged, the one before is used, with a warning in the journal, and its round is repeated.
        """
        rounds = self._rounds()
        events = self._journal.events()
        told = any(event["event"] == "round" for event in events)
        if (told and not rounds) or (rounds and not events):
            lost = self._folder if told else self._journal.path
            raise RunError(
                f"{lost} is missing, empty or cut short, but the run has made rounds; restore it, or delete the run."
            )
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
                self._journal.note(
                    "warning", text=f"{fault.__cause__}; the run continues from the state of round {index + 1}."
                )
            return state
        raise faults[0]

    def server_after(self, index: int, method: Method) -> tuple[Any, Mapping[SiteName, int]] | None:
        """The server after a round, and the last round merged from each site, if they are kept and intact."""
        if index not in self._rounds():
            return None
        try:
            facts = self._facts(self._state_path(index))
            return self._read(facts["server"], method), facts.get("merged", {})
        except RunError:
            return None

    def _state(self, index: int, method: Method) -> State:
        facts = self._facts(self._state_path(index))
        server = self._read(facts["server"], method)
        history = self._history(facts)
        return State(server, facts["round"] + 1, facts.get("merged", {}), history, facts.get("seconds", 0.0))

    def _save(self, history: History) -> int:
        """Add new entries to the firewall's file; returns its size, which the state records."""
        self._past_size = append_entries(history.since(self._past_count), self._past, self._past_size)
        self._past_count = history.count
        return self._past_size

    def _history(self, facts: Mapping[str, Any]) -> History:
        """The firewall's history at the commit of a state; damaged entries are left out, with a warning."""
        if "firewall" in facts:  # version 0.1: all of it with every state; it is written anew with the next one
            self._past_count = self._past_size = 0
            return self._store.get(facts["firewall"], OldHistory).renewed()
        size = int(facts.get("firewall_bytes", 0))
        history, lost = read_entries(self._past, size)
        self._past_count, self._past_size = history.count, size if not lost else min(size, _size(self._past))
        if lost:
            self._journal.note(
                "warning", text=f"{self._past}: {lost} damaged entries; the firewall continues without them."
            )
        return history

    def _facts(self, path: Path) -> dict[str, Any]:
        try:
            return read_document(path)
        except DamagedError as error:
            raise self._unusable(error) from error

    def all(self, method: Method) -> Iterator[tuple[int, Any]]:
        """The server after every round whose state was kept, with the round's index."""
        for index in self._rounds():
            yield index, self._read(self._facts(self._state_path(index))["server"], method)

    def best(self, method: Method) -> Best | None:
        path = self._folder / "best.json"
        if not path.exists():
            return None
        facts = self._facts(path)
        valid = {key: Valid(value, round) for key, (value, round) in facts["valid"].items()}
        return Best(self._read(facts["server"], method), valid, facts.get("merged", {}))

    def best_document(self) -> Mapping[str, Any] | None:
        """The best server as a document, with its shape and digests; None before the first scored round."""
        path = self._folder / "best.json"
        return self._facts(path)["server"] if path.exists() else None

    def best_is_last(self) -> bool:
        """Whether the best state is the last one, memories included."""
        best, last = self._facts(self._folder / "best.json"), self._facts(self._folder / "last.json")
        return bool(best["server"] == last["server"] and best["merged"] == last["merged"])

    def last(self, method: Method) -> Best:
        """The server after the last of the paper's rounds, and the matching memories."""
        facts = self._facts(self._folder / "last.json")
        return Best(self._read(facts["server"], method), {}, facts["merged"])

    def _read(self, document: Mapping[str, Any], method: Method) -> Any:
        try:
            return self._store.get(document, method.Server)
        except (tree.PacketError, KeyError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> RunError:
        again = command("run", self._run / "study.toml", "--runs", "ELSEWHERE")
        return RunError(
            f"a saved state of {self._run} cannot be used: {str(error).rstrip('.')}; restore the file from a copy, or "
            f"start the study again with {again}."
        )

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("[0-9]*.json"))

    def _state_path(self, index: int) -> Path:
        return self._folder / f"{index:05d}.json"


def _stored(path: Path) -> list[Mapping[str, Any]] | None:
    """The references of a document about states; None if it is damaged."""
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
