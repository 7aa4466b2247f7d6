"""FedAvg-local: the copy each site has trained, before it is averaged away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from consilium.learning.fit import Job, fit
from consilium.method import Method, message
from consilium.site import OneModel, Predictor, Roster, Round, Site, SiteCard, Task, WithOthers
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class FedAvgLocal(Method):
    """FedAvg, in which a site uses its locally trained copy of the shared model."""

    paper: ClassVar[str] = "Luo & Wu, Adapt to adaptation (IJCAI 2022), where it is a baseline"
    headline: ClassVar[str] = "personal"

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        global_: Weights

    @message
    class Uplink:
        global_: Weights
        loss: float
        steps: int

    @message
    class Memory:
        personal: Weights  # as trained in the last round; nothing is learned from it

    @message
    class Release:
        global_: Weights
        home: SiteName

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial(), {name: card.n for name, card in roster.items()})

    def remember(self, site: Site) -> Memory:
        return self.Memory(site.task.initial())

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        done = fit(site, {"global": Job(got.global_)}, round)["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(done.weights)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        return self.Server(mean({name: reply.global_ for name, reply in replies.items()}, server.n), server.n)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.global_, site.name if site else "")

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        common = OneModel(task, released.global_, "global")
        if memory is None or not released.home:
            return common
        return WithOthers(OneModel(task, memory.personal, "personal", released.home, "trained"), (common,))
