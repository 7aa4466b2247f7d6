"""SCAFFOLD: control variates correct every local step for the drift of the site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.learning.optimizers import learning_rate
from consilium.local_training import Local
from consilium.method import Method, message
from consilium.methods.shares import WithAggregation
from consilium.predictor import OneModel, Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class Scaffold(WithAggregation, Method):
    """Control variates correct every local step for the drift of the site (option II, plain SGD).

    y ← y − η (∇f(y) − c_i + c), then c_i ← c_i − c + (x − y) / (steps η).
    """

    lr: float = 0.0  # η; 0 takes the study's [local] lr

    paper: ClassVar[str] = "Karimireddy et al., SCAFFOLD: stochastic controlled averaging (ICML 2020)"
    private: ClassVar[bool] = True
    headline: ClassVar[str] = "global"
    optimizer_state: ClassVar[str] = "fresh"  # plain SGD has no state
    steady: ClassVar[bool] = False  # control variates correct the direction of honest sites
    differences: ClassVar[tuple[str, ...]] = (
        "The server's learning rate is 1.",
        "Only plain SGD is accepted: with Adam (x − y) / (steps η) is not a mean gradient.",
    )

    @message
    class Server:
        global_: Weights  # x
        c: Weights  # the mean of the sites' control variates
        sites: int  # N, of all sites of the run

    @message
    class Downlink:
        global_: Weights
        c: Weights

    @message
    class Uplink:
        global_: Weights  # y
        c_change: Weights  # c_i⁺ − c_i
        loss: Loss
        steps: Count

    @message
    class Memory:
        c: Weights  # c_i

    @message
    class Release:
        global_: Weights

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf:
            raise StudyError(f"[method] lr = {self.lr}: it must be positive, or 0 for the study's [local] lr.")

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        if local.optimizer != "sgd" or local.momentum or local.weight_decay or local.clip:
            raise StudyError(
                "SCAFFOLD is defined for plain SGD; set local.optimizer = 'sgd', local.momentum = 0, "
                "local.weight_decay = 0 and local.clip = 0 (and a learning rate to suit, for instance method.lr = 0.1)."
            )
        return []

    def remember(self, site: Site) -> Memory:
        return self.Memory(_no_drift(site.task))

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial(), _no_drift(task), len(roster))

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_, server.c)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        lr = self.lr or learning_rate(site.local, round)
        done = fit(site, {"global": Job(got.global_, correct=got.c - memory.c, lr=lr)}, round)["global"]
        moved, _ = (got.global_ - done.weights).split(got.c.__contains__)
        c = memory.c - got.c + moved / (done.steps * lr)
        return self.Uplink(done.weights, c - memory.c, done.loss, done.steps), self.Memory(c)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        models = {name: reply.global_ for name, reply in replies.items()}
        changes = {name: reply.c_change for name, reply in replies.items()}
        change = self.alike_average(changes, server.c.zeros())
        return self.Server(
            self.alike_average(models, server.global_),
            server.c + change * (len(replies) / server.sites),
            server.sites,
        )

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.global_)

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        return OneModel(task, released.global_, "global")

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        shape = task.shape()
        drift, _ = shape.split(task.parameters().__contains__)
        return self.Uplink(shape, drift, 0.0, 0)


def _no_drift(task: Task) -> Weights:
    """Zero for every parameter; statistics have no gradient, so no control variate."""
    parameters, _ = task.initial().split(task.parameters().__contains__)
    return parameters.zeros()
