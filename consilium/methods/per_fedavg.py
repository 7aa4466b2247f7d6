"""Per-FedAvg: a shared model that one step on a site's own cases turns into a good personal model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import ClassVar

from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.learning.gradients import GradientNetwork, Stepper, seeded_batches, stepped
from consilium.method import OptimizerState, PersonalModel, Phase, message
from consilium.methods.finetuned import ADAPT
from consilium.methods.shares import WithAggregation
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class PerFedAvg(WithAggregation, PersonalModel):
    """A shared model that one step on a site's own cases turns into a good personal model.

    Meta-steps w ← w − β (I − α ∇²f(w; D'')) ∇f(w − α ∇f(w; D); D'), each on its own batches.
    """

    inner_lr: float = 0.01  # α, of the adaptation
    hessian: str = "first-order"  # drops the second-order term; "free": by a difference of gradients
    difference: float = 1e-3  # δ of the difference, relative to the direction's norm
    adapt_steps: int = 1  # steps of the adaptation, on training cases only

    paper: ClassVar[str] = "Fallah et al., Personalized federated learning with theoretical guarantees (NeurIPS 2020)"
    when: ClassVar[str] = "adapted"
    differences: ClassVar[tuple[str, ...]] = (
        "The meta-gradient goes through the study's optimiser (β is [local] lr); the paper takes plain steps.",
        "δ is relative to the norm of the direction, so that one value works for all networks.",
    )

    @message
    class Server:
        global_: Weights  # the meta-model

    @message
    class Uplink:
        global_: Weights | None
        loss: Loss
        steps: Count

    @message
    class Memory(PersonalModel.Memory):
        personal: Weights | None  # once adapted

    def __post_init__(self) -> None:
        check_choices(self, "method", hessian=("first-order", "free"))
        if not (self.inner_lr > 0 and self.difference > 0 and self.adapt_steps >= 1):
            raise StudyError("[method] inner_lr and difference must be positive, adapt_steps at least 1.")

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("train", rounds), ADAPT]

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial())

    def remember(self, site: Site) -> Memory:
        return self.Memory(None)

    def train(self, site: Site, memory: Memory, got: PersonalModel.Downlink, round: Round) -> tuple[Uplink, Memory]:
        if round.phase == "adapt":
            personal = meta_adapted(site, got.global_, self.inner_lr, self.adapt_steps, round)
            return self.Uplink(None, 0.0, self.adapt_steps), self.Memory(personal)
        weights, loss, steps, states = meta_round(site, got.global_, self, round, memory.states)
        return self.Uplink(weights, loss, steps), self.Memory(None, states=states)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        models = {name: reply.global_ for name, reply in replies.items() if reply.global_ is not None}
        return self.Server(self.alike_average(models, server.global_)) if models else server

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        return self.Uplink(None if round.phase == "adapt" else task.shape(), 0.0, 0)


def meta_round(
    site: Site,
    weights: Weights,
    how: PerFedAvg,
    round: Round,
    states: Mapping[str, OptimizerState] | None = None,
    name: str = "global",
) -> tuple[Weights, float, int, dict[str, OptimizerState]]:
    """One local pass of meta-steps; each takes two batches, or three with the second-order term.

    Returns the weights, the mean loss, the number of steps and the optimiser's state, kept as `name`.
    """
    network = GradientNetwork(site, weights)
    stepper = Stepper(site, network.parameters, round, states, name)
    total, steps = 0.0, 0
    for batches in _groups(seeded_batches(site, round), 2 if how.hessian == "first-order" else 3):
        gradient, loss = meta_gradient(network, batches, how)
        stepper.step(gradient)
        total, steps = total + loss, steps + 1
    return network.weights(), total / max(1, steps), steps, stepper.states


def meta_gradient(network: GradientNetwork, batches: list[Batch], how: PerFedAvg) -> tuple[dict[str, Tensor], float]:
    """The gradient of f(w − α ∇f(w; D); D') at w, and the loss after adaptation; the network is left at w."""
    w = network.values()
    inner, _ = network.gradient(batches[0])
    network.set(stepped(w, inner, how.inner_lr))
    direction, loss = network.gradient(batches[1 % len(batches)])
    result = direction
    if how.hessian == "free":
        # ∇²f(w) d ≈ (∇f(w + δ d) − ∇f(w − δ d)) / 2δ, of whole gradients: clipped ones would differ in direction only
        length = sum(float(d.square().sum()) for d in direction.values()) ** 0.5
        delta = how.difference / max(length, 1e-12)
        around = []
        for sign in (-1, 1):
            network.set(stepped(w, direction, -sign * delta))
            around.append(network.gradient(batches[2 % len(batches)], clipped=False)[0])
        curve = {name: (around[1][name] - around[0][name]) / (2 * delta) for name in direction}
        result = stepped(direction, curve, how.inner_lr)
    network.set(w)
    return result, loss


def meta_adapted(site: Site, weights: Weights, lr: float, steps: int, round: Round) -> Weights:
    """A site's own model: plain steps on batches of its training cases."""
    network = GradientNetwork(site, weights)
    passes = (seeded_batches(site, round) for _ in range(steps))  # as many passes over the batches as the steps need
    for batch in islice(chain.from_iterable(passes), steps):
        gradient, _ = network.gradient(batch)
        network.set(stepped(network.values(), gradient, lr))
    return network.weights()


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Batches in pairs or in threes; an incomplete last group is left out, unless it is the only one."""
    group: list[Batch] = []
    made = 0
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group, made = [], made + 1
    if group and not made:
        yield group
