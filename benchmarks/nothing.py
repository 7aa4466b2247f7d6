"""A method that trains nothing: what remains is the round itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from consilium.method import GlobalModel
from consilium.site import Round, Site
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class Echo(GlobalModel):
    """Sites take the model into memory and send it back; the server averages as FedAvg does."""

    paper: ClassVar[str] = "none"

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        return self.Uplink(Weights(got.global_), 0.0, 0), memory

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        return self.Server(mean({name: reply.global_ for name, reply in replies.items()}, server.n), server.n)
