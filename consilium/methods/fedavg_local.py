"""FedAvg-local: each site uses its trained copy of the shared model, before averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from consilium.learning.fit import Job, fit
from consilium.method import PersonalModel, message
from consilium.methods.shares import WithShares
from consilium.site import Count, Loss, Roster, Round, Site
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class FedAvgLocal(WithShares, PersonalModel):
    """FedAvg, in which a site uses its locally trained copy of the shared model."""

    paper: ClassVar[str] = "Luo & Wu, Adapt to adaptation (IJCAI 2022), where it is a baseline"
    private: ClassVar[bool] = True

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]

    @message
    class Uplink:
        global_: Weights
        loss: Loss
        steps: Count

    @message
    class Memory(PersonalModel.Memory):
        personal: Weights  # as trained in the last round; training never starts from it

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial(), {name: card.n for name, card in roster.items()})

    def remember(self, site: Site) -> Memory:
        return self.Memory(site.task.initial())

    def train(self, site: Site, memory: Memory, got: PersonalModel.Downlink, round: Round) -> tuple[Uplink, Memory]:
        fits = fit(site, {"global": Job(got.global_)}, round, memory.states)
        done = fits["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(done.weights, states=fits.states)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        models = {name: reply.global_ for name, reply in replies.items()}
        return self.Server(self.average(models, server.n, server.global_), server.n)
