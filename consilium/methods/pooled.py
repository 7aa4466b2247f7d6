"""Pooled training: all cases in one place. Hospitals may not do this; it is the upper bound in tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.learning.fit import Job, fit
from consilium.method import Method, message
from consilium.predictor import OneModel, Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class Pooled(Method):
    """Local training on one virtual site that holds all training cases."""

    paper: ClassVar[str] = "the upper bound of every table (Centralized)"
    private: ClassVar[bool] = True
    headline: ClassVar[str] = "pooled"
    deployable: ClassVar[bool] = False
    pooled: ClassVar[bool] = True

    @message
    class Server:
        pooled: Weights

    @message
    class Downlink:
        pass

    @message
    class Uplink:
        pooled: Weights
        loss: Loss
        steps: Count

    @message
    class Memory(Method.Memory):
        pooled: Weights

    @message
    class Release:
        pooled: Weights

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial())

    def remember(self, site: Site) -> Memory:
        return self.Memory(site.task.initial())

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink()

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        fits = fit(site, {"pooled": Job(memory.pooled)}, round, memory.states)
        done = fits["pooled"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(done.weights, states=fits.states)

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        return {"pooled": server.pooled}

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        (reply,) = replies.values()
        return self.Server(reply.pooled)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.pooled)

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        return OneModel(task, released.pooled, "pooled", when="trained")
