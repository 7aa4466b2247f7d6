"""FedAvg with a loss on the annotated foreground alone: the first row of UFPS's empirical study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.method import GlobalModel, LossOfBatch
from consilium.methods.shares import WithShares
from consilium.predictor import OneModel, Predictor
from consilium.site import Roster, Round, Site
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName

STUDY = "Jiang et al., UFPS (Patterns 2024), empirical study"


@dataclass(frozen=True)
class FedAvgForeground(WithShares, GlobalModel):
    """FedAvg with a separate loss for each annotated organ; nothing is learned about background."""

    paper: ClassVar[str] = f"{STUDY}, figure 2 A"
    private: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (
        "Background, about which nothing is learned, is where no organ's logit is positive; the paper takes the arg "
        "max with the untrained background channel.",
    )

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        check_foreground(task, "fedavg-foreground")
        return []

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        fits = fit(at_foreground(site), {"global": Job(got.global_)}, round, memory.states)
        done = fits["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(states=fits.states)

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        models = {name: reply.global_ for name, reply in replies.items()}
        return self.Server(self.average(models, server.n, server.global_), server.n)

    def deploy(self, task: Task, memory: Any | None, released: Any) -> Predictor:
        return OneModel(foreground_only(task), released.global_, "global", plain=False)

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        return lambda batch: partial(foreground_only(site.task).loss, batch=batch)


def check_foreground(task: Task, name: str) -> None:
    """Reject a task without background, or a study that sets another `unannotated` (StudyError)."""
    if not isinstance(task, Segmentation) or task.overlapping:
        raise StudyError(f"{name} needs masks whose labels exclude each other; this task is of another kind.")
    if task.unannotated == "background":
        raise StudyError(
            f"[task] unannotated = 'background': {name} has a loss on annotated labels only; remove the key."
        )


@lru_cache(maxsize=16)
def foreground_only(task: Task) -> Task:
    """The task with a loss on annotated labels alone, each by a sigmoid: `[task] unannotated = "ignored"`."""
    return replace(task, unannotated="ignored")  # type: ignore[type-var]


def at_foreground(site: Site) -> Site:
    """The site with that task."""
    return replace(site, task=foreground_only(site.task))
