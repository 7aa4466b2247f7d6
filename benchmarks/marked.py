"""FedAvg that tells when things happen; it imports no more than FedAvg does, or the telling would be measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.work import mark, mark_first_step
from consilium.methods.fedavg import FedAvg
from consilium.site import Round, Site
from consilium.weights import SiteName


@dataclass(frozen=True)
class Marked(FedAvg):
    """FedAvg that says when it made its first step, and when a round was merged."""

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        if round.index == 0:
            mark_first_step()
        return super().train(site, memory, got, round)

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        merged = super().merge(server, replies, round)
        mark("round")
        return merged
