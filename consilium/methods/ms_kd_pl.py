"""MS-KD*: FedAvg* with distillation of the teachers' probabilities and features, where a teacher sees its organs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.fields import check_from_zero
from consilium.learning.fit import Job, fit
from consilium.learning.stage_outputs import check_stages, levels, stage_outputs
from consilium.local_training import Local
from consilium.methods.pseudo_labelled import DIFFERENCES, LabelBatch, PseudoLabelled, model_of
from consilium.methods.teachers import TeacherState
from consilium.networks.plain_unet import Supervised
from consilium.site import Round, Site
from consilium.task import Task


@dataclass(frozen=True)
class MSKDPL(PseudoLabelled):
    """Multi-scale distillation for sites that annotate different organs: logits and features of each teacher."""

    logits: float = 1.0  # weight of the distillation of logits; 0: none
    features: float = 1.0  # weight of the distillation of features; 0: none. Both 0 is fedavg-pl
    levels: tuple[int, ...] = ()  # levels whose features are distilled, from 1 (the encoder's first); empty: all

    paper: ClassVar[str] = (
        "Feng et al., MS-KD: multi-organ segmentation with multiple binary-labeled datasets (2021), "
        "as UFPS (Patterns 2024) uses it"
    )
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "A teacher's background includes organs it does not know: the student's probabilities of them are added up.",
        "Distances of features are mean squares; the weights are ours, since neither paper gives them.",
        "Teachers see every batch as augmented, also with labels = 'cached', since their features are needed.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_from_zero(self, "method", "logits", "features")
        if self.levels and (min(self.levels) < 1 or len(set(self.levels)) < len(self.levels)):
            raise StudyError(f"[method] levels = {list(self.levels)}: levels count from 1, each named once.")

    def refuse(self, task: Task, local: Local) -> None:
        with torch.device("meta"):
            network = task.network()
        check_stages(network, "MS-KD*")
        if self.levels and max(self.levels) > len(levels(network)):
            raise StudyError(
                f"[method] levels = {list(self.levels)}: this network has {len(levels(network))} levels with features."
            )

    def learn(
        self, site: Site, memory: PseudoLabelled.Memory, got: PseudoLabelled.Downlink, teach: LabelBatch, round: Round
    ) -> tuple[PseudoLabelled.Uplink, PseudoLabelled.Memory]:
        masters = teacher_networks(site, memory.teaching) if self.logits or self.features else []

        def objective(network: nn.Module, batch: Batch) -> Tensor:
            labelled = teach(batch).batch
            with stage_outputs(levels(network) if masters else []) as own:
                answer = network(batch.images)
            total = site.task.loss(answer, labelled)
            for known, master in masters:
                with torch.no_grad(), stage_outputs(levels(master)) as theirs:
                    said = master(batch.images).float()
                total = total + self._distilled(site.task, answer, own, known, said, theirs) / len(masters)
            return total

        fits = fit(site, {"global": Job(model_of(got), objective=objective)}, round, memory.states)
        done = fits["global"]
        return self.reply(done.weights, done.loss, done.steps), replace(memory, states=fits.states)

    def _distilled(
        self,
        task: Task,
        answer: Any,
        own: Sequence[Tensor],
        known: Sequence[str],
        said: Tensor,
        theirs: Sequence[Tensor],
    ) -> Tensor:
        """Both distillations from one teacher, which knows these labels."""
        found = said.argmax(1) > 0  # where it predicts one of its organs
        main = answer.main if isinstance(answer, Supervised) else answer
        total = torch.zeros((), device=said.device)
        if self.logits:
            total = total + self.logits * logit_distance(
                main, said, [task.labels.index(label) for label in known], found
            )
        if self.features:
            chosen = [number - 1 for number in self.levels] or range(len(own))
            parts = [feature_distance(own[i], theirs[i], found) for i in chosen]
            total = total + self.features * torch.stack(parts).mean()
        return total


def teacher_networks(site: Site, teaching: TeacherState) -> list[tuple[tuple[str, ...], nn.Module]]:
    """The labels and the network of every teacher that the site has, in site-name order, in evaluation mode."""
    assert teaching.best is not None
    found = []
    for name, weights in sorted({**teaching.others, site.card.name: teaching.best}.items()):
        known = site.roster[name].labels
        network = site.task.network("teacher", known).to(site.device)
        network.load_state_dict(dict(weights))
        found.append((known, network.eval().requires_grad_(False)))
    return found


def logit_distance(student: Tensor, teacher: Tensor, known: Sequence[int], where: Tensor) -> Tensor:
    """KL(teacher ‖ student) per voxel, mean over the voxels `where` (batch, *spatial) the teacher sees an organ.

    `student` (batch, 1 + labels, *spatial); `teacher` (batch, 1 + known, *spatial), whose organs are the student's
    labels with these numbers, from 0. Its background is the student's background or any label it does not know.
    """
    student = student.float()
    rest = [0, *(1 + i for i in range(student.shape[1] - 1) if i not in known)]
    merged = torch.cat([student[:, rest].logsumexp(1, keepdim=True), student[:, [1 + i for i in known]]], dim=1)
    each = nn.functional.kl_div(merged.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True).sum(1)
    return (each * where).sum() / where.sum().clamp_min(1)


def feature_distance(student: Tensor, teacher: Tensor, where: Tensor) -> Tensor:
    """The mean square of the difference of features (batch, channels, *spatial), where the teacher sees an organ.

    `where` (batch, *spatial of the image) is resized to the features: a position that touches an organ counts.
    """
    pool = nn.functional.adaptive_max_pool2d if student.dim() == 4 else nn.functional.adaptive_max_pool3d
    size: tuple[int, ...] = tuple(student.shape[2:])
    seen = pool(where.float()[:, None], size)
    each = (student.float() - teacher.float()).square() * seen
    return each.sum() / (seen.sum() * student.shape[1]).clamp_min(1)
