"""FedAMP and HeurFedAMP: each site's model is pulled towards a mixture of all models, weighted by similarity."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.errors import NotForOutsiders
from consilium.fields import check_from_zero
from consilium.learning.fit import fit
from consilium.method import Method, message
from consilium.methods.fedprox import proximal_job
from consilium.methods.peers import check_peers
from consilium.predictor import OneModel, Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class Attentive(Method):
    """The server sends each site its mixture u_i = Σ_j ξ_ij w_j. The site trains from it and stays near it."""

    strength: float = 1.0  # λ/α: the site's loss gains (strength/2) ‖w − u_i‖²

    headline: ClassVar[str] = "personal"

    @message
    class Server:
        personal: Mapping[SiteName, Weights]  # w_i as last received; the start, if a site has never answered
        attention: Mapping[SiteName, Mapping[SiteName, float]]
        parameters: tuple[str, ...]  # the tensors that are compared: not the statistics of normalisation layers

    @message
    class Downlink:
        personal: Weights  # u_i

    @message
    class Uplink:
        personal: Weights  # w_i
        loss: Loss
        steps: Count

    @message
    class Release:
        personal: Weights | None  # the site's own; none for a hospital outside
        home: SiteName

    @abstractmethod
    def attention(self, products: Tensor) -> Tensor:
        """ξ (sites, sites) from the inner products ⟨w_i, w_j⟩."""

    def __post_init__(self) -> None:
        check_from_zero(self, "method", "strength")

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        check_peers(0, roster)
        return []

    def start(self, task: Task, roster: Roster) -> Server:
        return self._server(dict.fromkeys(sorted(roster), task.initial()), tuple(sorted(task.parameters())))

    def _server(self, personal: Mapping[SiteName, Weights], parameters: tuple[str, ...]) -> Server:
        names = sorted(personal)
        shares = self.attention(products([personal[name] for name in names], parameters)).tolist()
        return self.Server(personal, {name: dict(zip(names, row)) for name, row in zip(names, shares)}, parameters)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(mean(server.personal, server.attention[site.name]))

    def train(self, site: Site, memory: Any, got: Downlink, round: Round) -> tuple[Uplink, Any]:
        fits = fit(site, {"personal": proximal_job(site, got.personal, self.strength)}, round, memory.states)
        done = fits["personal"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(states=fits.states)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        latest = {**server.personal, **{name: reply.personal for name, reply in replies.items()}}
        return self._server(latest, server.parameters)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.personal[site.name] if site else None, site.name if site else "")

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        if released.personal is None:
            raise NotForOutsiders("every model of this method is one site's own; name a site with --site.")
        return OneModel(task, released.personal, "personal", released.home, "trained")


def products(models: Sequence[Weights], names: Sequence[str]) -> Tensor:
    """Inner products of all pairs (models, models), in double precision; one tensor of every model at a time."""
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name in names:
        rows = torch.stack([model[name].reshape(-1).double() for model in models])
        total += rows @ rows.T
    return total
