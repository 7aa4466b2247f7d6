"""pFedMe: a Moreau envelope keeps personal models near the shared model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from consilium.errors import StudyError
from consilium.learning.gradients import GradientNetwork, Tally, seeded_batches
from consilium.method import PersonalModel, message
from consilium.methods.shares import WithAggregation
from consilium.site import Count, Loss, Roster, Round, Site
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class PFedMe(WithAggregation, PersonalModel):
    """Personal models θ stay near the shared w: θ nearly minimises f(θ) + (λ/2) ‖θ − w‖², w ← w − η λ (w − θ)."""

    strength: float = 15.0  # λ
    inner_steps: int = 5  # K steps towards θ on every batch
    inner_lr: float = 0.01  # of those steps
    lr: float = 0.01  # η
    server_mix: float = 1.0  # β: w ← (1 − β) w + β mean w_i

    paper: ClassVar[str] = "Dinh et al., Personalized federated learning with Moreau envelopes (NeurIPS 2020)"
    optimizer_state: ClassVar[str] = "fresh"  # its steps are its own, without an optimiser
    differences: ClassVar[tuple[str, ...]] = (
        "θ starts a round at w and continues from batch to batch; the paper leaves the start of the inner solver open.",
        "Four published versions store or score another model than θ; here θ is in the site's memory and is scored.",
    )

    @message
    class Server:
        global_: Weights  # w

    @message
    class Uplink:
        global_: Weights  # w_i
        loss: Loss
        steps: Count

    @message
    class Memory:
        personal: Weights  # θ

    def __post_init__(self) -> None:
        if not (self.strength > 0 and self.inner_lr > 0 and self.lr > 0 and self.inner_steps >= 1):
            raise StudyError("[method] strength, inner_lr and lr must be positive, inner_steps at least 1.")
        if not 0 < self.server_mix <= 1:
            raise StudyError(f"[method] server_mix = {self.server_mix}: β must be in (0, 1].")
        if self.lr * self.strength > 1:
            raise StudyError(f"[method] lr × strength = {self.lr * self.strength:g}: above 1 w oversteps θ; lower lr.")

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial())

    def remember(self, site: Site) -> Memory:
        return self.Memory(site.task.initial())

    def train(self, site: Site, memory: Memory, got: PersonalModel.Downlink, round: Round) -> tuple[Uplink, Memory]:
        shared, personal, loss, steps = moreau_round(site, got.global_, self, round)
        return self.Uplink(shared, loss, steps), self.Memory(personal)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        average = self.alike_average({name: reply.global_ for name, reply in replies.items()}, server.global_)
        return self.Server(server.global_ * (1 - self.server_mix) + average * self.server_mix)


def moreau_round(site: Site, shared: Weights, how: PFedMe, round: Round) -> tuple[Weights, Weights, float, int]:
    """One local pass: on every batch K steps of θ, then one of w; returns w_i, θ, the mean loss and the steps of w."""
    network = GradientNetwork(site, shared)
    w = network.values()
    theta = network.values()
    tally = Tally()
    for batch in seeded_batches(site, round):
        for _ in range(how.inner_steps):
            network.set(theta)
            slope, loss = network.gradient(batch)
            theta = {k: t - how.inner_lr * (slope[k] + how.strength * (t - w[k])) for k, t in theta.items()}
        w = {k: t - how.lr * how.strength * (t - theta[k]) for k, t in w.items()}
        tally.add(loss, batch)
    return network.weights(w), network.weights(theta), tally.loss, tally.steps
