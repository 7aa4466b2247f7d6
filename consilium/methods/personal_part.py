"""Methods in which each site keeps a part of the network; the server averages the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from consilium.batch import Batch
from consilium.fields import check_choices
from consilium.learning.fit import Job, fit
from consilium.method import LossOfBatch, Method, message
from consilium.methods.shares import WithShares
from consilium.methods.site_models import SiteModels, personal_predictor
from consilium.predictor import Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights

SCORED = ("trained", "merged")
BatchLoss = Callable[[Any, Batch], Tensor]  # a loss of a network's output


@dataclass(frozen=True)
class PersonalPart(WithShares, Method):
    """FedAvg of a part of the network; each site keeps the rest and trains the whole network."""

    share_local_parts: bool = True  # also upload the local part, for use at all sites; always false between hospitals
    scored: str = "trained"  # a site's trained model, before averaging; "merged": with the averaged part

    headline: ClassVar[str] = "personal"
    private: ClassVar[bool] = True
    prediction: ClassVar[str] = "one per site; one where all sites annotate the same"

    @message
    class Server:
        global_: Weights  # everything except the local part
        personal: Mapping[SiteName, Weights]  # whole models as last received, before averaging; empty if not shared
        labels: Mapping[SiteName, tuple[str, ...]]
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        global_: Weights

    @message
    class Uplink:
        global_: Weights  # everything except the local part
        local: Weights | None  # the local part as trained, if it is shared
        loss: Loss
        steps: Count

    @message
    class Memory(Method.Memory):
        personal: Weights  # the whole model as trained

    @message
    class Release:
        global_: Weights | None  # where the averaged part is used
        personal: Mapping[SiteName, Weights]  # whole models, or local parts to combine with the averaged part
        labels: Mapping[SiteName, tuple[str, ...]]
        home: SiteName  # empty for a hospital outside

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method", scored=SCORED)

    @abstractmethod
    def local_names(self, task: Task) -> frozenset[str]:
        """The names of the tensors that stay at a site."""

    @abstractmethod
    def task_at(self, task: Task, labels: Sequence[str]) -> Task:
        """The task of a site that annotates these labels: the study's own, or with the method's network or loss."""

    @abstractmethod
    def site_loss(self, task: Task, labels: Sequence[str]) -> BatchLoss | None:
        """The loss of a site that annotates these labels; None: the task's."""

    @abstractmethod
    def site_models(
        self, task: Task, models: Mapping[SiteName, Weights], labels: Mapping[SiteName, tuple[str, ...]]
    ) -> SiteModels:
        """A predictor from whole models of sites; `labels` are those that each site annotates."""

    def _split(self, task: Task, weights: Weights) -> tuple[Weights, Weights]:
        """The local part, and the rest."""
        return weights.split(self.local_names(task).__contains__)

    def start(self, task: Task, roster: Roster) -> Server:
        n, labels = ({name: getattr(card, key) for name, card in roster.items()} for key in ("n", "labels"))
        common = self._split(task, self.task_at(task, task.labels).initial())[1]
        return self.Server(common, {}, labels, n)

    def remember(self, site: Site) -> Memory:
        return self.Memory(self.task_at(site.task, site.card.labels).initial())

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        task, labels = self.task_at(site.task, site.card.labels), site.card.labels
        job = Job(whole(task, got.global_, memory.personal), loss=self.site_loss(site.task, labels))
        fits = fit(replace(site, task=task), {"global": job}, round, memory.states)
        done = fits["global"]
        local, common = self._split(site.task, done.weights)
        shared = local if self.share_local_parts else None
        return self.Uplink(common, shared, done.loss, done.steps), self.Memory(done.weights, states=fits.states)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        average = self.average({name: reply.global_ for name, reply in replies.items()}, server.n, server.global_)
        came = {
            name: Weights.over({**reply.global_, **reply.local})
            for name, reply in replies.items()
            if reply.local is not None
        }
        return self.Server(average, {**server.personal, **came}, server.labels, server.n)

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        before = server.personal.get(site.name)
        local = {} if before is None else {"local": _rest(before, sent.global_)}
        return {"global": sent.global_, **local}

    def release(self, server: Server, site: SiteCard | None) -> Release:
        home = site.name if site else ""
        if self.scored == "trained":
            return self.Release(None, server.personal, server.labels, home)
        parts = {name: _rest(weights, server.global_) for name, weights in server.personal.items()}
        return self.Release(server.global_, parts, server.labels, home)

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        found = dict(released.personal)
        if memory is not None and released.home:
            found[released.home] = memory.personal
        models = {
            name: whole(self.task_at(task, task.labels), released.global_ or Weights({}), weights)
            for name, weights in sorted(found.items())
        }
        known = {name: released.labels[name] for name in models}
        return personal_predictor(self.site_models(task, models, known), released.home, released.labels)

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        loss = self.site_loss(site.task, site.card.labels) or self.task_at(site.task, site.card.labels).loss
        return lambda batch: lambda output: loss(output, batch)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        local, common = self._split(task, self.task_at(task, card.labels).shape())
        return self.Uplink(common, local if self.share_local_parts else None, 0.0, 0)


def whole(task: Task, common: Weights, own: Weights) -> Weights:
    """A whole model in the network's order; tensors in `common` replace the site's own."""
    return Weights.over({name: common[name] if name in common else own[name] for name in task.shape()})


def _rest(weights: Weights, common: Weights) -> Weights:
    return weights.split(lambda name: name not in common)[0]
