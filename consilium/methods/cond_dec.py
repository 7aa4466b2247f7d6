"""Cond-dec: one shared model whose decoder gets the index of the site as an input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.fields import check_from_zero
from consilium.learning.fit import Job, fit
from consilium.method import LossOfBatch, Method, message
from consilium.methods.fedavg_foreground import STUDY, check_foreground, foreground_only
from consilium.methods.shares import WithShares
from consilium.methods.site_models import SiteModels, own_channels
from consilium.networks.conditioned import Conditioned, decoder_norms
from consilium.predictor import Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class CondDec(WithShares, Method):
    """FedAvg on the foreground. The decoder gets the site's index after each normalisation layer; one pass per site."""

    scale: float = 1.0  # of the index beside the normalisation's output; 0 is fedavg-foreground

    paper: ClassVar[str] = f"Dmitriev and Kaufman, Conditional ConvNets (CVPR 2019), as in {STUDY}, figure 2 B"
    headline: ClassVar[str] = "global"
    private: ClassVar[bool] = True
    prediction: ClassVar[str] = "one per site"
    differences: ClassVar[tuple[str, ...]] = (
        "The index of site i of K is (i + 1) / K times the mean magnitude of the normalisation's output on that image; "
        "the paper gives neither the hash nor the scale.",
        "The original conditions on the organ; UFPS, and so this method, on the site.",
        "Background, about which nothing is learned, is where no organ's logit is positive.",
    )

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]
        labels: Mapping[SiteName, tuple[str, ...]]

    @message
    class Downlink:
        global_: Weights

    @message
    class Uplink:
        global_: Weights
        loss: Loss  # mean training loss of the round
        steps: Count

    @message
    class Release:
        global_: Weights
        labels: Mapping[SiteName, tuple[str, ...]]  # by site; their order gives the index

    def __post_init__(self) -> None:
        super().__post_init__()
        check_from_zero(self, "method", "scale")

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        check_foreground(task, "cond-dec")
        with torch.device("meta"):
            decoder_norms(task.network())
        return []

    def start(self, task: Task, roster: Roster) -> Server:
        n, labels = ({name: getattr(card, key) for name, card in roster.items()} for key in ("n", "labels"))
        return self.Server(task.initial(), n, labels)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_)

    def train(self, site: Site, memory: Any, got: Downlink, round: Round) -> tuple[Uplink, Any]:
        told = conditioned(site.task, self.scale * index_of(site.card.index, len(site.roster)))
        fits = fit(replace(site, task=told), {"global": Job(got.global_)}, round, memory.states)
        done = fits["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(states=fits.states)

    def merge(self, server: Server, replies: Mapping[SiteName, Any], round: Round) -> Server:
        average = self.average({name: reply.global_ for name, reply in replies.items()}, server.n, server.global_)
        return self.Server(average, server.n, server.labels)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.global_, server.labels)

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        places = {name: index_of(i, len(released.labels)) for i, name in enumerate(sorted(released.labels))}

        def output(name: SiteName, images: Tensor) -> Tensor:
            told = conditioned(task, self.scale * places[name])
            return own_channels(told, told.infer(released.global_, images), released.labels[name])

        return SiteModels(foreground_only(task), output, released.labels, "merged", "global")

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        return lambda batch: partial(foreground_only(site.task).loss, batch=batch)


def index_of(place: int, sites: int) -> float:
    """The constant of a site, in (0, 1]. No site has 0, which means: no index."""
    return (place + 1) / sites


@lru_cache(maxsize=64)
def conditioned(task: Task, constant: float) -> Task:
    """The foreground task with a network that gets this constant."""
    only: Any = foreground_only(task)
    return replace(only, model=Conditioned(only.model, constant))  # type: ignore[no-any-return]
