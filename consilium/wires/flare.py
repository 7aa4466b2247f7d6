"""Sites that are processes of other machines, reached through NVIDIA FLARE.

A request is a message as text and the bytes of one safetensors file, and so is an answer. What a site says of a
failure is one word of `REASONS`: its own log, which stays there, says more.
"""

from __future__ import annotations

import datetime
import mmap
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

from consilium import packet_files, tree
from consilium.errors import RunStopped
from consilium.fields import plain
from consilium.files import read_json, write_bytes
from consilium.messages import REASONS, AnswerHead, Envelope, Reply, Request, Seal, SiteFacts
from consilium.ranges import Range, Text
from consilium.run_files.origin import same_site
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.transport import packed, unpacked
from consilium.tree import Packet, PacketError, message
from consilium.weights import SiteName
from consilium.wires import held
from consilium.wires.holdings import Holdings, Versions
from consilium.wires.returns import may_return
from consilium.wires.site_wire import ABSENT, Returned, SiteWire, closing_with, facts_before

ORDER, ANSWER = "consilium.order", "consilium.answer"  # the two kinds of messages
PART = 16 << 20  # bytes that travel at once; an engine's message takes several times as much while it is on its way
SLOWEST = 125_000  # bytes per second of the slowest link that still works
ROLL_CALL = 120.0  # seconds at least: sites start their process, and make their cache
TICK = 0.5  # seconds between two looks at who has gone
ROOM = 1 << 20  # bytes a reply may be larger than its tensors: names and shapes
MISSES = 2  # rounds in a row without an answer, after which a site is asked again only when it says that it is back
ROWS = 1 << 28  # bytes of scores that are accepted
Body = bytes | memoryview  # a large one is a mapped file
Signer = Callable[[SiteName, Request, str], Seal]


@message
class OrderHead:
    """A request on its way; the answer names the order, and who may answer it the server has written down."""

    order: Annotated[str, Text(32, "[0-9a-f]{32}")]
    seconds: Annotated[float, Range(0, 1e9)]  # how long the server waits
    request: Request


@dataclass(frozen=True)
class FlareAnswer:
    """What came back from a site."""

    head: AnswerHead
    body: Body = b""

    @classmethod
    def of(cls, error: str) -> FlareAnswer:
        """There is no answer, for a reason of `REASONS`."""
        return cls(AnswerHead(error))


def read_answer(text: object, body: Body) -> FlareAnswer:
    """The server's door: an answer of the declared form, or that it is damaged."""
    try:
        return (
            FlareAnswer(tree.from_text(text, AnswerHead), body) if isinstance(text, str) else FlareAnswer.of("damaged")
        )
    except PacketError:
        return FlareAnswer.of("damaged")


class JobLink(Protocol):
    """Reaches the sites of one job."""

    def ask(self, site: SiteName, request: Request, body: Body, seconds: float, room: int) -> FlareAnswer: ...
    def give_up(self, site: SiteName) -> None: ...  # nobody waits for what this site was asked
    def heard(self) -> set[SiteName]: ...  # sites that said since the last question that they have nothing to do
    def here(self) -> set[SiteName]: ...  # sites whose processes take part in this job
    def back(self) -> set[SiteName]: ...  # sites that started again since, and wait for a new job
    def dropped(self) -> list[tuple[SiteName, str]]: ...  # messages since the last question that were not wanted
    def stopped(self) -> bool: ...


class RestartJob(Exception):
    """Sites are back: the run goes on as a new job, in which they take part."""

    def __init__(self, sites: Sequence[SiteName]) -> None:
        super().__init__(", ".join(sites))
        self.sites = list(sites)


class FlareWire(SiteWire):
    """A federation of processes that trust nothing but each other's certificates."""

    closes_early = True

    def __init__(self, study: Study, folder: RunFolder, line: JobLink, sign: Signer | None = None) -> None:
        """`sign` signs what is delivered: for a site, a request and the header of its release."""
        super().__init__(study)
        self.folder, self.line, self.sign = folder, line, sign
        self.spool = folder.path / "spool"
        self._held = Holdings()
        self._sent: dict[SiteName, int] = {}  # bytes of the last packet, after what the site holds was left out
        self._missed: Counter[SiteName] = Counter()  # requests in a row that a site did not answer in time
        self._behind: Counter[SiteName] = Counter()  # rounds in a row that closed while a site was still at work
        self._out: frozenset[SiteName] = frozenset()  # whose cards cannot be believed: they are not asked
        self._rounds = 0  # asked for in this job
        # more than one for each site: one that was given up may still be sending
        self._threads = ThreadPoolExecutor(3 * max(1, len(study.plan.sites) + len(study.plan.leave_out)))

    # ------------------------------------------------------------------------------------ roll call

    def names(self) -> tuple[list[SiteName], list[SiteName]]:
        guests = sorted(self.study.plan.leave_out)
        return sorted(name for name in self.study.plan.sites if name not in guests), guests

    def before(self) -> Mapping[str, Any]:
        began: Mapping[str, Any] = read_json(self.folder.path / "origin.json") if self.folder.begun else {}
        return began

    def call(self, names: Sequence[SiteName]) -> Iterator[tuple[SiteName, Returned]]:
        request = Request("card", self.folder.path.name)
        answers = self._ask(dict.fromkeys(names, request), {}, max(ROLL_CALL, self.study.plan.deadline), {}, {})
        return ((name, Returned(answer.head)) for name, answer in answers)

    def check_cards(self, answers: Mapping[SiteName, Returned]) -> dict[SiteName, str]:
        """One site does not end everyone's run: who cannot take part is left out, and said.

        A run begins without sites that are absent; of a run that goes on, they are members and may come back.
        """
        began = self.before()
        out = {name: why for name, answer in answers.items() if (why := self.unusable(answer) or self.mismatch(answer))}
        for name in sorted(name for name, answer in answers.items() if answer.head.error in ABSENT):
            if began:
                self.folder.note("absent", site=name)
            else:
                out[name] = f"it did not answer the roll call: {answers[name].said}"
        for name, answer in answers.items() if began else ():
            card = answer.head.card
            if card is not None and name not in out and not same_site(began["sites"][name], plain(card)):
                self._changed(name, facts_before(began["sites"][name]), card, out)
        self._out = frozenset(out)
        return out

    def _changed(self, name: SiteName, old: SiteFacts, new: SiteFacts, out: dict[SiteName, str]) -> None:
        """A site that says other things than before: it is left out, or goes on as a new one if the study allows it."""
        if not old.key or old.key == new.key:
            out[name] = "it has other cases, labels or preprocessing than when the run began"
            return
        why = "it has another key than when the run began: its memory folder was lost or replaced"
        counts = ("n", "unlabelled", "labels", "cases", "scored", "preprocessing")
        if not self.study.plan.rejoin:
            out[name] = f"{why}; a study with [study] rejoin = true lets it go on as a new site"
        elif any(getattr(old, key) != getattr(new, key) for key in counts):
            out[name] = f"{why}, and it has other cases too"
        else:
            self.rejoined[name] = why

    # ------------------------------------------------------------------------------------ the other exchanges

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        waiting = sorted(self.line.back() & self.roster.keys())
        able = len(orders.keys() & (self.line.here() - self.line.back())) >= self.study.plan.min_sites
        if waiting and (self._rounds or not able):  # a job makes at least one round, if it can
            events, now = self.folder.events(), datetime.datetime.now(datetime.UTC)
            back = [name for name in waiting if may_return(events, name, now)]
            if back:
                raise RestartJob(back)
        self._rounds += 1
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

    def _returned(self, do: str, name: SiteName, answer: FlareAnswer, room: int) -> Returned:
        """An answer's packet, from a file: there may be many sites."""
        found = Returned(answer.head, sent=self._sent.get(name))
        if answer.head.error or not len(answer.body):
            return found
        if len(answer.body) > room:
            return replace(found, why=f"{REASONS['size']} ({len(answer.body)} bytes)")
        path = self._path(name, do)
        write_bytes(answer.body, path)
        try:
            packet = packet_files.read(path)
            if self._packs:  # into a file again: there may be many sites
                here = self._held.ordered(name) if do == "train" else {}
                packet_files.write(unpacked(packet, room, here), path)
                packet = packet_files.read(path)
            return replace(found, packet=packet, came=len(answer.body) if self._packs else None)
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
        packets, headers = held.shared(packets)
        named: dict[int, dict[str, str]] = {}
        lean: dict[tuple[int, frozenset[str], int], Packet] = {}  # sites that lack the same are sent the same
        versions: dict[int, Versions] = {}  # of a lean packet: what its receivers have
        requests: dict[SiteName, Request] = {}
        less: dict[SiteName, Packet] = {}
        for name, packet in packets.items():
            names = named.get(id(packet)) or named.setdefault(id(packet), held.contents(packet))
            known = self._held.known(name, do) & frozenset(names.values())
            same = id(packet), known, id(self._held.versions(name))
            less[name] = lean.setdefault(same, held.without(packet, names, known))
            versions[id(less[name])] = self._held.versions(name)
            self._sent[name] = less[name].nbytes()
            request = head.request(do, name, self.members)
            request = replace(request, tensors=names, header=headers.get(name, ""))
            seal = self.sign(name, request, headers.get(name, packet.header)) if self.sign and do == "deliver" else None
            requests[name] = replace(request, seal=seal)
        rooms = {name: self._room(do, name, head) for name in packets}
        brought = {name: frozenset(request.tensors.values()) for name, request in requests.items()}
        answers = self._ask(requests, less, self.study.plan.deadline, rooms, versions)
        versions.clear()  # their files are gone before new ones are written
        if do == "train" and self.study.plan.compress:
            self._held.keep(packets, named, self.spool)
        return self._noting(do, brought, answers, rooms)

    def _noting(
        self,
        do: str,
        brought: Mapping[SiteName, frozenset[str]],
        answers: Iterator[tuple[SiteName, FlareAnswer]],
        rooms: Mapping[SiteName, int],
    ) -> Generator[tuple[SiteName, Returned], None, None]:
        """The answers; and what a site holds from now on."""
        open_ = set(brought)
        try:
            with closing_with(answers):
                for name, answer in answers:
                    open_.discard(name)
                    if answer.head.error:
                        self._held.forget(name)  # whatever it has now, it is sent all of it the next time
                    else:
                        self._held.confirm(name, do, brought[name])
                    yield name, self._returned(do, name, answer, rooms[name])
        finally:
            for name in open_:
                self._held.forget(name)

    def _ask(
        self,
        requests: Mapping[SiteName, Request],
        packets: Mapping[SiteName, Packet],
        seconds: float,
        rooms: Mapping[SiteName, int],
        versions: Mapping[int, Versions],
    ) -> Iterator[tuple[SiteName, FlareAnswer]]:
        """Ask every site that is here; the answers come as they come."""
        bodies: dict[int, Body] = {}  # sites that are sent the same packet share its bytes
        end = time.monotonic() + seconds

        def asking(name: SiteName) -> Callable[[], Future[FlareAnswer]]:
            packet = packets.get(name)
            if packet is not None and id(packet) not in bodies:
                bodies[id(packet)] = self._mapped(packet, versions[id(packet)])
            body = b"" if packet is None else bodies[id(packet)]
            if packet is not None and self._packs:
                self._sent[name] = len(body)
            ask: Callable[..., FlareAnswer] = self.line.ask
            request, room = requests[name], rooms.get(name, ROOM)
            return lambda: self._threads.submit(ask, name, request, body, end - time.monotonic(), room)

        self._awake()
        here = self.line.here() - self.line.back() - self._out
        resting = {n: asking(n) for n, request in requests.items() if n in here and self._rests(n, request)}
        open_ = {asking(name)(): name for name in requests if name in here and name not in resting}
        why = dict.fromkeys(self._out, "changed")
        away = {name: why.get(name, "away") for name in requests if name not in here}
        return self._counted(self._answers(away, resting, open_, end), open_)

    def _awake(self) -> set[SiteName]:
        """Sites that said since the last question that they have nothing to do."""
        heard = self.line.heard()
        for name in heard:
            self._missed.pop(name, None)
            self._behind.pop(name, None)
        return heard

    def _rests(self, site: SiteName, request: Request) -> bool:
        """Whether a site is not asked. One that a quorum did not wait for still scores, and takes its release."""
        behind = self._behind[site] if request.do == "train" else 0
        return self._missed[site] + behind >= MISSES

    def _counted(
        self, answers: Iterator[tuple[SiteName, FlareAnswer]], open_: Mapping[Future[FlareAnswer], SiteName]
    ) -> Generator[tuple[SiteName, FlareAnswer], None, None]:
        """The answers; and how often a site was waited for in vain."""
        try:
            for name, answer in answers:
                if answer.head.error in ("late", "silent"):
                    self._missed[name] += 1
                elif answer.head.error not in ("away", "resting"):
                    self._missed.pop(name, None)
                    self._behind.pop(name, None)
                yield name, answer
        finally:  # whoever is still at work when the round closes
            for name in open_.values():
                self.line.give_up(name)
                self._behind[name] += 1

    def _answers(
        self,
        away: Mapping[SiteName, str],
        resting: dict[SiteName, Callable[[], Future[FlareAnswer]]],
        open_: dict[Future[FlareAnswer], SiteName],
        end: float,
    ) -> Iterator[tuple[SiteName, FlareAnswer]]:
        """Every site's answer as it comes. A site that is gone or late is not waited for.

        A resting site that speaks up while others work is asked then: a quorum may need it.
        """
        yield from ((name, FlareAnswer.of(why)) for name, why in away.items())
        while open_:
            done, _ = wait(open_, timeout=TICK, return_when="FIRST_COMPLETED")
            for future in done:
                yield open_.pop(future), future.result()
            dropped = Counter(self.line.dropped() if self.roster else ())  # a journal begins after the roll call
            for (name, why), times in dropped.items():  # one line, however many a site sends
                self.folder.note("dropped", site=name, why=why, times=times)
            if self.line.stopped():
                raise RunStopped(
                    "the run was stopped; committed rounds are saved, `consilium federation resume` continues it."
                )
            late = time.monotonic() > end
            gone = self.line.back()
            for future, name in [(f, n) for f, n in open_.items() if late or n in gone]:
                future.cancel()
                self.line.give_up(name)
                del open_[future]
                yield name, FlareAnswer.of("late" if late else "gone")
            for name in sorted(self._awake() & resting.keys() - gone) if open_ else ():
                open_[resting.pop(name)()] = name
        yield from ((name, FlareAnswer.of("resting")) for name in resting)

    def _mapped(self, packet: Packet, versions: Versions) -> Body:
        """A packet's bytes as pages of a file, which the system may drop."""
        path = self.spool / "order"
        packet_files.write(packed(packet, self.study.plan.transport, self.study.plan.compress, versions), path)
        return mapped(path)

    @property
    def _packs(self) -> bool:
        return self.study.plan.compress or self.study.plan.transport != "exact"

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
