"""Training a model as a run's sites do, on any of their cases: the shadows of the attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.audit.signals import CaseKey, Populations, regrouped
from consilium.audit.targets import Target
from consilium.batch import Batch
from consilium.data.cases import Cases
from consilium.learning.fit import Job, fit
from consilium.randomness import derive
from consilium.site import Round, Site, SiteCard
from consilium.weights import Weights

LossOfOutput = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class ShadowPlan:
    """How a shadow is trained."""

    epochs: int
    seed: int
    name: str  # shadows of other names begin at other weights and see cases in another order


def shadow_site(run: OpenRun, people: Populations, keys: Sequence[CaseKey], plan: ShadowPlan) -> Site:
    """A virtual site that holds these cases as its training cases; augmentation and patches are the study's."""
    study = run.study
    parts = tuple(regrouped(arrays, keys, site, "train") for site, arrays in people.arrays.items())
    data = Cases(parts, study.task_fields.augment, study.task_fields.patch, bool(study.preprocess.slices))
    local = replace(study.local, epochs=1, optimizer_state="kept", device="cpu", precision="float32")
    card = SiteCard("shadow", 0, len(keys), study.task.labels)
    return Site(card, {"shadow": card}, study.task, data, local, "cpu", derive(plan.seed, plan.name))


def train_shadow(
    run: OpenRun,
    people: Populations,
    keys: Sequence[CaseKey],
    target: Target,
    plan: ShadowPlan,
    loss: LossOfOutput | None = None,
) -> Weights:
    """A network like the target's, trained on these cases; `loss` takes the place of the study's."""
    site = shadow_site(run, people, keys, plan)
    task = replace(site.task, seed=derive(plan.seed, plan.name, "initial"))  # type: ignore[type-var]
    weights = task.initial(target.network, target.labels)
    states: dict[str, Any] = {}
    for epoch in range(plan.epochs):
        job = Job(weights, target.network, target.labels, loss)
        fits = fit(site, {"shadow": job}, Round(epoch, "shadow", epoch, plan.epochs), states)
        weights, states = fits["shadow"].weights, fits.states
    return weights
