"""What a selector is to FedSM, and the three ways to train one that is a network when a site holds a single class.

"synchronised": sites send their mean gradient and the server takes one Adam step. "moments": one Adam step per epoch at
the site, its moments averaged, as in the authors' published code. "paper": Adam on every batch, as printed; it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.fit import Fit, Job
from consilium.learning.server_step import adam_step
from consilium.method import OptimizerState
from consilium.methods.routing import NetworkRouter, Router
from consilium.site import Batch, Local, Roster, Round, Site, Task
from consilium.weights import SiteName, Weights, mean

TRAININGS = ("synchronised", "moments", "paper")  # of a network

Sent = tuple[Weights | None, OptimizerState | None]  # a selector or its gradient, and moments


class Selector(ABC):
    """How a federation learns which site an image is like. Every verb gives the fields it adds to FedSM's message."""

    phases: tuple[str, ...] = ()  # of its own, once the models are trained, each one exchange

    @abstractmethod
    def start(self, task: Task, roster: Roster) -> dict[str, Any]:
        """Of the server's first state."""

    @abstractmethod
    def send(self, server: Any, phase: str) -> dict[str, Any]:
        """Of what a site gets, beside the global model."""

    @abstractmethod
    def jobs(self, site: Site, got: Any) -> dict[str, Job]:
        """What is trained at a site beside the models."""

    @abstractmethod
    def reply(self, site: Site, got: Any, done: Mapping[str, Fit], round: Round) -> dict[str, Any]:
        """Of what a site sends, after its jobs are done."""

    @abstractmethod
    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> dict[str, Any]:
        """Of the server's new state."""

    @abstractmethod
    def blank(self, task: Task, roster: Roster, round: Round) -> dict[str, Any]:
        """Of what a site is expected to send."""

    @abstractmethod
    def router(self, task: Task, released: Any) -> Router | None:
        """The selector in use; None as long as nothing is known."""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Refuse a task for which it cannot work (StudyError)."""


@dataclass(frozen=True)
class NetworkSelector(Selector):
    """A network that classifies images by site, trained in every round."""

    training: str  # one of TRAININGS
    lr: float

    def check(self, task: Task) -> None:
        """Every task builds a selector network."""

    def start(self, task: Task, roster: Roster) -> dict[str, Any]:
        return {"selector": task.initial("selector", labels=list(roster))}

    def send(self, server: Any, phase: str) -> dict[str, Any]:
        state = server.selector_state if self.training == "moments" else None
        return {"selector": server.selector, "selector_state": state}

    def jobs(self, site: Site, got: Any) -> dict[str, Job]:
        return {"selector": selector_job(got.selector, site, self.training, self.lr)}

    def reply(self, site: Site, got: Any, done: Mapping[str, Fit], round: Round) -> dict[str, Any]:
        own = done["selector"]
        selector, state = selector_reply(self.training, own, got.selector, got.selector_state, self.lr)
        return {"selector": selector, "selector_state": state, "selector_loss": own.loss}

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> dict[str, Any]:
        sent = {name: (reply.selector, reply.selector_state) for name, reply in replies.items()}
        selector, state = merged_selector(
            self.training, server.selector, server.selector_state, sent, server.n, self.lr
        )
        return {"selector": selector, "selector_state": state}

    def blank(self, task: Task, roster: Roster, round: Round) -> dict[str, Any]:
        selector = task.shape("selector", labels=list(roster))
        return {"selector": selector, "selector_state": blank_state(self.training, selector)}

    def router(self, task: Task, released: Any) -> Router | None:
        return NetworkRouter(task, released.selector, list(released.personal))


def selector_job(selector: Weights, site: Site, training: str, lr: float) -> Job:
    """Equation 2: the right answer for every image of a site is the site itself."""
    sites = list(site.roster)
    own = sites.index(site.card.name)

    def loss(output: Any, batch: Batch) -> Tensor:
        target = torch.full((len(batch.cases),), own, device=output.device)
        return torch.nn.functional.cross_entropy(output.float(), target)

    return Job(selector, kind="selector", labels=sites, loss=loss, step=training == "paper", lr=lr, fresh=True)


def check_fields(**fields: tuple[str, tuple[str, ...]]) -> None:
    """Refuse a field's value that is not one of those allowed."""
    for name, (value, allowed) in fields.items():
        if value not in allowed:
            raise StudyError(f"[method] {name} = {value!r}: it must be one of {', '.join(allowed)}.")


def check_sites(roster: Roster, local: Local, name: str) -> None:
    """Refuse a study in which a super model cannot work."""
    if len(roster) < 2:
        raise StudyError(f"{name} needs at least two sites; with one, use 'local'.")
    if local.batchnorm != "average":
        raise StudyError(
            f"[local] batchnorm = '{local.batchnorm}' keeps normalisation at its site, but {name} lets every site use "
            "the other sites' models, which would come with a normalisation nobody trained; use batchnorm = 'average'."
        )


def weak_pull(pull: float, roster: Roster) -> list[str]:
    """The warning that λ is below 1/K."""
    if pull >= 1 / len(roster):
        return []
    return [
        f"pull = {pull} is below 1/K = {1 / len(roster):.3f}: the other sites then weigh more in a personal model than "
        "its own site."
    ]


def selector_reply(training: str, done: Fit, got: Weights, state: OptimizerState | None, lr: float) -> Sent:
    """What a site sends of its round of selector training."""
    if training == "synchronised":
        return done.gradient, None
    if training == "paper":
        return done.weights, None
    # the published code: one Adam step per epoch on the *sum* of the gradients, moments travel
    assert done.gradient is not None
    return adam_step(got, done.gradient * done.cases, state, lr)


def merged_selector(
    training: str,
    selector: Weights,
    state: OptimizerState | None,
    replies: Mapping[SiteName, Sent],
    n: Mapping[SiteName, int],
    lr: float,
) -> tuple[Weights, OptimizerState | None]:
    """The server's new selector and, unless "paper", the state of its Adam."""
    average = mean({name: weights for name, (weights, _) in replies.items()}, n)  # type: ignore[misc]
    if training == "synchronised":
        return adam_step(selector, average, state, lr)
    states = {name: moments for name, (_, moments) in replies.items() if moments is not None}
    if not states:
        return average, None
    first = next(iter(states.values()))
    slots = {slot: mean({k: s.slots[slot] for k, s in states.items()}, n) for slot in first.slots}
    return average, OptimizerState(max(moments.step for moments in states.values()), slots)


def blank_state(training: str, selector: Weights) -> OptimizerState | None:
    """The moments a site is expected to send, by their shape."""
    return OptimizerState(0, {"exp_avg": selector, "exp_avg_sq": selector}) if training == "moments" else None
