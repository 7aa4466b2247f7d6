"""APPLE: each site learns how much its personal model takes from the core model of each other site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from consilium.errors import NotForOutsiders, StudyError
from consilium.fields import check_choices, check_from_zero
from consilium.learning.fit import placed, precision, private_gradient
from consilium.learning.gradients import seeded_batches
from consilium.learning.mixture import Mixture
from consilium.learning.optimizers import learning_rate, optimizer
from consilium.learning.per_patient import PatientGradients
from consilium.learning.training_networks import training_network
from consilium.local_training import Local
from consilium.method import Method, message
from consilium.methods.peers import asked, check_peers, drawn, first_wants, peers_of
from consilium.predictor import OneModel, Predictor
from consilium.privacy.sampling import draws
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard, SiteIds
from consilium.task import Task
from consilium.weights import SiteName, Weights, join, normalised


@dataclass(frozen=True)
class APPLE(Method):
    """Each site learns a private vector p that mixes all core models: w_i = Σ_j p_ij c_j, parameters, not outputs.

    Loss F(w_i) + λ(r) (μ/2) ‖p_i − p0‖² with p0 = n_j/n; only the site's own core and p_i are trained.
    """

    relation_lr: float = 1e-3  # η_2, of p; it decays as [local] lr does. 0: p stays p0
    mu: float = 0.1  # μ: weight of the penalty on the distance of p from p0
    scheduler: str = "cosine"  # λ(r), how that penalty decays; or "exponential"
    scheduler_rounds: float = 0.2  # L: after it λ is 0. Below 1 a share of the run's rounds, else a number of them
    core_init: str = "different"  # each core model has its own random start; "same": all start equal
    budget: int = 0  # M: how many other core models a site downloads per round; 0: all

    paper: ClassVar[str] = "Luo & Wu, Adapt to adaptation: learning personalization for cross-silo FL (IJCAI 2022)"
    headline: ClassVar[str] = "personal"
    private: ClassVar[bool] = True
    optimizer_state: ClassVar[str] = "fresh"  # as in the authors' code
    differences: ClassVar[tuple[str, ...]] = (
        "The paper calls the mixture convex; p is not constrained, there or here: entries may be negative.",
        "The authors' code doubles μ (no 1/2) and, under a budget, draws peers uniformly: its record of what was "
        "downloaded is never written. Here both are as the paper prints them.",
        "Statistics of normalisation layers are the personal model's own: they are not mixed and never leave.",
        "The site draws the peers of the next round itself and asks for them by name, so that p never leaves it.",
    )

    @message
    class Server:
        cores: Mapping[SiteName, Weights]  # as last received; the start, if a site has never answered
        wants: Mapping[SiteName, tuple[SiteName, ...]]  # as last asked
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        cores: Mapping[SiteName, Weights]  # those asked for; none in the first round

    @message
    class Uplink:
        core: Weights  # the site's own, parameters only
        wants: SiteIds  # the peers whose cores it asks for next, in name order
        loss: Loss
        steps: Count

    @message
    class Memory:
        cores: Mapping[SiteName, Weights]  # all of them: the site's own, and the others as last downloaded
        p: Mapping[SiteName, float]  # the relationships, never sent
        statistics: Weights  # of the personal model's normalisation layers, never sent
        seen: tuple[SiteName, ...]  # peers downloaded at least once
        rounds: tuple[int, ...]  # in which this site has trained
        history: Tensor  # p after each of them, (rounds, sites) in site-name order

    @message
    class Release:
        home: SiteName  # no model: the site has all it needs
        n: Mapping[SiteName, int]

    def __post_init__(self) -> None:
        check_choices(self, "method", scheduler=("cosine", "exponential"), core_init=("different", "same"))
        check_from_zero(self, "method", "relation_lr", "mu", "scheduler_rounds", "budget")

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_peers(self.budget, roster)
        if local.batchnorm == "local":
            raise StudyError(
                "[local] batchnorm = 'local': APPLE mixes all parameters and keeps all statistics local; use 'average'."
            )
        few = [f"'{name}' has {card.n}" for name, card in roster.items() if card.n < local.batch_size]
        warnings = [] if not few else [
            f"batches hold {local.batch_size} cases, but site {', '.join(few)}: it makes one step per epoch, and APPLE "
            "starts slowly; take smaller batches."
        ]  # fmt: skip
        if self.mu * self.relation_lr >= 2 and local.optimizer == "sgd":
            warnings.append(
                f"mu × relation_lr = {self.mu * self.relation_lr:g}: from 2 on p oversteps p0 and diverges."
            )
        return warnings

    def start(self, task: Task, roster: Roster) -> Server:
        n = _numbers(roster)
        return self.Server(self._first_cores(task, sorted(n)), first_wants(task, roster, self.budget), n)

    def remember(self, site: Site) -> Memory:
        return self._first_memory(site.task, _numbers(site.roster))

    def _first_memory(self, task: Task, n: Mapping[SiteName, int]) -> Memory:
        _, statistics = split_parameters(task, task.initial())
        return self.Memory(
            self._first_cores(task, sorted(n)), normalised(n), statistics, (), (), torch.empty(0, len(n))
        )

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        if round.step == 0:  # the first cores come from the study's seed: every site has them
            return self.Downlink({})
        return self.Downlink(asked(server.cores, server.wants, site, self.budget))

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        names = sorted(site.roster)
        cores = {**memory.cores, **got.cores}  # what was not downloaded stays in the mixture as it is
        network = training_network(site.task, "model", None, 0, site.device)
        network.load(join(cores[site.card.name], memory.statistics))
        own, p = names.index(site.card.name), [memory.p[name] for name in names]
        mixture = Mixture(network.module, [cores[name] for name in names], own, p)
        loss, steps = self._learn(site, mixture, round)
        relation = dict(zip(names, mixture.p.tolist()))
        core = mixture.core_weights()
        statistics = network.weights().split(lambda name: name in memory.statistics)[0]
        seen = tuple(sorted({*memory.seen, *got.cores}))
        wants = next_peers(relation, site, seen, self.budget, round)
        kept = self.Memory(
            {**cores, site.card.name: core}, relation, statistics, seen, (*memory.rounds, round.index),
            torch.cat([memory.history, mixture.p.detach().cpu()[None]]),
        )  # fmt: skip
        return self.Uplink(core, wants, loss, steps), kept

    def _learn(self, site: Site, mixture: Mixture, round: Round) -> tuple[float, int]:
        """One local pass: every batch gives one step of the core and one of p, from the same backward pass."""
        lr = learning_rate(site.local, round)
        free = replace(site.local, weight_decay=0.0)  # the penalty pulls p towards p0, not towards 0
        steppers = [
            optimizer([mixture.core], site.local, lr),
            optimizer([mixture.p], free, self.relation_lr * lr / site.local.lr),
        ]
        p0 = torch.tensor([share for _, share in sorted(normalised(_numbers(site.roster)).items())]).to(mixture.p)
        pull = self.mu * self.penalty_factor(round)
        total, cases, steps = 0.0, 0, 0
        for loss, count in _private_slopes(site, mixture, round) if site.private else _slopes(site, mixture, round):
            assert mixture.p.grad is not None
            mixture.p.grad += pull * (mixture.p.detach() - p0)
            for stepper in steppers:
                stepper.step()
            total, cases, steps = total + loss, cases + count, steps + 1
        return total / max(1, cases), steps

    def penalty_factor(self, round: Round) -> float:
        """λ(r), r from 0: 1 at first, exactly 0 from r = L on."""
        last = self.scheduler_rounds * (round.total if self.scheduler_rounds < 1 else 1)
        if round.step >= last:
            return 0.0
        done = round.step / last
        return (math.cos(math.pi * done) + 1) / 2 if self.scheduler == "cosine" else 1e-3**done

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        return {"core": server.cores[site.name]}

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        return self.Server(
            {**server.cores, **{name: reply.core for name, reply in replies.items()}},
            {**server.wants, **{name: reply.wants for name, reply in replies.items()}},
            server.n,
        )

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(site.name if site else "", server.n)

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        if not released.home:
            raise NotForOutsiders(
                "APPLE has no model for an outside hospital, only each site's own mixture; name a site with --site."
            )
        when = "merged" if memory is None else "trained"
        kept = memory or self._first_memory(task, released.n)
        return OneModel(task, join(mixed(kept.cores, kept.p), kept.statistics), "personal", released.home, when)

    def _first_cores(self, task: Task, names: Sequence[SiteName]) -> dict[SiteName, Weights]:
        """From the study's seed, so that server and sites have them without sending any."""
        draws = range(len(names)) if self.core_init == "different" else [0] * len(names)
        starts = {draw: split_parameters(task, task.initial(draw=draw))[0] for draw in dict.fromkeys(draws)}
        return {name: starts[draw] for name, draw in zip(names, draws)}

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        core, _ = split_parameters(task, task.shape())
        return self.Uplink(core, tuple(peers_of(card.name, roster)[: self.budget or None]), 0.0, 0)


def _slopes(site: Site, mixture: Mixture, round: Round) -> Iterator[tuple[float, int]]:
    """For each batch: set the gradients at the mixture, then give the summed loss and the number of cases."""
    for batch in seeded_batches(site, round):
        with precision(site):
            loss = site.task.loss(mixture(batch.images), batch)
        mixture.backward(loss, site.local.clip, site.local.precision)
        yield loss.item() * len(batch.cases), len(batch.cases)


def _private_slopes(site: Site, mixture: Mixture, round: Round) -> Iterator[tuple[float, int]]:
    """The same by DP-SGD. The gradient of p follows from the mixture's noised gradient, so it costs no more privacy."""
    patients = PatientGradients(mixture.module)
    start = [mixture.core_weights(), Weights({**mixture.parameters(), "p": mixture.p})]
    for draw in draws(site, round, start, mixture.core.numel(), ["core", "p", "wants"]):
        placed_draw = replace(draw, batches=[placed(batch, site) for batch in draw.batches])
        found = private_gradient(site, patients, mixture.parameters(), placed_draw, site.task.loss, "core")
        sizes = [part.numel() for part in mixture.parameters().values()]
        parts = zip(torch.split(found.gradient, sizes), mixture.parameters().values())
        mixture.take([part.view_as(like) for part, like in parts], site.local.clip)
        yield found.loss, found.cases


def _numbers(roster: Roster) -> dict[SiteName, int]:
    return {name: card.n for name, card in roster.items()}


def split_parameters(task: Task, weights: Weights) -> tuple[Weights, Weights]:
    """The parameters, and the statistics of normalisation layers."""
    trained = task.parameters()
    return weights.split(lambda name: name in trained)


def mixed(cores: Mapping[SiteName, Weights], p: Mapping[SiteName, float]) -> Weights:
    """Σ_j p_j c_j, in site-name order."""
    first, *others = sorted(cores)
    total = cores[first] * p[first]
    for name in others:
        total = total + cores[name] * p[name]
    return total


def next_peers(
    p: Mapping[SiteName, float], site: Site, seen: Sequence[SiteName], budget: int, round: Round
) -> tuple[SiteName, ...]:
    """The M peers to download next: first those never downloaded, then drawn with probabilities ∝ b^|p_ij|."""
    peers = peers_of(site.card.name, site.roster)
    if not budget or budget >= len(peers):
        return tuple(peers)
    generator = site.generator(round, "draw peers")
    new = [name for name in peers if name not in seen]
    chosen = drawn(new, budget, generator)
    known = [name for name in peers if name in seen]
    if len(chosen) < budget:
        chances = attraction([p[name] for name in known], round.step + 1, budget, len(p))
        picks = torch.multinomial(chances, budget - len(chosen), generator=generator).tolist()
        chosen = (*chosen, *(known[i] for i in picks))
    return tuple(sorted(chosen))


def attraction(p: Sequence[float], round: int, budget: int, sites: int) -> Tensor:
    """b^|p_j| with b = max(1.5, r M / N), normalised (equations 8 and 9)."""
    base = max(1.5, round * budget / sites)
    chances = torch.softmax(torch.tensor(p, dtype=torch.float64).abs() * math.log(base), 0)
    return chances.clamp_min(1e-12)  # a draw without replacement may need them all
