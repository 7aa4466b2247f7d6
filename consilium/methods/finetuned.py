"""Shared by fine-tuning methods: one global model, and at the end each site adapts it to its own cases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from consilium.errors import StudyError
from consilium.learning.fit import Fit, Job, fit
from consilium.method import PersonalModel, Phase, message
from consilium.methods.shares import WithShares
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights

ADAPT = Phase("adapt", 1, counts=False, from_best=True)  # after the paper's rounds, from the best global model


@dataclass(frozen=True)
class FineTuned(WithShares, PersonalModel):
    """Sites train the shared model in the method's own way (`job`). In the last phase each site fine-tunes it."""

    finetune_epochs: int = 1  # E, local epochs of the adaptation
    finetune_lr: float = 0.0  # of the adaptation; 0 takes the study's [local] lr

    when: ClassVar[str] = "adapted"

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]

    @message
    class Uplink:
        global_: Weights | None  # nothing of the adaptation leaves the site
        loss: Loss
        steps: Count

    @message
    class Memory(PersonalModel.Memory):
        personal: Weights | None  # once adapted

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.finetune_epochs < 1:
            raise StudyError(f"[method] finetune_epochs = {self.finetune_epochs}: it must be at least 1.")
        if self.finetune_lr < 0:
            raise StudyError(f"[method] finetune_lr = {self.finetune_lr}: it must be positive, or 0 for [local] lr.")

    @abstractmethod
    def job(self, site: Site, got: Weights) -> Job:
        """How the shared model is trained at a site."""

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("train", rounds), ADAPT]

    def passes(self, rounds: int, epochs: int) -> int:
        return rounds + -(-self.finetune_epochs // epochs)

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial(), {name: card.n for name, card in roster.items()})

    def remember(self, site: Site) -> Memory:
        return self.Memory(None)

    def train(self, site: Site, memory: Memory, got: PersonalModel.Downlink, round: Round) -> tuple[Uplink, Memory]:
        if round.phase == "adapt":
            done = finetuned(site, got.global_, self.finetune_epochs, self.finetune_lr, round)
            return self.Uplink(None, done.loss, done.steps), self.Memory(done.weights)
        fits = fit(site, {"global": self.job(site, got.global_)}, round, memory.states)
        done = fits["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(None, states=fits.states)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        if round.phase == "adapt":
            return server
        models = {name: reply.global_ for name, reply in replies.items() if reply.global_ is not None}
        return self.Server(self.average(models, server.n, server.global_), server.n)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        return self.Uplink(None if round.phase == "adapt" else task.shape(), 0.0, 0)


def finetuned(site: Site, weights: Weights, epochs: int, lr: float, round: Round) -> Fit:
    """E local epochs from the given weights with a fresh optimiser."""
    tuned: Any = replace(site, local=replace(site.local, epochs=epochs))
    return fit(tuned, {"personal": Job(weights, lr=lr or None)}, round)["personal"]
