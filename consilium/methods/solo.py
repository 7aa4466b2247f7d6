"""SOLO: each site trains a model of its own organs alone; together the models predict all organs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.errors import NotForOutsiders
from consilium.learning.fit import Job, fit
from consilium.method import Best, Method, message
from consilium.methods.local import each_best
from consilium.methods.merged import MergedModel, check_exclusive
from consilium.predictor import Predictor, WithOthers
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class Solo(Method):
    """Each site trains a model of its own organs and background; together the models predict all organs."""

    share_local_parts: bool = True  # the site also uploads its model, to predict all organs; never between hospitals

    paper: ClassVar[str] = "Jiang et al., UFPS (Patterns 2024), where it is the bound of partial labels"
    private: ClassVar[bool] = True
    headline: ClassVar[str] = "solo"
    alone: ClassVar[bool] = True
    prediction: ClassVar[str] = "one per site"

    @message
    class Server:
        teachers: Mapping[SiteName, Weights]  # as last received; empty if they are not shared
        labels: Mapping[SiteName, tuple[str, ...]]

    @message
    class Downlink:
        pass

    @message
    class Uplink:
        teacher: Weights | None  # background and the site's organs
        loss: Loss
        steps: Count

    @message
    class Memory(Method.Memory):
        teacher: Weights

    @message
    class Release:
        teachers: Mapping[SiteName, Weights]
        labels: Mapping[SiteName, tuple[str, ...]]
        home: SiteName  # empty for a hospital outside

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        check_exclusive(task, local.batchnorm, "SOLO")
        return []

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server({}, {name: card.labels for name, card in roster.items()})

    def remember(self, site: Site) -> Memory:
        return self.Memory(site.task.initial("teacher", site.card.labels))

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink()

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        job = Job(memory.teacher, kind="teacher", labels=site.card.labels)
        fits = fit(site, {"teacher": job}, round, memory.states)
        done = fits["teacher"]
        shared = done.weights if self.share_local_parts else None
        return self.Uplink(shared, done.loss, done.steps), self.Memory(done.weights, states=fits.states)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        came = {name: reply.teacher for name, reply in replies.items() if reply.teacher is not None}
        return self.Server({**server.teachers, **came}, server.labels)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.teachers, server.labels, site.name if site else "")

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        models = dict(released.teachers)
        if memory is not None and released.home:
            models.setdefault(released.home, memory.teacher)
        if not models:
            raise NotForOutsiders("the sites' models were not shared, so there is none for an outside hospital.")
        alone = {
            name: MergedModel(task, {name: weights}, released.labels, "teacher", name)
            for name, weights in sorted(models.items())
        }
        own = alone.pop(released.home, None)
        together = MergedModel(task, models, released.labels, "solo")
        return WithOthers(together, () if own is None else (own,), tuple(alone.values()))

    def keep(self, best: Best, now: Best) -> Best:
        """Keep each site's own best round; models that are not shared keep the best round of all sites together."""
        if not self.share_local_parts:
            return super().keep(best, now)
        teachers, valid = each_best(best.server.teachers, best.valid, now.server.teachers, now.valid, "teacher")
        return Best(self.Server(teachers, now.server.labels), valid, now.merged)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        return self.Uplink(task.shape("teacher", card.labels) if self.share_local_parts else None, 0.0, 0)
