"""FedSM's selector, and three ways to train a network as the selector, although each site holds a single class.

"synchronised": sites send their mean gradient and the server takes one Adam step. "moments": one Adam step per round at
the site, its moments averaged, as in the authors' published code, whose rounds have one epoch. "paper": a step of the
study's optimiser on every batch, as printed; it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilium import tree
from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.fit import Fit, Job
from consilium.learning.server_step import adam_step
from consilium.local_training import Local
from consilium.method import OptimizerState, message
from consilium.methods.routers import NetworkRouter, Router
from consilium.site import Roster, Round, Site
from consilium.task import Task
from consilium.weights import SiteName, Weights, mean

TRAININGS = ("synchronised", "moments", "paper")  # of a network

Sent = tuple[Weights | None, OptimizerState | None]  # a selector or its gradient, and moments


@message
class Models:
    """The K + 1 models the selector chooses from."""

    global_: Weights
    personal: Mapping[SiteName, Weights]


def outputs_of(models: Models, task: Task, images: Tensor) -> list[Tensor]:
    """The logits of the global model and of every personal one, in the selector's class order."""
    return [task.infer(weights, images) for weights in (models.global_, *models.personal.values())]


class Selector(ABC):
    """Learns which site an image resembles. Each function returns the fields that it adds to FedSM's message."""

    phases: tuple[str, ...] = ()  # extra phases after the models are trained, each with one exchange

    @abstractmethod
    def start(self, task: Task, roster: Roster) -> dict[str, Any]:
        """Return fields of the server's first state."""

    @abstractmethod
    def send(self, server: Any, phase: str) -> dict[str, Any]:
        """Return fields of the downlink, beside the global model."""

    @abstractmethod
    def jobs(self, site: Site, got: Any) -> dict[str, Job]:
        """Return the training jobs at a site, beside those of the models."""

    @abstractmethod
    def reply(self, site: Site, got: Any, done: Mapping[str, Fit], round: Round) -> dict[str, Any]:
        """Return fields of the uplink, after the jobs are done."""

    @abstractmethod
    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> dict[str, Any]:
        """Return fields of the server's new state."""

    @abstractmethod
    def blank(self, task: Task, roster: Roster, round: Round) -> dict[str, Any]:
        """Return fields of the expected uplink, by their shapes."""

    @abstractmethod
    def router(self, task: Task, released: Any) -> Router | None:
        """The selector for predictions; None before there is one."""

    @abstractmethod
    def check(self, task: Task) -> None:
        """Reject a task that it does not work with (StudyError)."""


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
    """Equation 2: the target of every image is its own site."""
    sites = list(site.roster)
    own = sites.index(site.card.name)

    def loss(output: Any, batch: Batch) -> Tensor:
        target = torch.full((len(batch.cases),), own, device=output.device)
        return torch.nn.functional.cross_entropy(output.float(), target)

    return Job(selector, kind="selector", labels=sites, loss=loss, step=training == "paper", lr=lr, fresh=True)


def starting_parts(sent: Any, training: str) -> dict[str, Weights]:
    """The weights of a downlink from which a site's updates are measured, by path."""
    parts = dict(tree.split(sent).weights)
    if training == "synchronised":  # the reply is a gradient, which is already a change
        parts.pop("selector", None)
    return parts


def check_sites(roster: Roster, local: Local, name: str) -> None:
    """Reject a study in which a super model cannot work (StudyError)."""
    if len(roster) < 2:
        raise StudyError(f"{name} needs at least two sites; with one, use 'local'.")
    if local.batchnorm != "average":
        raise StudyError(
            f"[local] batchnorm = '{local.batchnorm}' keeps normalisation at its site, but {name} lets every site use "
            "the other sites' models, which would come with a normalisation nobody trained; use batchnorm = 'average'."
        )


def selector_reply(training: str, done: Fit, got: Weights, state: OptimizerState | None, lr: float) -> Sent:
    """The selector's part of an uplink after a round of training."""
    if training == "synchronised":
        return done.gradient, None
    if training == "paper":
        return done.weights, None
    # the published code: one Adam step on the *sum* of the round's gradients; moments are sent too
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
    """The shapes of the moments that a site sends."""
    return OptimizerState(0, {"exp_avg": selector, "exp_avg_sq": selector}) if training == "moments" else None
