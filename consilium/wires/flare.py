"""Sites that are processes of other machines, reached through NVIDIA FLARE.

A request is a JSON text and the bytes of one safetensors file, and so is an answer. What a site says of a failure is
one word of `REASONS`: its own log, which stays there, says more.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from consilium import __version__, tree
from consilium.data.preprocess import fingerprint
from consilium.engine import WireError
from consilium.envelope import Envelope, Reply, RollCall, card_from_json, card_to_json
from consilium.errors import DataError, RunError, StudyError, WorkError
from consilium.files import write_bytes
from consilium.run_folder import RunFolder
from consilium.scores import Row, read_rows
from consilium.site import Roster
from consilium.study import Study
from consilium.tree import Packet, PacketError
from consilium.weights import SiteName
from consilium.wires import held

ORDER, ANSWER = "consilium.order", "consilium.answer"  # the two kinds of messages
SLOWEST = 125_000  # bytes per second of the slowest link that still works
ROLL_CALL = 120.0  # seconds at least: sites start their process, and make their cache
TICK = 0.5  # seconds between two looks at who has gone
ROOM = 1 << 20  # bytes a reply may be larger than its tensors: names and shapes
ROWS = 1 << 30  # bytes of scores that are accepted
REASONS = {
    "study": "its package cannot read the study",
    "method": "its hospital.toml does not allow the method",
    "rounds": "its hospital.toml allows no more rounds of this run",
    "privacy": "its hospital.toml demands differential privacy, and this study has none or too little",
    "bytes": "its hospital.toml allows no more bytes to leave",
    "labels": "its hospital.toml names other labels",
    "name": "its site.toml names another site than its kit",
    "data": "its tables or images have faults",
    "device": "its device cannot be used",
    "memory": "it has lost its memory of this run",
    "disk": "its disk is full or cannot be written",
    "old": "it has been asked for a later round already",
    "foreign": "the message was of another run, method or site",
    "damaged": "the message was damaged on its way",
    "size": "its answer is larger than this method's update",
    "late": "no answer by the deadline",
    "gone": "its process has ended",
    "away": "it is not connected",
    "failed": "training failed there",
}


Body = bytes | memoryview  # a large one is a mapped file


@dataclass(frozen=True)
class Answer:
    """What came back from a site; `error` is a word of `REASONS`."""

    facts: Mapping[str, Any]
    body: Body = b""
    error: str = ""


class Line(Protocol):
    """Reaches the sites of one job."""

    def ask(self, site: SiteName, request: Mapping[str, Any], body: Body, seconds: float, room: int) -> Answer: ...
    def here(self) -> set[SiteName]: ...  # sites whose processes take part in this job
    def back(self) -> set[SiteName]: ...  # sites that started again since, and wait for a new job
    def dropped(self) -> list[tuple[SiteName, str]]: ...  # messages since the last question that were not wanted
    def stopped(self) -> bool: ...


class GoOn(Exception):
    """A site is back: the run goes on as a new job, in which it takes part."""


class FlareWire:
    """A federation of processes that trust nothing but each other's certificates."""

    def __init__(self, study: Study, folder: RunFolder, line: Line) -> None:
        self.study, self.folder, self.line = study, folder, line
        self.spool = folder.path / "spool"
        self.roster: Roster = {}
        self._held: dict[SiteName, dict[str, frozenset[str]]] = {}  # by what was asked: contents a site has confirmed
        self._sent: dict[SiteName, int] = {}  # bytes of the last packet, after what the site holds was left out
        self._threads = ThreadPoolExecutor(max(1, len(study.plan.sites) + len(study.plan.leave_out)))

    # ------------------------------------------------------------------------------------ roll call

    def roll_call(self) -> RollCall:
        """Every site's card; of a run that goes on, those of absent sites are taken from its origin."""
        guests = sorted(self.study.plan.leave_out)
        members = sorted(name for name in self.study.plan.sites if name not in guests)
        began = self._origin()
        requests = {name: {"do": "card", "site": name, "run": self.folder.path.name} for name in (*members, *guests)}
        answers = dict(self._ask(requests, {}, max(ROLL_CALL, self.study.plan.deadline), {}))
        faults = [self._fault(name, answer) for name, answer in answers.items()]
        absent = {name for name, answer in answers.items() if answer.error in ("late", "gone", "away")}
        told = [fault for name, fault in zip(answers, faults) if fault and name not in absent]
        if told:
            raise StudyError("\n".join(told))
        if absent and not began:
            raise WireError(
                f"{_names(absent)} did not answer the roll call, and a run begins with all its sites. Start them with "
                "`consilium federation site`, or leave them out with study.sites, then submit again."
            )
        measured = ("seconds", "memory_mb")
        told_facts = {n: {k: v for k, v in answer.facts.items() if k not in measured} for n, answer in answers.items()}
        facts = {name: began["sites"][name] if name in absent else told_facts[name] for name in answers}
        cards = {
            name: card_from_json(began["members"][name])
            if name in absent
            else card_from_json({**facts[name], "index": i})
            for i, name in enumerate(members)
        }
        empty = [name for name in members if not cards[name].n]
        if empty:
            raise DataError(f"no training cases at {', '.join(empty)}; leave the site out with study.sites.")
        self.roster = cards
        for name in sorted(absent):
            self.folder.note("absent", site=name)
        return RollCall(cards, {name: name in guests for name in sorted((*members, *guests))}, facts)

    def _origin(self) -> Mapping[str, Any]:
        path = self.folder.path / "origin.json"
        began: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if self.folder.begun else {}
        return began

    def _fault(self, name: SiteName, answer: Answer) -> str:
        """Why a site cannot take part, in a sentence."""
        if answer.error:
            return f"site '{name}' cannot take part: {REASONS[answer.error]} (its own log says more)."
        ours = {
            "version": __version__,
            "method": self.study.hash,
            "preprocessing": fingerprint(self.study.preprocess),
        }
        for what, value in ours.items():
            if answer.facts.get(what) != value:
                theirs = f"{answer.facts.get(what)} where the server has {value}"
                remedy = "install the same consilium on both" if what == "version" else "compare the two installations"
                return f"site '{name}' has another {what}: {theirs}; {remedy}."
        unknown = set(answer.facts["labels"]) - set(self.study.facts.labels)
        return f"site '{name}' has labels the study has not: {', '.join(sorted(unknown))}." if unknown else ""

    # ------------------------------------------------------------------------------------ the four exchanges

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        waiting = sorted(self.line.back() & self.roster.keys())
        if waiting:
            raise GoOn(", ".join(waiting))
        limits = {name: self._limit(name, head) for name in orders}
        answers = self._exchange("train", orders, head, limits)
        return ((name, self._reply(name, answer, limits[name])) for name, answer in answers)

    def _limit(self, name: SiteName, head: Envelope) -> int:
        expected = self.study.method.blank(self.study.task, self.roster, self.roster[name], head.round)
        return tree.flatten(expected).nbytes() + ROOM if expected is not None else ROOM

    def _reply(self, name: SiteName, answer: Answer, limit: int) -> Reply:
        facts = {"seconds": answer.facts.get("seconds", 0.0), "memory_mb": answer.facts.get("memory_mb", 0.0)}
        facts["sent"] = self._sent.get(name)
        if answer.error:
            return Reply(None, lost=REASONS[answer.error], **facts)
        if len(answer.body) > limit:
            return Reply(None, lost=f"{REASONS['size']} ({len(answer.body)} bytes)", **facts)
        path = self._path(name, "reply")
        write_bytes(answer.body, path)  # not in memory: there may be many sites
        try:
            return Reply(tree.read(path), **facts)
        except PacketError:
            return Reply(None, lost=f"{REASONS['damaged']} ({len(answer.body)} bytes)", **facts)

    def score(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Mapping[SiteName, list[Row]]:
        scores = {}
        for name, answer in self._exchange("score", releases, head):
            if answer.error:
                continue
            path = self._path(name, "scores")
            write_bytes(answer.body, path)
            try:
                rows = read_rows(path)
            except RunError:
                continue
            if all(row.site == name for row in rows):  # a site speaks for itself only
                scores[name] = rows
        return scores

    def deliver(self, releases: Mapping[SiteName, Packet], head: Envelope) -> None:
        for name, answer in self._exchange("deliver", releases, head):
            if answer.error:
                self.folder.note("undelivered", site=name, why=REASONS[answer.error])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self.spool, ignore_errors=True)

    # ------------------------------------------------------------------------------------ asking

    def _exchange(
        self, do: str, packets: Mapping[SiteName, Packet], head: Envelope, rooms: Mapping[SiteName, int] | None = None
    ) -> Iterator[tuple[SiteName, Answer]]:
        """Requests out; the packets are not held on to while the answers are waited for."""
        self.spool.mkdir(parents=True, exist_ok=True)
        cards = {name: card_to_json(card) for name, card in self.roster.items()}
        named: dict[int, dict[str, str]] = {}
        lean: dict[tuple[int, frozenset[str]], Packet] = {}  # sites that lack the same are sent the same
        requests: dict[SiteName, Mapping[str, Any]] = {}
        less: dict[SiteName, Packet] = {}
        for name, packet in packets.items():
            names = named.get(id(packet)) or named.setdefault(id(packet), held.contents(packet))
            known = self._known(name, do) & frozenset(names.values())
            less[name] = lean.setdefault((id(packet), known), held.without(packet, names, known))
            self._sent[name] = less[name].nbytes()
            requests[name] = {
                **{"do": do, "site": name, "run": head.run, "roster": cards, "tensors": names},
                "head": head.for_site(name).to_json(),
            }
        brought = {name: frozenset(request["tensors"].values()) for name, request in requests.items()}
        return self._noting(do, brought, self._ask(requests, less, self.study.plan.deadline, rooms or {}))

    def _noting(
        self, do: str, brought: Mapping[SiteName, frozenset[str]], answers: Iterator[tuple[SiteName, Answer]]
    ) -> Iterator[tuple[SiteName, Answer]]:
        """The answers; and what a site holds from now on."""
        for name, answer in answers:
            if answer.error:
                self._held.pop(name, None)  # whatever it has now, it is sent all of it the next time
            else:
                self._held.setdefault(name, {})[do] = brought[name]
            yield name, answer

    def _known(self, site: SiteName, do: str) -> frozenset[str]:
        """Orders leave out what the last order brought; a release also what the last release did."""
        kinds = ("train",) if do == "train" else ("train", "score")
        none: frozenset[str] = frozenset()
        return none.union(*(self._held.get(site, {}).get(kind, none) for kind in kinds))

    def _ask(
        self,
        requests: Mapping[SiteName, Mapping[str, Any]],
        packets: Mapping[SiteName, Packet],
        seconds: float,
        rooms: Mapping[SiteName, int],
    ) -> Iterator[tuple[SiteName, Answer]]:
        """Ask every site that is here; the answers come as they come."""
        bodies: dict[int, Body] = {}  # sites that are sent the same packet share its bytes
        open_: dict[Future[Answer], SiteName] = {}
        here = self.line.here() - self.line.back()
        for name, request in requests.items():
            if name not in here:
                continue
            packet = packets.get(name)
            if packet is not None and id(packet) not in bodies:
                bodies[id(packet)] = self._mapped(packet)
            body = b"" if packet is None else bodies[id(packet)]
            ask: Callable[..., Answer] = self.line.ask
            open_[self._threads.submit(ask, name, request, body, seconds, rooms.get(name, ROWS))] = name
        return self._answers([name for name in requests if name not in here], open_, time.monotonic() + seconds)

    def _answers(
        self, away: Sequence[SiteName], open_: dict[Future[Answer], SiteName], end: float
    ) -> Iterator[tuple[SiteName, Answer]]:
        """Every site's answer as it comes; who is gone or late is not waited for."""
        yield from ((name, Answer({}, error="away")) for name in away)
        while open_:
            done, _ = wait(open_, timeout=TICK, return_when="FIRST_COMPLETED")
            for future in done:
                yield open_.pop(future), future.result()
            for name, why in self.line.dropped() if self.roster else ():  # a journal begins after the roll call
                self.folder.note("dropped", site=name, why=why)
            if self.line.stopped():
                raise WorkError(
                    "the run was stopped; what was committed is saved, `consilium federation resume` goes on."
                )
            late = time.monotonic() > end
            gone = self.line.back()
            for future, name in [(f, n) for f, n in open_.items() if late or n in gone]:
                future.cancel()
                del open_[future]
                yield name, Answer({}, error="late" if late else "gone")

    def _mapped(self, packet: Packet) -> Body:
        """A packet's bytes as pages of a file, which the system may drop."""
        path = self.spool / "order"
        tree.write(packet, path)
        return mapped(path)

    def _path(self, site: SiteName, kind: str) -> Path:
        return self.spool / f"{site}.{kind}"


def patience(size: int) -> float:
    """Seconds after which a message that nobody confirmed is sent again."""
    return 5.0 + size / SLOWEST


def mapped(path: Path) -> Body:
    """A file that is only needed as bytes: its name is gone at once, its pages when nobody looks at them any more."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found: Body = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
    path.unlink()
    return found


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names))
