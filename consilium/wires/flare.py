"""Sites that are processes of other machines, reached through NVIDIA FLARE.

A request is a message as text and the bytes of one safetensors file, and so is an answer. What a site says of a
failure is one word of `REASONS`: its own log, which stays there, says more.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from consilium import tree
from consilium.errors import StudyError, WireError, WorkError
from consilium.fields import plain
from consilium.files import read_json, write_bytes
from consilium.messages import REASONS, AnswerHead, Envelope, Reply, Request
from consilium.run_folder import RunFolder, same_site
from consilium.study import Study
from consilium.tree import Packet, PacketError, Range, Text, message
from consilium.weights import SiteName
from consilium.wires import held
from consilium.wires.site_wire import ABSENT, Returned, SiteWire

ORDER, ANSWER = "consilium.order", "consilium.answer"  # the two kinds of messages
SLOWEST = 125_000  # bytes per second of the slowest link that still works
ROLL_CALL = 120.0  # seconds at least: sites start their process, and make their cache
TICK = 0.5  # seconds between two looks at who has gone
ROOM = 1 << 20  # bytes a reply may be larger than its tensors: names and shapes
ROWS = 1 << 28  # bytes of scores that are accepted
Body = bytes | memoryview  # a large one is a mapped file


@message
class Ordered:
    """A request on its way; the answer names the order, and who may answer it the server has written down."""

    order: Annotated[str, Text(32, "[0-9a-f]{32}")]
    seconds: Annotated[float, Range(0, 1e9)]  # how long the server waits
    request: Request


@dataclass(frozen=True)
class Answer:
    """What came back from a site."""

    head: AnswerHead
    body: Body = b""

    @classmethod
    def of(cls, error: str) -> Answer:
        """There is no answer, for a reason of `REASONS`."""
        return cls(AnswerHead(error))


def read_answer(text: object, body: Body) -> Answer:
    """The server's door: an answer of the declared form, or that it is damaged."""
    try:
        return Answer(tree.from_text(text, AnswerHead), body) if isinstance(text, str) else Answer.of("damaged")
    except PacketError:
        return Answer.of("damaged")


class Line(Protocol):
    """Reaches the sites of one job."""

    def ask(self, site: SiteName, request: Request, body: Body, seconds: float, room: int) -> Answer: ...
    def here(self) -> set[SiteName]: ...  # sites whose processes take part in this job
    def back(self) -> set[SiteName]: ...  # sites that started again since, and wait for a new job
    def dropped(self) -> list[tuple[SiteName, str]]: ...  # messages since the last question that were not wanted
    def stopped(self) -> bool: ...


class GoOn(Exception):
    """A site is back: the run goes on as a new job, in which it takes part."""


class FlareWire(SiteWire):
    """A federation of processes that trust nothing but each other's certificates."""

    def __init__(self, study: Study, folder: RunFolder, line: Line) -> None:
        super().__init__(study)
        self.folder, self.line = folder, line
        self.spool = folder.path / "spool"
        self._held: dict[SiteName, dict[str, frozenset[str]]] = {}  # by what was asked: contents a site has confirmed
        self._sent: dict[SiteName, int] = {}  # bytes of the last packet, after what the site holds was left out
        self._threads = ThreadPoolExecutor(max(1, len(study.plan.sites) + len(study.plan.leave_out)))

    # ------------------------------------------------------------------------------------ roll call

    def names(self) -> tuple[list[SiteName], list[SiteName]]:
        guests = sorted(self.study.plan.leave_out)
        return sorted(name for name in self.study.plan.sites if name not in guests), guests

    def before(self) -> Mapping[str, Any]:
        began: Mapping[str, Any] = read_json(self.folder.path / "origin.json") if self.folder.begun else {}
        return began

    def call(self, names: Sequence[SiteName]) -> Iterator[tuple[SiteName, Returned]]:
        request = Request("card", self.folder.path.name)
        answers = self._ask(dict.fromkeys(names, request), {}, max(ROLL_CALL, self.study.plan.deadline), {})
        return ((name, Returned(answer.head)) for name, answer in answers)

    def check_cards(self, answers: Mapping[SiteName, Returned]) -> dict[SiteName, str]:
        """One site does not end everyone's run: whose card cannot be believed is left out, and said."""
        began = self.before()
        out = {name: why for name, answer in answers.items() if (why := self.unusable(answer))}
        told = [why for name, answer in answers.items() if name not in out and (why := self.mismatch(name, answer))]
        if told:
            raise StudyError("\n".join(told))
        absent = sorted(name for name, answer in answers.items() if answer.head.error in ABSENT)
        if absent and not began:
            raise WireError(
                f"{', '.join(absent)} did not answer the roll call, and a run begins with all its sites. Start them "
                "with `consilium federation site`, or leave them out with study.sites, then submit again."
            )
        for name in absent:
            self.folder.note("absent", site=name)
        for name, answer in answers.items() if began else ():
            card = answer.head.card
            if card is not None and name not in out and not same_site(began["sites"][name], plain(card)):
                out[name] = "it has other cases, labels or preprocessing than when the run began"
        return out

    # ------------------------------------------------------------------------------------ the other exchanges

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        waiting = sorted(self.line.back() & self.roster.keys())
        if waiting:
            raise GoOn(", ".join(waiting))
        return super().train(orders, head)

    def _room(self, do: str, name: SiteName, head: Envelope) -> int:
        """The largest answer that is taken in."""
        if do != "train":
            return ROWS if do == "score" else ROOM
        expected = self.study.method.blank(self.study.task, self.roster, self.roster[name], head.round)
        return tree.flatten(expected).nbytes() + ROOM if expected is not None else ROOM

    def lost(self, do: str, site: SiteName, answer: Returned) -> None:
        """The engine says of training and scores that they are missing."""
        if do == "deliver":
            self.folder.note("undelivered", site=site, why=answer.said)

    def _returned(self, do: str, name: SiteName, answer: Answer, room: int) -> Returned:
        """An answer's packet, from a file: there may be many sites."""
        found = Returned(answer.head, sent=self._sent.get(name))
        if answer.head.error or not len(answer.body):
            return found
        if len(answer.body) > room:
            return replace(found, why=f"{REASONS['size']} ({len(answer.body)} bytes)")
        path = self._path(name, do)
        write_bytes(answer.body, path)
        try:
            return replace(found, packet=tree.read(path))
        except PacketError:
            return replace(found, why=f"{REASONS['damaged']} ({len(answer.body)} bytes)")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self.spool, ignore_errors=True)

    # ------------------------------------------------------------------------------------ asking

    def exchange(
        self, do: str, packets: Mapping[SiteName, Packet], head: Envelope
    ) -> Iterator[tuple[SiteName, Returned]]:
        """Requests out; the packets are not held on to while the answers are waited for."""
        self.spool.mkdir(parents=True, exist_ok=True)
        named: dict[int, dict[str, str]] = {}
        lean: dict[tuple[int, frozenset[str]], Packet] = {}  # sites that lack the same are sent the same
        requests: dict[SiteName, Request] = {}
        less: dict[SiteName, Packet] = {}
        for name, packet in packets.items():
            names = named.get(id(packet)) or named.setdefault(id(packet), held.contents(packet))
            known = self._known(name, do) & frozenset(names.values())
            less[name] = lean.setdefault((id(packet), known), held.without(packet, names, known))
            self._sent[name] = less[name].nbytes()
            requests[name] = replace(head.request(do, name, self.members), tensors=names)
        rooms = {name: self._room(do, name, head) for name in packets}
        brought = {name: frozenset(request.tensors.values()) for name, request in requests.items()}
        answers = self._noting(do, brought, self._ask(requests, less, self.study.plan.deadline, rooms))
        return ((name, self._returned(do, name, answer, rooms[name])) for name, answer in answers)

    def _noting(
        self, do: str, brought: Mapping[SiteName, frozenset[str]], answers: Iterator[tuple[SiteName, Answer]]
    ) -> Iterator[tuple[SiteName, Answer]]:
        """The answers; and what a site holds from now on."""
        for name, answer in answers:
            if answer.head.error:
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
        requests: Mapping[SiteName, Request],
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
            open_[self._threads.submit(ask, name, request, body, seconds, rooms.get(name, ROOM))] = name
        return self._answers([name for name in requests if name not in here], open_, time.monotonic() + seconds)

    def _answers(
        self, away: Sequence[SiteName], open_: dict[Future[Answer], SiteName], end: float
    ) -> Iterator[tuple[SiteName, Answer]]:
        """Every site's answer as it comes; who is gone or late is not waited for."""
        yield from ((name, Answer.of("away")) for name in away)
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
                yield name, Answer.of("late" if late else "gone")

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
