"""DOD*: DoDNet's dynamic head in a federation. Encoder and supervision are averaged, the rest stays at the site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.methods.fedavg_foreground import check_foreground, foreground_only
from consilium.methods.personal_part import BatchLoss, PersonalPart
from consilium.methods.site_models import SiteModels
from consilium.networks.dynamic import Dynamic, with_width
from consilium.networks.parts import part_names
from consilium.networks.plain_unet import Supervised
from consilium.site import Roster
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class DOD(PersonalPart):
    """A controller makes the head for each image and organ. Encoder and supervision are averaged, the rest stays."""

    controller: bool = True  # else the head's convolutions are the same for every image and organ

    paper: ClassVar[str] = "Zhang et al., DoDNet (CVPR 2021), as UFPS (Patterns 2024) uses it: DOD*"
    prediction: ClassVar[str] = "one per organ and site that annotates it"
    differences: ClassVar[tuple[str, ...]] = (
        "Three 1×1 convolutions 8-8-1 per organ; DoDNet's second output is the tumour, which these data do not have.",
        "The network is the study's, with its own normalisation; DoDNet has group normalisation and standardised "
        "weights.",
        "UFPS gives neither the width of the head nor the order of organs: 8, and the task's.",
        "Background is where no organ's logit is positive; an organ that several sites annotate is the mean of their "
        "logits.",
    )

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        check_foreground(task, "dod")
        if local.batchnorm != "average":
            raise StudyError("[local] batchnorm: dod decides itself what stays at a site; use 'average'.")
        model: Any = task
        with_width(model.model, task.dimensions, task.channels, 2, 1)
        return []

    def local_names(self, task: Task) -> frozenset[str]:
        return _local_names(self.task_at(task, task.labels))

    def task_at(self, task: Task, labels: Sequence[str]) -> Task:
        return dynamic(task, tuple(labels), self.controller)

    def site_loss(self, task: Task, labels: Sequence[str]) -> BatchLoss:
        return partial(organ_loss, task, tuple(labels))

    def site_models(
        self, task: Task, models: Mapping[SiteName, Weights], labels: Mapping[SiteName, tuple[str, ...]]
    ) -> SiteModels:
        def output(name: SiteName, images: Tensor) -> Tensor:
            # one pass per organ, as the paper counts them
            organs = [dynamic(task, (label,), self.controller) for label in labels[name]]
            return with_background(torch.cat([asked.infer(models[name], images)[:, :1] for asked in organs], dim=1))

        passes = {name: len(known) for name, known in labels.items()}
        return SiteModels(foreground_only(task), output, labels, self.scored, passes=passes)


@lru_cache(maxsize=64)
def dynamic(task: Task, labels: tuple[str, ...], controller: bool) -> Task:
    """The task with a network that predicts these labels, one logit each."""
    given: Any = task
    asked = tuple(task.labels.index(label) for label in labels)
    network = Dynamic(given.model, len(task.labels), asked, controlled=controller)
    made: Task = replace(given, model=network, unannotated="unknown")  # its outputs have no background to set to 0
    return made


@lru_cache(maxsize=64)
def _local_names(task: Task) -> frozenset[str]:
    with torch.device("meta"):
        network: Any = task.network()
    shared = {f"net.{name}" for part in ("encoder", "supervision") for name in part_names(network.net, part)}
    return frozenset(network.state_dict()) - shared


def with_background(logits: Tensor) -> Tensor:
    """Logits of organs (batch, organs, *spatial) with a background of 0 before them."""
    return torch.cat([torch.zeros_like(logits[:, :1]), logits], dim=1)


def organ_loss(task: Task, labels: tuple[str, ...], output: Any, batch: Batch) -> Tensor:
    """A separate loss for each organ that the site annotates, also in the heads that supervise the encoder."""
    loss = foreground_only(task).loss
    if not isinstance(output, Supervised):
        return loss(with_background(output), batch, labels)
    asides = [weight * loss(aside, batch) for weight, aside in output.asides]
    return sum(asides, loss(with_background(output.main), batch, labels))
