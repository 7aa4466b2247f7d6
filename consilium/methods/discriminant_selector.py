"""A selector in closed form: no network, no traffic in the rounds, two exchanges once the models are trained.

"statistics": every site runs the global model over its training cases and sends the sums of what its encoder saw.
"routing": with the discriminant made of them, every site says how it does on its validation cases, again in sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilium.learning.discriminant import (
    NO_CASES,
    FeatureSums,
    RoutingSums,
    Space,
    discriminant,
    routing_sums,
    summed,
    tempered,
)
from consilium.learning.fit import Fit, Job
from consilium.methods.routing import DiscriminantRouter, Router
from consilium.methods.selector import Selector
from consilium.site import Batch, Roster, Round, Site, Task
from consilium.tasks.features import feature_count
from consilium.weights import SiteName, Weights

STATISTICS, ROUTING = "statistics", "routing"


@dataclass(frozen=True)
class DiscriminantSelector(Selector):
    """Which site's training images an image is most like, by a linear discriminant on the global model's features."""

    quantile: float  # of validation distances: an image farther from every site is unlike all
    route: str  # of volumes trained as slices: "volume" pools features over slices
    scored: bool  # also in rounds that are scored, so that the super model has curves

    phases = (STATISTICS, ROUTING)

    def check(self, task: Task) -> None:
        feature_count(task)

    def start(self, task: Task, roster: Roster) -> dict[str, Any]:
        return {"selector": None}

    def send(self, server: Any, phase: str) -> dict[str, Any]:
        return {"discriminant": server.discriminant if phase == ROUTING else None}

    def jobs(self, site: Site, got: Any) -> dict[str, Job]:
        return {}

    def reply(self, site: Site, got: Any, done: Mapping[str, Fit], round: Round) -> dict[str, Any]:
        if round.phase == ROUTING:
            return {"routing": self._on_validation(site, got)}
        return {"features": self._sums(site, got.global_)} if self._asked(round) else {}

    def _asked(self, round: Round) -> bool:
        return round.phase == STATISTICS or (self.scored and round.scored)

    def _sums(self, site: Site, weights: Weights) -> FeatureSums:
        found = summed(site.task.features(weights, batch.images) for batch in self._whole(site, "train"))
        assert found is not None  # a site without training cases takes no part
        return found

    def _on_validation(self, site: Site, got: Any) -> RoutingSums:
        name = site.card.name
        features = [self._routed(site.task.features(got.global_, b.images), b) for b in self._whole(site, "valid")]
        if not features or name not in got.discriminant.means:  # it was away when statistics were taken
            return NO_CASES
        return routing_sums(Space(got.discriminant), torch.cat(features), name)

    def _whole(self, site: Site, split: str) -> Iterator[Batch]:
        return site.data.whole(split, site.local.batch_size)  # unaugmented, and all slices of a volume

    def _routed(self, features: Tensor, batch: Batch) -> Tensor:
        """What is routed: of a volume that goes as one, the mean over its slices."""
        return features.mean(0, keepdim=True) if batch.volume and self.route == "volume" else features

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> dict[str, Any]:
        if round.phase == ROUTING:
            routing = {name: reply.routing for name, reply in replies.items()}
            return {"discriminant": tempered(server.discriminant, routing, self.quantile)}
        if not self._asked(round):
            return {}
        # a site that is away is not among its classes: older statistics would be of another model's features
        found = discriminant({name: reply.features for name, reply in replies.items()})
        # in a round of training they are of the model that the round began with, which is gone after it
        return {"discriminant": found, "router": None if round.phase == STATISTICS else server.global_}

    def blank(self, task: Task, roster: Roster, round: Round) -> dict[str, Any]:
        if round.phase == ROUTING:
            return {"routing": NO_CASES}
        if not self._asked(round):
            return {}
        count = feature_count(task)
        mean, scatter = (torch.empty(n, dtype=torch.float64, device="meta") for n in (count, count * (count + 1) // 2))
        return {"features": FeatureSums(0, mean, scatter)}

    def router(self, task: Task, released: Any) -> Router | None:
        if released.discriminant is None:
            return None
        seen_by = released.global_ if released.router is None else released.router
        return DiscriminantRouter(task, seen_by, released.discriminant)
