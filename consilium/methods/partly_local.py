"""FedBN, Multi-head, Multi-encoder, Multi-decoder: they differ in the local part and in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.methods.fedavg_foreground import STUDY
from consilium.methods.merged import BACKGROUNDS
from consilium.methods.personal_part import BatchLoss, PersonalPart
from consilium.methods.site_models import SiteModels, channels_of, own_channels
from consilium.networks.parts import PARTS, part_names
from consilium.networks.plain_unet import Supervised
from consilium.site import Roster
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName, Weights

NONE = "none"


@dataclass(frozen=True)
class PartlyLocal(PersonalPart):
    """FedAvg of the network except `local_part`, which each site keeps. Abstract: a method sets part and loss."""

    local_part: str = NONE  # encoder, bottleneck, decoder, head, norm, supervision; "none" is FedAvg
    background: str = "product"  # of several models' backgrounds; "mean": of their logits, as the paper

    inverse: ClassVar[bool]  # the loss covers a site's organs, with all else as background; False: the task's loss

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method", local_part=(*PARTS, NONE), background=BACKGROUNDS)

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        if local.batchnorm != "average":
            raise StudyError(
                f"[local] batchnorm = '{local.batchnorm}' keeps normalisation at its site, and so does 'fedbn' itself; "
                "take batchnorm away, and set [method] local_part = 'norm' if normalisation shall stay."
            )
        names = self.local_names(task)
        if self.local_part != NONE and not names:
            raise StudyError(f"[method] local_part = '{self.local_part}': {_lacking(self.local_part)}")
        if len(names) == len(task.shape()):
            raise StudyError(f"[method] local_part = '{self.local_part}' is the whole network; use 'local' or 'solo'.")
        return []

    def local_names(self, task: Task) -> frozenset[str]:
        return names_of(task, self.local_part)

    def task_at(self, task: Task, labels: Sequence[str]) -> Task:
        return task

    def site_loss(self, task: Task, labels: Sequence[str]) -> BatchLoss | None:
        return partial(inverse_loss, task, labels) if self.inverse and _has_inverse(task) else None

    def site_models(
        self, task: Task, models: Mapping[SiteName, Weights], labels: Mapping[SiteName, tuple[str, ...]]
    ) -> SiteModels:
        def output(name: SiteName, images: Tensor) -> Tensor:
            return own_channels(task, task.infer(models[name], images), labels[name], self.inverse)

        return SiteModels(task, output, labels, self.scored, background=self.background)


@dataclass(frozen=True)
class FedBN(PartlyLocal):
    """FedAvg of the network except normalisation: each site keeps its own scales, shifts and running statistics."""

    local_part: str = "norm"

    paper: ClassVar[str] = "Li et al., FedBN (ICLR 2021); for organs UFPS's empirical study, figure 2 C"
    inverse: ClassVar[bool] = False
    differences: ClassVar[tuple[str, ...]] = (
        "All normalisation layers stay at their site (batch, instance, group and layer), found by their type.",
        "A site's model is scored as it was trained, before averaging; FedBN and UFPS's Note 6.4 score it after: "
        "scored = 'merged'.",
        "An outside hospital uses all sites' models together; the paper has no rule for it.",
    )


_NOTE = (
    "A site's loss covers its organs, with all else as background (section 3.1, Note 6.4); Note 6.5 says the annotated "
    "foreground alone: [task] unannotated = 'ignored'.",
    "Several sites' backgrounds are multiplied as probabilities; the paper takes the mean of their logits: "
    "background = 'mean'.",
)


@dataclass(frozen=True)
class MultiHead(PartlyLocal):
    """FedAvg of the network except the head, the last convolution, which each site keeps for its organs."""

    local_part: str = "head"

    paper: ClassVar[str] = f"{STUDY}, figure 2 F"
    inverse: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (*_NOTE, "Heads that supervise the encoder are averaged.")


@dataclass(frozen=True)
class MultiEncoder(PartlyLocal):
    """FedAvg of the network except the encoder, which each site keeps."""

    local_part: str = "encoder"

    paper: ClassVar[str] = f"{STUDY}, figure 2 G"
    inverse: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (*_NOTE, "Heads that supervise the encoder are averaged.")


@dataclass(frozen=True)
class MultiDecoder(PartlyLocal):
    """FedAvg of the network except the decoder and its head, which each site keeps."""

    local_part: str = "decoder"

    paper: ClassVar[str] = f"{STUDY}, figure 2 H"
    inverse: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = _NOTE


@lru_cache(maxsize=64)
def names_of(task: Task, part: str) -> frozenset[str]:
    """The names of a part's tensors in the task's network."""
    if part == NONE:
        return frozenset()
    with torch.device("meta"):
        return part_names(task.network(), part)


def _lacking(part: str) -> str:
    if part == "norm":
        return (
            "the network's normalisation has neither parameters nor statistics; FedBN would be FedAvg. Set [task] norm."
        )
    return "the network has no tensors there; choose another part."


def _has_inverse(task: Task) -> bool:
    """Whether there is a background, and the study lets the method treat unknown labels as background."""
    return isinstance(task, Segmentation) and not task.overlapping and task.unannotated == "unknown"


def inverse_loss(task: Task, labels: Sequence[str], output: Any, batch: Batch) -> Tensor:
    """The loss of a site's own organs, with everything else as background; other organs' channels are not used."""
    chosen = channels_of(task, labels)
    if isinstance(output, Supervised):
        output = Supervised(output.main[:, chosen], tuple((w, aside[:, chosen]) for w, aside in output.asides))
    else:
        output = output[:, chosen]
    return task.loss(output, batch, labels)
