"""FedFomo: each site moves towards the models that do better than its own on its validation cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from consilium.errors import NotForOutsiders, StudyError
from consilium.learning.fit import Job, fit
from consilium.local_training import Local
from consilium.method import Method, message
from consilium.methods.peers import asked, check_peers, drawn, first_wants, peers_of
from consilium.predictor import OneModel, Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard, SiteIds
from consilium.task import Task
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class FedFomo(Method):
    """Each site moves towards the models that do better on its validation cases: θ ← θ + Σ_n w_n (θ_n − θ).

    w_n ∝ max(0, (L(θ) − L(θ_n)) / ‖θ_n − θ‖), θ the model before the last local training, which is among the θ_n.
    """

    budget: int = 0  # M: how many other models a site downloads per round; 0: all
    explore: float = 0.3  # ε: probability of downloading M at random instead of those that helped most

    paper: ClassVar[str] = "Zhang et al., Personalized FL with first order model optimization (ICLR 2021)"
    headline: ClassVar[str] = "personal"
    differences: ClassVar[tuple[str, ...]] = (
        "The distance is the Euclidean norm, as the paper prints it; the authors' code takes the L1 norm by default.",
        "The site keeps its affinities and asks for peers by name; in the paper the server knows them.",
        "ε is constant; in the authors' code it falls.",
    )

    @message
    class Server:
        personal: Mapping[SiteName, Weights]  # as last received; the start, if a site has never answered
        wants: Mapping[SiteName, tuple[SiteName, ...]]

    @message
    class Downlink:
        personal: Mapping[SiteName, Weights]  # those asked for; none in the first round, when all are equal

    @message
    class Uplink:
        personal: Weights
        wants: SiteIds  # the peers whose models it asks for next, in name order
        loss: Loss
        steps: Count

    @message
    class Memory(Method.Memory):
        before: Weights  # θ, where the last local training started
        personal: Weights  # and where it ended
        affinity: Mapping[SiteName, float]  # sums of (L(θ) − L(θ_n)) / ‖θ_n − θ‖ over the rounds

    @message
    class Release:
        home: SiteName  # no model: the site has its own

    def __post_init__(self) -> None:
        if self.budget < 0 or not 0 <= self.explore <= 1:
            raise StudyError("[method] budget must be a number from 0 up, explore in [0, 1].")

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_peers(self.budget, roster)
        if local.batchnorm != "average":
            raise StudyError(f"[local] batchnorm = '{local.batchnorm}': FedFomo compares whole models; use 'average'.")
        return []

    def not_private(self) -> str:
        return "its sites choose their peers by losses of validation cases, which no noise covers"

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(dict.fromkeys(sorted(roster), task.initial()), first_wants(task, roster, self.budget))

    def remember(self, site: Site) -> Memory:
        start = site.task.initial()
        return self.Memory(start, start, dict.fromkeys(peers_of(site.card.name, site.roster), 0.0))

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(asked(server.personal, server.wants, site, self.budget) if round.step else {})

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        candidates = {**got.personal, site.card.name: memory.personal}
        gains = helpfulness(site, memory.before, candidates)
        helpful = {name: gain for name, gain in gains.items() if gain > 0}
        # θ + Σ w_n (θ_n − θ) with Σ w_n = 1 is the mean of the θ_n by w_n; θ stays if no model helps
        theta = mean({name: candidates[name] for name in helpful}, helpful) if helpful else memory.before
        fits = fit(site, {"personal": Job(theta)}, round, memory.states)
        done = fits["personal"]
        affinity = {name: past + gains.get(name, 0.0) for name, past in memory.affinity.items()}
        wants = favourites(affinity, self.budget, self.explore, site.generator(round, "draw peers"))
        kept = self.Memory(theta, done.weights, affinity, states=fits.states)
        return self.Uplink(done.weights, wants, done.loss, done.steps), kept

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        return {"personal": server.personal[site.name]}

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        return self.Server(
            {**server.personal, **{name: reply.personal for name, reply in replies.items()}},
            {**server.wants, **{name: reply.wants for name, reply in replies.items()}},
        )

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(site.name if site else "")

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        if not released.home:
            raise NotForOutsiders("FedFomo has no model for an outside hospital; name a site with --site.")
        if memory is None:
            return OneModel(task, task.initial(), "personal", released.home, "merged")
        return OneModel(task, memory.personal, "personal", released.home, "trained")

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        return self.Uplink(task.shape(), tuple(peers_of(card.name, roster)[: self.budget or None]), 0.0, 0)


def helpfulness(site: Site, theta: Weights, candidates: Mapping[SiteName, Weights]) -> dict[SiteName, float]:
    """(L(θ) − L(θ_n)) / ‖θ_n − θ‖ on the site's validation cases; 0 for a model that is θ itself."""
    trained = site.task.parameters()
    here = site.loss(theta, "valid")
    found = {}
    for name, other in sorted(candidates.items()):
        distance = (other - theta).split(lambda key: key in trained)[0].norm()
        found[name] = (here - site.loss(other, "valid")) / distance if distance else 0.0
    return found


def favourites(
    affinity: Mapping[SiteName, float], budget: int, explore: float, generator: torch.Generator
) -> tuple[SiteName, ...]:
    """The M peers that helped most (ties at random), or with probability ε any M; in name order."""
    names = sorted(affinity)
    number = budget or len(names)
    if float(torch.rand(1, generator=generator)) < explore:
        return drawn(names, number, generator)
    order = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    return tuple(sorted(sorted(order, key=lambda name: -affinity[name])[:number]))
