"""A site's training cases with the labels of the teachers and of the global model, and with the hidden masks.

In a simulation the files hold masks of organs that a site does not annotate. They count as the truth here, after the
run; training never reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.batch import Batch
from consilium.data.cache import open_site
from consilium.data.cases import Cases
from consilium.errors import RunError, StudyError
from consilium.learning.main_teacher import refined
from consilium.learning.pseudo_labels import combined_labels, teacher_outputs, with_truth
from consilium.method import Method
from consilium.methods.pseudo_labelled import PseudoLabelled
from consilium.methods.ufps import UFPS
from consilium.site import Site
from consilium.weights import SiteName

if TYPE_CHECKING:
    pass


TEACHERS, GLOBAL, REFINED = "teachers", "global model", "main teacher"  # the sources of labels


@dataclass(frozen=True, eq=False)
class Labelled:
    """A training case and its possible labels; all masks are (*spatial) integers, 0 is background."""

    case: str
    image: Tensor  # (channels, *spatial)
    truth: Tensor  # with the labels that the site does not annotate
    labels: Mapping[str, Tensor]  # by source, with the site's own annotation inserted
    ignored: Tensor  # Boolean: voxels without loss when the main teacher labels
    claimed: Tensor  # the teachers' claims on all labels, before the site's own annotation
    decided: Tensor | None  # the global model's labels; None if it is never a teacher


def teaches(run: OpenRun) -> bool:
    return isinstance(run.study.method, PseudoLabelled)


def main_teacher(method: Method) -> TypeGuard[UFPS]:
    """Whether the global model becomes a teacher in some round."""
    return isinstance(method, UFPS) and method.main_teacher.used


def checked(run: OpenRun) -> PseudoLabelled:
    """The method of a run with teachers; RunError for another run."""
    method = run.study.method
    if not isinstance(method, PseudoLabelled):
        raise RunError(f"{run.path} has no pseudo labels: give a run of ufps, fedavg-pl or another with teachers.")
    return method


def taught_sites(run: OpenRun, site: SiteName | None) -> list[SiteName]:
    """The requested site, or all sites that train."""
    if site is not None and site not in run.roster:
        raise StudyError(f"there is no site '{site}' that is taught; there are {', '.join(run.members)}.")
    return run.members if site is None else [site]


def labelled(run: OpenRun, name: SiteName, server: Any) -> Iterator[Labelled]:
    """A site's whole training cases with the labels of the teachers and the global model of a server's state.

    In training the main teacher sees augmented patches of the same cases.
    """
    site = run.worker(name).site
    assert isinstance(site.data, Cases)
    full = open_site(run.federation, run.federation.sites[name], run.study.preprocess, annotated=run.federation.labels)
    for batch in replace(site.data, parts=(full,)).whole("train", site.local.batch_size):
        found = _of_batch(checked(run), site, server, batch)
        if batch.volume:  # its slices are one case
            turned = replace(found, image=batch.images.transpose(0, 1))
            yield replace(turned, case=batch.volume)
            continue
        for i, case in enumerate(batch.cases):
            yield Labelled(
                case,
                batch.images[i],
                batch.truth[i],
                {who: masks[i] for who, masks in found.labels.items()},
                found.ignored[i],
                found.claimed[i],
                None if found.decided is None else found.decided[i],
            )


def _of_batch(method: PseudoLabelled, site: Site, server: Any, batch: Batch) -> Labelled:
    """The same for a batch; every tensor has a first axis of cases."""
    task, own = site.task, site.card.labels
    drawn = {name: site.roster[name].labels for name in server.teachers}
    pseudo = combined_labels(
        teacher_outputs(task, server.teachers, drawn, batch.images),
        task.labels,
        own,
        batch.bare,
        method.teachers.priority,
    )
    is_own = torch.tensor([False, *(label in own for label in task.labels)])
    annotation = torch.where(is_own[batch.truth.long()], batch.truth, 0)
    labels = {TEACHERS: with_truth(pseudo.others, annotation)}
    ignored, decided = torch.zeros_like(annotation, dtype=torch.bool), None
    if main_teacher(method):
        decided = task.infer(server.global_, batch.images).argmax(1).to(pseudo.others)
        foreign = torch.where(is_own[decided.long()], 0, decided)
        main = method.main_teacher
        drawn_here = is_own.expand(len(decided), -1)
        made = refined(pseudo, decided, drawn_here, main.agreement, main.labels == "intersection", main.guard)
        labels |= {GLOBAL: with_truth(foreign, annotation), REFINED: with_truth(made.labels, annotation)}
        ignored = made.ignored & (annotation == 0)
    return Labelled("", batch.images, batch.truth, labels, ignored, pseudo.everything, decided)
