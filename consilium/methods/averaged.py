"""Stochastic weight averaging on the server: sites use the mean of several rounds, but never train from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from consilium import tree
from consilium.errors import StudyError
from consilium.message_parsing import assemble
from consilium.method import LossOfBatch, Method, Phase
from consilium.predictor import Predictor
from consilium.site import Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.tree import message
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class Release:
    """`[release]`: which model sites use."""

    swa_from: float = 0.0  # above 0: after this share of the rounds, the mean of every swa_cycle-th round's model
    swa_cycle: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.swa_from < 1:
            raise StudyError(f"[release] swa_from = {self.swa_from}: it must be in [0, 1); 0 averages nothing.")
        if self.swa_cycle < 1:
            raise StudyError(f"[release] swa_cycle = {self.swa_cycle}: it must be at least 1.")


def check_averaging(method: Method) -> None:
    """Refuse a method whose result is not one shared model, or that makes it in rounds of several kinds."""
    if method.headline != "global":
        why = f"the result of this method is {method.headline}"
    elif sum(phase.counts for phase in method.phases(2)) > 1:
        why = "the rounds of this method are of several kinds"
    else:
        return
    raise StudyError(f"[release] swa_from averages one shared model over the rounds, but {why}; set it to 0.")


@lru_cache
def _server_type(inner: type) -> type:
    @message
    class Server:
        now: Any  # the method's own state, from which training continues
        mean: Any  # of the rounds averaged so far
        n: int  # how many these are

    Server.__annotations__.update(now=inner, mean=inner | None)
    return Server


@dataclass(frozen=True)
class Averaged(Method):
    """A method with one shared model, which releases the running mean of the server's weights.

    Training continues from the last round's model, as without averaging. Averaged rounds are counted back from the last
    one, which is always included.
    """

    inner: Method
    of: Release

    def __post_init__(self) -> None:
        for name in (
            "Downlink",
            "Uplink",
            "Memory",
            "Release",
            "paper",
            "deployable",
            "alone",
            "pooled",
            "unlabelled",
            "private",
            "optimizer_state",
            "steady",
            "prediction",
            "differences",
        ):
            object.__setattr__(self, name, getattr(self.inner, name))
        object.__setattr__(self, "headline", self.inner.headline)
        object.__setattr__(self, "Server", _server_type(self.inner.Server))

    def start(self, task: Task, roster: Roster) -> Any:
        return self.Server(self.inner.start(task, roster), None, 0)

    def send(self, server: Any, site: SiteCard, round: Round) -> Any | None:
        return self.inner.send(server.now, site, round)

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        return self.inner.train(site, memory, got, round)

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        now = self.inner.merge(server.now, replies, round)
        if not self._due(round):
            return self.Server(now, server.mean, server.n)
        mean = now if server.mean is None else _towards(server.mean, now, 1 / (server.n + 1))
        return self.Server(now, mean, server.n + 1)

    def _due(self, round: Round) -> bool:
        if not any(phase.counts for phase in self.inner.phases(round.total) if phase.name == round.phase):
            return False
        left = round.total - 1 - round.step
        return round.step >= math.floor(self.of.swa_from * round.total + 1e-9) and left % self.of.swa_cycle == 0

    def release(self, server: Any, site: SiteCard | None) -> Any:
        return self.inner.release(server.now if server.mean is None else server.mean, site)

    def deploy(self, task: Task, memory: Any | None, released: Any) -> Predictor:
        return self.inner.deploy(task, memory, released)

    def phases(self, rounds: int) -> list[Phase]:
        return self.inner.phases(rounds)

    def not_private(self) -> str:
        return self.inner.not_private()

    def passes(self, rounds: int, epochs: int) -> int:
        return self.inner.passes(rounds, epochs)

    def noised_statistics(self) -> int:
        return self.inner.noised_statistics()

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        return self.inner.check(task, roster, local)

    def remember(self, site: Site) -> Any:
        return self.inner.remember(site)

    def started_from(self, server: Any, site: SiteCard, sent: Any) -> Mapping[str, Weights]:
        return self.inner.started_from(server.now, site, sent)

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        return self.inner.trained_loss(site, server.now, memory, round)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Any:
        return self.inner.blank(task, roster, card, round)


def _towards(old: Any, new: Any, share: float) -> Any:
    """The message `new` with its weights moved from the old ones; weights without an old version stay new."""
    before, now = tree.split(old), tree.split(new)

    def between(path: str, weights: Weights) -> Weights:
        was = before.weights.get(path)
        return weights if was is None or list(was) != list(weights) else was + share * (weights - was)

    moved = {path: between(path, weights) for path, weights in now.weights.items()}
    return assemble(now.shape(), type(new), _Parts(moved, now.tensors))


@dataclass(frozen=True)
class _Parts:
    held: Mapping[str, Weights]
    tensors: Mapping[str, Tensor]
    whole: bool = True

    def weights(self, path: str, names: list[str]) -> Weights:
        return self.held[path]

    def tensor(self, path: str) -> Tensor:
        return self.tensors[path]
