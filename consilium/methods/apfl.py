"""APFL: each site mixes its own model with the shared model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from consilium.errors import StudyError
from consilium.learning.gradients import GradientNetwork, Stepper, Tally, mixed, seeded_batches
from consilium.learning.optimizers import learning_rate
from consilium.method import OptimizerState, PersonalModel, message
from consilium.methods.shares import WithShares
from consilium.site import Count, Loss, Roster, Round, Site
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class APFLRound:
    """The result of one round of APFL at a site."""

    shared: Weights  # w, trained on its own loss
    own: Weights  # v
    mix: float  # α
    personal: Weights  # v̄ = α v + (1 − α) w
    loss: float  # of v̄
    steps: int
    states: Mapping[str, OptimizerState]  # of the optimisers of w ("global") and v ("own"), if the study keeps them


@dataclass(frozen=True)
class APFL(WithShares, PersonalModel):
    """Each site mixes its own model with the shared model: v̄ = α v + (1 − α) w, parameters, not outputs."""

    mix: float = 0.5  # α: how much of the personal model is the site's own
    adaptive: bool = False  # α follows ⟨v − w, ∇f(v̄)⟩ at every step, clipped to [0, 1]

    paper: ClassVar[str] = "Deng et al., Adaptive personalized federated learning (2020)"
    differences: ClassVar[tuple[str, ...]] = (
        "Published versions mix outputs, shrink α by an undocumented term, or overwrite v with the mixture; here the "
        "paper's definition is followed: parameters are mixed, and v is kept apart.",
    )

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]

    @message
    class Uplink:
        global_: Weights
        loss: Loss
        steps: Count

    @message
    class Memory(PersonalModel.Memory):
        own: Weights  # v
        mix: float  # α
        personal: Weights  # v̄, the model in use

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mix <= 1:
            raise StudyError(f"[method] mix = {self.mix}: α must be in [0, 1].")

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial(), {name: card.n for name, card in roster.items()})

    def remember(self, site: Site) -> Memory:
        start = site.task.initial()
        return self.Memory(start, self.mix, start)

    def train(self, site: Site, memory: Memory, got: PersonalModel.Downlink, round: Round) -> tuple[Uplink, Memory]:
        done = apfl_round(site, got.global_, memory.own, memory.mix, self.adaptive, round, memory.states)
        kept = self.Memory(done.own, done.mix, done.personal, states=done.states)
        return self.Uplink(done.shared, done.loss, done.steps), kept

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        models = {name: reply.global_ for name, reply in replies.items()}
        return self.Server(self.average(models, server.n, server.global_), server.n)


def apfl_round(
    site: Site,
    shared: Weights,
    own: Weights,
    mix: float,
    adaptive: bool,
    round: Round,
    states: Mapping[str, OptimizerState] | None = None,
) -> APFLRound:
    """One local pass: every batch gives one step of w, one of v, and with `adaptive` one of α."""
    lr = learning_rate(site.local, round)
    common, blend = GradientNetwork(site, shared, slot=0), GradientNetwork(site, own, slot=1)
    v = {name: nn.Parameter(torch.empty_like(part).copy_(own[name])) for name, part in common.parameters.items()}
    of_w, of_v = Stepper(site, common.parameters, round, states), Stepper(site, v, round, states, "own")
    tally = Tally()
    for batch in seeded_batches(site, round):
        w = common.values()
        blend.set(mixed(v, w, mix))
        toward, loss = blend.gradient(batch)
        slope, _ = common.gradient(batch)
        downhill = {name: mix * slope_of_v for name, slope_of_v in toward.items()}  # ∂f(v̄)/∂v = α ∇f(v̄)
        if adaptive:  # ∂f(v̄)/∂α = ⟨v − w, ∇f(v̄)⟩, at the same point
            with torch.no_grad():
                change = sum(((v[name] - w[name]) * toward[name]).sum().item() for name in v)
            mix = min(1.0, max(0.0, mix - lr * change))
        of_w.step(slope)
        of_v.step(downhill)
        tally.add(loss, batch)
    blend.set(mixed(v, common.values(), mix))
    final_own = {name: tensor.detach() for name, tensor in v.items()}
    kept = {**of_w.states, **of_v.states}
    return APFLRound(common.weights(), blend.weights(final_own), mix, blend.weights(), tally.loss, tally.steps, kept)
