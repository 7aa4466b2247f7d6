"""Teachers: each site trains one model on the organs it annotates, and sends it once to the other sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.learning.fit import Job, fit
from consilium.learning.pseudo_labels import (
    Maps,
)
from consilium.method import OptimizerState, message
from consilium.methods.merged import merged_logits
from consilium.site import Round, Site
from consilium.weights import SiteName, Weights

TEACHER = "teacher"  # the phase before the paper's rounds


@message
class TeacherState:
    """A site's own teacher, the other sites' teachers, and their labels of the training cases."""

    teacher: Weights  # as trained so far
    state: OptimizerState | None  # of its optimiser, until it is done
    best: Weights | None  # its best round on the site's own validation cases
    valid: float  # the score of that round
    rounds: int  # that it has been trained for
    others: Mapping[SiteName, Weights]  # they never change after they arrive
    maps: Maps | None  # with `labels = "cached"`


@dataclass(frozen=True)
class TeacherLabels:
    """`[method.teachers]`: how long teachers are trained, and how they label."""

    rounds: int = 0  # local rounds of every teacher, before the study's; 0: as many as the study's
    labels: str = "cached"  # made once, on whole cases; "live": on every augmented batch
    priority: tuple[str, ...] = ()  # organs that win a voxel that two teachers claim; else the more probable claim wins

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise StudyError(f"[method.teachers] rounds = {self.rounds}: it cannot be negative.")
        check_choices(self, "method.teachers", labels=("cached", "live"))
        if len(set(self.priority)) < len(self.priority):
            raise StudyError(f"[method.teachers] priority = {list(self.priority)}: a label is named twice.")


def taught(site: Site, teaching: TeacherState, until: int, total: int) -> tuple[TeacherState, float, int]:
    """The site's own teacher after `until` of its `total` rounds: a site that was away catches up.

    The teacher is the best round on the site's own organs in its validation cases; without such cases, the last.
    """
    loss, steps = 0.0, 0
    for step in range(teaching.rounds, until):
        job = Job(teaching.teacher, kind="teacher", labels=site.card.labels)
        before = {} if teaching.state is None else {TEACHER: teaching.state}
        fits = fit(site, {TEACHER: job}, Round(step, TEACHER, step, total), before)
        done = fits[TEACHER]
        loss, steps = done.loss, steps + done.steps
        score = own_score(site, lambda images, teacher=done.weights: _all_label_logits(site, teacher, images))  # type: ignore[misc]
        better = score is None or score > teaching.valid
        teaching = replace(
            teaching,
            teacher=done.weights,
            state=fits.states.get(TEACHER) if step + 1 < total else None,
            best=done.weights if better or teaching.best is None else teaching.best,
            valid=score if better and score is not None else teaching.valid,
            rounds=step + 1,
        )
    return teaching, loss, steps


def _all_label_logits(site: Site, teacher: Weights, images: Tensor) -> Tensor:
    """A teacher's logits, with channels for all labels."""
    output = site.task.infer(teacher, images, "teacher", site.card.labels)
    return merged_logits([(site.card.labels, output)], site.task.labels)


def own_score(site: Site, answer: Callable[[Tensor], Tensor]) -> float | None:
    """The mean validation score on the labels that the site annotates; None without such cases.

    `answer` gives logits (batch, 1 + labels, *spatial) for images (batch, channels, *spatial).
    """
    values: list[float] = []
    for batch in site.data.whole("valid", site.local.batch_size):
        output = answer(batch.images)
        for i in range(len(batch.cases)):
            marks = site.task.score(output[i], batch.truth[i], False, batch.labels_of(i), batch.spacing_of(i))
            values += [mark.value for mark in marks if mark.metric == site.task.headline]
    return sum(values) / len(values) if values else None
