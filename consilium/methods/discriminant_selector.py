"""A selector in closed form: no network, no traffic in the rounds, two exchanges once the models are trained.

"statistics": each site runs the global model on its training cases and sends sums of the encoder's features.
"routing": each site tests the resulting discriminant on its validation cases and again sends sums.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.learning.discriminant import (
    NO_CASES,
    FeatureSums,
    RoutingSums,
    Space,
    bounded_sums,
    discriminant,
    from_noised,
    routing_sums,
    summed,
    tempered,
)
from consilium.learning.fit import Fit, Job
from consilium.method import CasesOf
from consilium.methods.routers import DiscriminantRouter, Router
from consilium.methods.selector import Selector
from consilium.privacy.sampling import GAUSSIAN, covered
from consilium.site import Roster, Round, Site, Spent
from consilium.task import Task
from consilium.tasks.features import feature_count
from consilium.weights import SiteName, Weights

STATISTICS, ROUTING = "statistics", "routing"


@dataclass(frozen=True)
class DiscriminantSelector(Selector):
    """Finds the site with the most similar training images, by a linear discriminant on the global model's features."""

    quantile: float  # of validation distances: an image farther from every site is an outlier
    route: str  # of volumes trained as slices: "volume" pools features over slices
    scored: bool  # also in scored rounds, so that the super model has learning curves

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
        if not self._asked(round):
            return {}
        return {"features": self._private_sums(site, got.global_) if site.private else self._sums(site, got.global_)}

    def _asked(self, round: Round) -> bool:
        return round.phase == STATISTICS or (self.scored and round.scored)

    def _sums(self, site: Site, weights: Weights) -> FeatureSums:
        found = summed(site.task.features(weights, batch.images) for batch in self._whole(site, "train"))
        assert found is not None  # a site without training cases does not take part
        return found

    def _private_sums(self, site: Site, weights: Weights) -> FeatureSums:
        """The same sums over patients: bounded, with noise, and without the products of different features."""
        private = site.private
        assert private is not None
        own: dict[int, list[Tensor]] = {}
        for batch in site.data.of_patients(range(len(site.data.patients())), site.local.batch_size, None):
            assert batch.patients is not None
            for patient, row in zip(batch.patients, site.task.features(weights, batch.images)):
                own.setdefault(patient, []).append(row)
        sums = bounded_sums((torch.stack(rows).mean(0) for rows in own.values()), private.feature_clip)
        key = hmac.new(private.key, b"features " + weights.digest.encode(), hashlib.sha256).digest()
        noised = covered(sums.values, math.sqrt(2), private.statistics, key, "features")
        private.spent.append(Spent(("features",), GAUSSIAN, private.statistics, clip=private.feature_clip))
        return from_noised(noised, private.feature_clip, site.card.n, sums.patients)

    def _on_validation(self, site: Site, got: Any) -> RoutingSums:
        name = site.card.name
        features = [self._routed(site.task.features(got.global_, b.images), b) for b in self._whole(site, "valid")]
        if not features or name not in got.discriminant.means:  # it was away when statistics were taken
            return NO_CASES
        return routing_sums(Space(got.discriminant), torch.cat(features), name)

    def _whole(self, site: Site, split: str) -> Iterator[Batch]:
        return site.data.whole(split, site.local.batch_size)  # unaugmented, and all slices of a volume

    def _routed(self, features: Tensor, batch: Batch) -> Tensor:
        """The features to route by: for a volume that is routed as a whole, the mean over its slices."""
        return features.mean(0, keepdim=True) if batch.volume and self.route == "volume" else features

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> dict[str, Any]:
        if round.phase == ROUTING:
            routing = {name: reply.routing for name, reply in replies.items()}
            return {"discriminant": tempered(server.discriminant, routing, self.quantile)}
        if not self._asked(round):
            return {}
        # a site that is away is not one of the classes: its older statistics belong to another model's features
        found = discriminant({name: reply.features for name, reply in replies.items()})
        # in a training round they belong to the model at the start of the round, which is replaced after it
        return {"discriminant": found, "router": None if round.phase == STATISTICS else server.global_}

    def blank(self, task: Task, roster: Roster, round: Round) -> dict[str, Any]:
        if round.phase == ROUTING:
            return {"routing": replace(NO_CASES, cases=CasesOf("valid"))}
        if not self._asked(round):
            return {}
        count = feature_count(task)
        mean, scatter = (torch.empty(n, dtype=torch.float64, device="meta") for n in (count, count * (count + 1) // 2))
        return {"features": FeatureSums(CasesOf("train"), mean, scatter)}

    def router(self, task: Task, released: Any) -> Router | None:
        if released.discriminant is None:
            return None
        seen_by = released.global_ if released.router is None else released.router
        return DiscriminantRouter(task, seen_by, released.discriminant)
