"""Methods that train nothing: what remains is the round itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from consilium.method import GlobalModel, Method, message
from consilium.predictor import OneModel, Predictor
from consilium.site import Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class Echo(GlobalModel):
    """Sites take the model into memory and send it back; the server averages as FedAvg does."""

    paper: ClassVar[str] = "none"

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        return self.Uplink(Weights(got.global_), 0.0, 0), memory

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        return self.Server(mean({name: reply.global_ for name, reply in replies.items()}, server.n), server.n)


@dataclass(frozen=True)
class Drift(GlobalModel):
    """As Echo, but the model of every round is new: what has not changed would not be sent again."""

    paper: ClassVar[str] = "none"

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        return self.Uplink(Weights(got.global_), 0.0, 0), memory

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        model = mean({name: reply.global_ for name, reply in replies.items()}, server.n)
        return self.Server(model * 1.001, server.n)


@dataclass(frozen=True)
class Bulk(Method):
    """Tensors of `megabytes` in all that no network needs, there and back."""

    megabytes: int = 1024

    paper: ClassVar[str] = "none"
    headline: ClassVar[str] = "global"

    @message
    class Server:
        bulk: Weights

    @message
    class Downlink:
        bulk: Weights

    @message
    class Uplink:
        bulk: Weights
        loss: float
        steps: int

    @message
    class Release:
        pass

    def _bulk(self, device: str) -> Weights:
        size = self.megabytes * (1 << 20) // 64
        return Weights.over({f"part{i:02d}": torch.full((size,), float(i + 1), device=device) for i in range(16)})

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(self._bulk("cpu"))

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.bulk)

    def train(self, site: Site, memory: Any, got: Downlink, round: Round) -> tuple[Uplink, Any]:
        return self.Uplink(got.bulk, 0.0, 0), memory

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        return self.Server(next(iter(replies.values())).bulk * 1.5)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release()

    def deploy(self, task: Task, memory: Any, released: Release) -> Predictor:
        return OneModel(task, task.initial())

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        return self.Uplink(self._bulk("meta"), 0.0, 0)
