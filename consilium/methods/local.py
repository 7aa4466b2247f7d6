"""Local training: each hospital trains alone, without a federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.errors import NotForOutsiders, StudyError
from consilium.learning.fit import Job, fit
from consilium.method import Best, Method, Valid, message
from consilium.predictor import OneModel, Predictor, WithOthers
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class LocalTraining(Method):
    """Each site trains its own model; with `share_local_parts` the other sites can score it."""

    share_local_parts: bool = True  # the site also uploads its model, to be scored elsewhere; never between hospitals

    paper: ClassVar[str] = "the lower bound of every table"
    private: ClassVar[bool] = True
    headline: ClassVar[str] = "local"
    alone: ClassVar[bool] = True

    @message
    class Server:
        local: Mapping[SiteName, Weights]  # as last received; empty if they are not shared

    @message
    class Downlink:
        pass

    @message
    class Uplink:
        local: Weights | None
        loss: Loss
        steps: Count

    @message
    class Memory(Method.Memory):
        local: Weights

    @message
    class Release:
        local: Mapping[SiteName, Weights]
        home: SiteName  # empty for a hospital outside

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server({})

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        if self.share_local_parts and local.batchnorm != "average":
            raise StudyError(
                f"[local] batchnorm = '{local.batchnorm}' keeps normalisation at its site, so local models cannot be "
                "tried elsewhere; set share_local_parts = false in [method], or batchnorm = 'average'."
            )
        return []

    def remember(self, site: Site) -> Memory:
        return self.Memory(site.task.initial())

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink()

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        fits = fit(site, {"local": Job(memory.local)}, round, memory.states)
        done = fits["local"]
        shared = done.weights if self.share_local_parts else None
        return self.Uplink(shared, done.loss, done.steps), self.Memory(done.weights, states=fits.states)

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        return {"local": server.local[site.name]} if site.name in server.local else {}

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        return self.Server({**server.local, **{name: r.local for name, r in replies.items() if r.local is not None}})

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.local, site.name if site else "")

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        models = {name: OneModel(task, w, "local", name, "trained") for name, w in sorted(released.local.items())}
        if released.home in models:
            own: Predictor = models.pop(released.home)
        elif memory is not None:
            own = OneModel(task, memory.local, "local", released.home, "trained")
        elif models:
            return WithOthers(OutsideHospital(), elsewhere=tuple(models.values()))
        else:
            raise NotForOutsiders("local models were not shared, so there is none for an outside hospital.")
        return WithOthers(own, elsewhere=tuple(models.values()))

    def keep(self, best: Best, now: Best) -> Best:
        """Each site keeps its own best round; models that are not shared keep the best round of all sites together."""
        if not self.share_local_parts:
            return super().keep(best, now)
        local, valid = each_best(best.server.local, best.valid, now.server.local, now.valid, "local")
        return Best(self.Server(local), valid, now.merged)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        return self.Uplink(task.shape() if self.share_local_parts else None, 0.0, 0)


def each_best(
    best: Mapping[SiteName, Weights],
    best_valid: Mapping[str, Valid],
    now: Mapping[SiteName, Weights],
    now_valid: Mapping[str, Valid],
    model: str,
) -> tuple[dict[SiteName, Weights], dict[str, Valid]]:
    """Each site's own model at the round with its best validation score, and those scores."""
    kept, valid = dict(best), dict(best_valid)
    for name, weights in now.items():
        key = f"{model}/{name}"
        if key not in now_valid and key not in valid:
            kept[name] = weights  # without validation cases: the latest
        elif key in now_valid and (key not in valid or now_valid[key].value > valid[key].value):
            kept[name], valid[key] = weights, now_valid[key]
    return kept, valid


class OutsideHospital(Predictor):
    """An outside hospital has no local model of its own; it can only use those of the sites."""

    model, of, when = "local", "", "trained"

    def answer(self, images: Any, volume: bool = False) -> Any:
        raise NotForOutsiders("local training has no model for an outside hospital; name one with --site.")
