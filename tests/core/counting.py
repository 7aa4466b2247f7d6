"""A method of one number and a wire without hospitals: the loop can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from consilium import engine
from consilium.errors import NotForOutsiders
from consilium.messages import SCORED, Envelope, Reply, RollCall, ScoredModel, SiteFacts
from consilium.method import Method, Phase, message
from consilium.predictor import Predictor
from consilium.run_folder import RunFolder
from consilium.score_sheets import WHOLE, Score, make_sheet
from consilium.site import Round, SiteCard
from consilium.study import Study
from consilium.task import Task
from consilium.tree import Packet, flatten, unflatten
from consilium.weights import SiteName
from tests.toy import toy_study


@dataclass(frozen=True)
class Counting(Method):
    """Every site adds its cases to x; the server takes the mean over those that answered."""

    after: int = 0  # rounds of a last phase that starts from the best state and does not count
    teacher: int = 0  # rounds of a first phase that does not count

    paper: ClassVar[str] = "none"
    headline: ClassVar[str] = "global"

    @message
    class Server:
        x: float
        rounds: int

    @message
    class Downlink:
        x: float

    @message
    class Uplink:
        x: float
        loss: float

    @message
    class Release:
        x: float
        home: str

    def phases(self, rounds: int) -> list[Phase]:
        teacher = [Phase("teacher", self.teacher, counts=False)] if self.teacher else []
        after = [Phase("after", self.after, counts=False, from_best=True)] if self.after else []
        return [*teacher, Phase("train", rounds), *after]

    def start(self, task: Task, roster: Any) -> Server:
        return self.Server(0.0, 0)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.x)

    def train(self, site: Any, memory: Any, got: Downlink, round: Round) -> tuple[Uplink, Any]:
        raise NotImplementedError("the wire answers")

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        return self.Server(sum(reply.x for reply in replies.values()) / len(replies), server.rounds + 1)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.x, site.name if site else "outside")

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        raise NotForOutsiders("the wire scores")


@dataclass
class Desk:
    """A wire that answers for every site: `x + n`; it records what it was asked."""

    n: Mapping[SiteName, int]
    guests: tuple[SiteName, ...] = ()
    value: Callable[[int, str, str], float | None] = lambda round, site, split: 0.5  # a score by round, site, split
    reply: Callable[[SiteName, Envelope, Reply], Reply] = lambda site, head, reply: reply
    silent: Callable[[int, str], bool] = lambda round, site: False  # whether a site's scores never come
    backwards: bool = False  # the replies come in the opposite order
    asked: list[tuple[int, list[SiteName]]] = field(default_factory=list)
    orders: list[dict[SiteName, float]] = field(default_factory=list)
    scored: list[tuple[int, str, dict[SiteName, Any]]] = field(default_factory=list)
    delivered: dict[SiteName, Any] = field(default_factory=dict)
    closed: int = 0
    closes_early: bool = False

    def roll_call(self) -> RollCall:
        members = {name: SiteCard(name, i, self.n[name], ("blob",)) for i, name in enumerate(sorted(self.n))}
        audience = {name: name in self.guests for name in sorted((*members, *self.guests))}
        facts = SiteFacts(1, 0, ("blob",), 3, {"valid": 1, "test": 1}, "", "", "1", "", "")
        return RollCall(members, audience, {n: replace(facts, n=self.n.get(n, 0)) for n in audience})

    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        got = {name: unflatten(order, Counting.Downlink).x for name, order in orders.items()}
        self.asked.append((head.round.number, sorted(orders)))
        self.orders.append(got)
        for name in sorted(orders, reverse=self.backwards):
            packet = flatten(Counting.Uplink(got[name] + self.n[name], 1.0))
            yield name, self.reply(name, head, Reply(packet, 0.25, memory_mb=10.0))

    def score(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]:
        released = {name: unflatten(packet, Counting.Release) for name, packet in releases.items()}
        number = head.round.number
        self.scored.append((number, head.round.phase, released))
        for name in released:
            if not self.silent(number, name):
                yield name, Reply(flatten(make_sheet(self._scores(name, number))))

    def _scores(self, site: SiteName, number: int) -> Iterator[Score]:
        model = ScoredModel("global", "", "merged")
        for split in SCORED:
            value = self.value(number, site, split)
            if value is not None:
                yield Score(model, split, f"{split} case", WHOLE, "blob", "dice", value)

    def deliver(self, releases: Mapping[SiteName, Packet], head: Envelope) -> tuple[SiteName, ...]:
        self.delivered = {name: unflatten(packet, Counting.Release) for name, packet in releases.items()}
        return ()

    def close(self) -> None:
        self.closed += 1


SITES = {"ada": 1, "bea": 2, "cid": 6}


def counting_study(federation: Path, after: int = 0, teacher: int = 0, **plan: Any) -> Study:
    study = toy_study(federation)
    changed = replace(study.plan, **{"rounds": 3, "score_every": 1, **plan})
    return replace(study, method=Counting(after, teacher), method_name="tests.core.counting:Counting", plan=changed)


def go(study: Study, desk: Desk, runs: Path, watch: Any = None) -> RunFolder:
    """Run, or go on with, a study of the counting method."""
    folder = RunFolder.create(study, runs, watch)
    engine.run(study, desk, folder)
    return folder
