"""The models of a run that left a site, each with the cases it was trained on; a site's own are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilium import tree
from consilium.analysis.opening import OpenRun
from consilium.errors import NotForOutsiders
from consilium.methods.routers import DiscriminantRouter, Router
from consilium.methods.routing import EnsembleModel, SuperModel
from consilium.task import Task
from consilium.weights import SiteName, Weights, join

# what a server holds of its sites beside the models it releases, by the field's name, and what the pages call it
PARTS = {"teachers": "teacher", "cores": "core"}


@dataclass(frozen=True)
class Target:
    """One model to attack."""

    kind: str  # "global", "personal", "teacher", "core", "selector", …
    of: SiteName  # whose training cases made it; empty: those of all sites
    sites: tuple[SiteName, ...]  # whose training cases are its members
    answer: Callable[[Tensor], Tensor] | None  # images to logits of `labels`; None: a selector
    labels: tuple[str, ...] | None = None  # of its outputs; None: all of the task
    network: str = "model"  # the kind of network, to train others like it
    closeness: Callable[[Tensor, SiteName], Tensor] | None = None  # of a selector: how much an image is the site's
    stays: bool = False  # it never left its site

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.of}" if self.of else self.kind


def targets_of(run: OpenRun) -> list[Target]:
    """Every model of the run: those released to all, those a site shares, those that stay with it, the selector."""
    found: dict[str, Target] = {}
    for target in _found(run):
        found.setdefault(target.name, target)
    return list(found.values())


def _found(run: OpenRun) -> Iterator[Target]:
    task, everyone = run.study.task, tuple(run.members)
    left = {weights.digest for weights in tree.split(run.server).weights.values()}
    single: dict[str, Target] = {}
    for site in everyone:
        worker = run.worker(site)
        for kind, model in run.models(worker).items():
            sites = (site,) if model.of else everyone
            stays = model.weights.digest not in left
            target = Target(kind, model.of, sites, _answers(task, model.weights), stays=stays)
            single.setdefault(target.name, target)
    yield from sorted(single.values(), key=lambda target: target.of)
    for field, kind in PARTS.items():
        held: Any = getattr(run.server, field, {})
        for site, weights in sorted(held.items()):
            yield _part(run, task, kind, site, weights)
    router = _router(run)
    if router is not None:
        yield Target("selector", "", everyone, None, closeness=_closeness(router))


def _part(run: OpenRun, task: Task, kind: str, site: SiteName, weights: Weights) -> Target:
    if kind == "teacher":
        labels = run.roster[site].labels
        return Target(kind, site, (site,), _answers(task, weights, "teacher", labels), labels, "teacher")
    # the statistics of normalisation layers never leave, so whoever attacks a core has those of the first weights
    statistics = task.initial().split(lambda name: name not in weights)[0]
    return Target(kind, site, (site,), _answers(task, join(weights, statistics)))


def _answers(
    task: Task, weights: Weights, network: str = "model", labels: tuple[str, ...] | None = None
) -> Callable[[Tensor], Tensor]:
    return lambda images: task.infer(weights, images, network, labels)


def _router(run: OpenRun) -> Router | None:
    try:
        predictor = run.predictor(run.worker(run.members[0]))
    except NotForOutsiders:
        return None
    parts = predictor.parts if isinstance(predictor, EnsembleModel) else predictor
    return parts.router if isinstance(parts, SuperModel) else None


def _closeness(router: Router) -> Callable[[Tensor, SiteName], Tensor]:
    """How much an image looks like one of the site's training images, the larger the more."""

    def chance(images: Tensor, site: SiteName) -> Tensor:
        chances = router.routes(images).chances[:, router.classes.index(site)]
        return chances.clamp_min(1e-12).log().double()

    def nearness(images: Tensor, site: SiteName) -> Tensor:
        assert isinstance(router, DiscriminantRouter)
        distances = router.space.squared(router.task.features(router.weights, images))
        return -torch.as_tensor(distances)[:, router.classes.index(site)].double()

    return nearness if isinstance(router, DiscriminantRouter) else chance
