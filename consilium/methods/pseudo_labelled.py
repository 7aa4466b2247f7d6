"""Shared by methods for sites that annotate different organs: teachers make pseudo labels for the other organs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.pseudo_labels import (
    PseudoLabels,
    combined_labels,
    maps_of,
    read_maps,
    teacher_outputs,
    with_truth,
)
from consilium.local_training import Local
from consilium.method import LossOfBatch, Maybe, Method, Phase, message
from consilium.methods.merged import check_exclusive
from consilium.methods.shares import WithShares
from consilium.methods.teachers import TEACHER, TeacherLabels, TeacherState, taught
from consilium.predictor import OneModel, Predictor
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights

PAPER = "Jiang et al., UFPS: a unified framework for partially annotated federated segmentation (Patterns 2024)"
DIFFERENCES = (
    "A voxel has one label; voxels that no teacher and no annotation claims are background.",
    "Hidden masks are never used; the published code uses them to choose patches and rounds.",
    "A site that lacks a teacher waits one round; then the organ is unknown there until the teacher arrives.",
)


class LabelledBatch(NamedTuple):
    """A batch with its pseudo labels."""

    batch: Batch  # its truth: the site's annotation, and the teachers' labels elsewhere
    pseudo: PseudoLabels


LabelBatch = Callable[[Batch], LabelledBatch]
Fields = dict[str, Any]  # of a message


@dataclass(frozen=True)
class PseudoLabelled(WithShares, Method):
    """Phase "teacher": each site trains a teacher of its own organs. Phase "train": one model learns from their labels.

    A method defines how a site learns from a labelled batch (`learn`). A method that exchanges more than a model
    adds fields to the messages (`first`, `also_sent`, `expected`) and merges them (`averaged`).
    """

    teachers: TeacherLabels = field(default_factory=TeacherLabels)

    headline: ClassVar[str] = "global"
    differences: ClassVar[tuple[str, ...]] = DIFFERENCES
    unlabelled: ClassVar[bool] = True
    uses_entropy: ClassVar[bool] = False  # `learn` uses the teachers' entropy

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]
        teachers: Mapping[SiteName, Weights]  # as received, once per site
        holders: Mapping[SiteName, tuple[SiteName, ...]]  # by site: the sites whose teachers it has

    @message
    class Downlink:
        global_: Weights | None  # not while teachers are trained
        teachers: Mapping[SiteName, Weights]  # those the site does not have yet
        wanted: bool  # the server needs the site's teacher now

    @message
    class Uplink:
        global_: Weights | None
        teacher: Weights | None  # background and the site's own organs; once
        loss: Loss
        steps: Count  # 0: the site waited for a teacher

    @message
    class Memory(Method.Memory):
        teaching: TeacherState  # its own teacher, the other sites' teachers, and their labels

    @message
    class Release:
        global_: Weights

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_exclusive(task, local.batchnorm, "learning from teachers")
        for label in self.teachers.priority:
            if label not in task.labels:
                raise StudyError(
                    f"[method.teachers] priority: there is no label '{label}'; choose from {', '.join(task.labels)}."
                )
        self.refuse(task, local)
        if all(card.labels == task.labels for card in roster.values()):
            return ["every site annotates all labels, so there is nothing for teachers to add."]
        return []

    def refuse(self, task: Task, local: Local) -> None:
        """Reject a study that the method cannot run (StudyError); by default none."""

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase(TEACHER, self.teachers.rounds or rounds, counts=False), Phase("train", rounds)]

    def new_teacher(self, site: Site) -> TeacherState:
        """A site's first state: its own teacher before the first step."""
        return TeacherState(site.task.initial("teacher", site.card.labels), None, None, -1.0, 0, {}, None)

    def remember(self, site: Site) -> Memory:
        return self.Memory(self.new_teacher(site))

    def start(self, task: Task, roster: Roster) -> Server:
        n = {name: card.n + card.unlabelled for name, card in roster.items()}
        return self.Server(task.initial(), n, {}, dict.fromkeys(roster, ()), **self.first(task))

    def first(self, task: Task) -> Fields:
        """Fields that the method adds to the server's first state."""
        return {}

    def send(self, server: Server, site: SiteCard, round: Round) -> Any:
        lacks = site.name not in server.teachers
        if round.phase == TEACHER:
            return self.Downlink(None, {}, lacks and round.step + 1 == round.total)
        held = (site.name, *server.holders[site.name])
        new = {name: weights for name, weights in server.teachers.items() if name not in held}
        return self.Downlink(server.global_, new, lacks, **self.also_sent(server, round))

    def also_sent(self, server: Any, round: Round) -> Fields:
        """Fields that the method adds to a downlink while the common model is trained."""
        return {}

    # ------------------------------------------------------------------------------------ at the site

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        if round.phase == TEACHER:
            teaching, loss, steps = taught(site, memory.teaching, round.step + 1, round.total)
            return self.reply(None, loss, steps, teaching if got.wanted else None), replace(memory, teaching=teaching)
        teaching, _, _ = taught(
            site, memory.teaching, self.teachers.rounds or round.total, self.teachers.rounds or round.total
        )
        site = replace(site, data=site.data.with_unlabelled())
        teaching = self._with_teachers(site, teaching, got.teachers)
        memory = replace(memory, teaching=teaching)
        if round.step == 0 and set(self._known(site, teaching)) < set(site.task.labels):
            uplink = self.reply(got.global_, 0.0, 0)  # a late teacher may still arrive, so the site waits
        else:
            uplink, memory = self.learn(
                self._with_maps(site, teaching), memory, got, self._teach(site, teaching), round
            )
        return replace(uplink, teacher=teaching.best) if got.wanted else uplink, memory

    @abstractmethod
    def learn(self, site: Site, memory: Any, got: Any, teach: LabelBatch, round: Round) -> tuple[Any, Any]:
        """Train the common model on the site's batches, labelled by `teach`; returns the uplink and the new memory."""

    def reply(self, global_: Weights | None, loss: float, steps: int, teaching: TeacherState | None = None) -> Uplink:
        """An uplink; with `teaching`, it contains the site's teacher."""
        return self.Uplink(global_, None if teaching is None else teaching.best, loss, steps)

    def _with_teachers(self, site: Site, teaching: TeacherState, new: Mapping[SiteName, Weights]) -> TeacherState:
        others = {**teaching.others, **new}
        if self.teachers.labels == "live" or (teaching.maps is not None and others.keys() == teaching.others.keys()):
            return replace(teaching, others=others)
        everyone = _everyone(site, teaching.best, others)
        return replace(teaching, others=others, maps=maps_of(site, everyone, _labels(site), self.teachers.priority))

    def _known(self, site: Site, teaching: TeacherState) -> tuple[str, ...]:
        """The labels that the site annotates or that one of its teachers knows."""
        drawn = {label for name in (site.card.name, *teaching.others) for label in _labels(site)[name]}
        return tuple(label for label in site.task.labels if label in drawn)

    def _with_maps(self, site: Site, teaching: TeacherState) -> Site:
        maps = teaching.maps
        if maps is None:
            return site

        def beside(case: str) -> Tensor:
            if not self.uses_entropy:
                return maps.labels[case][:1]
            return torch.cat([maps.labels[case].half(), maps.entropy[case]])

        return replace(site, data=site.data.with_maps(beside))

    def _teach(self, site: Site, teaching: TeacherState) -> LabelBatch:
        known = self._known(site, teaching)
        everyone = _everyone(site, teaching.best, teaching.others)

        def teach(batch: Batch) -> LabelledBatch:
            if batch.beside is not None:
                pseudo = read_maps(batch)
            else:
                given = teacher_outputs(site.task, everyone, _labels(site), batch.images)
                pseudo = combined_labels(
                    given, site.task.labels, site.card.labels, batch.bare.cpu(), self.teachers.priority
                )
                pseudo = PseudoLabels(*(part.to(batch.images.device) for part in pseudo))
            shown = None if known == site.task.labels else (known,) * len(batch.cases)
            return LabelledBatch(replace(batch, truth=with_truth(pseudo.others, batch.truth), labels=shown), pseudo)

        return teach

    def trained_loss(self, site: Site, server: Server, memory: Memory | None, round: Round) -> LossOfBatch:
        """The loss on the site's annotation and the labels of all teachers that the server has."""
        teach = self._teach_of(site, server)
        if teach is None:
            return super().trained_loss(site, server, memory, round)
        return self.taught_loss(site, server, memory, teach, round)

    def taught_loss(self, site: Site, server: Any, memory: Any | None, teach: LabelBatch, round: Round) -> LossOfBatch:
        """The loss of a site on batches that `teach` labels; by default the task's loss."""
        return lambda batch: partial(site.task.loss, batch=teach(batch).batch)

    def _teach_of(self, site: Site, server: Server) -> LabelBatch | None:
        """Labels batches by the teachers of a server's state; None if the site does not take part or has no teacher."""
        name = site.card.name
        if name not in site.roster or name not in server.teachers:
            return None
        others = {other: weights for other, weights in server.teachers.items() if other != name}
        return self._teach(site, replace(self.new_teacher(site), best=server.teachers[name], others=others))

    # ------------------------------------------------------------------------------------ at the server

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        came = {k: r.teacher for k, r in replies.items() if r.teacher is not None and k not in server.teachers}
        teachers = {**server.teachers, **came}
        if round.phase == TEACHER:
            return replace(server, teachers=teachers)
        # a reply proves that the site received its request, with all teachers of that time
        had = {name: tuple(sorted(server.teachers.keys() - {name})) for name in replies}
        trained = {name: reply for name, reply in replies.items() if reply.steps}
        server = self.averaged(server, trained, round) if trained else server
        return replace(server, teachers=teachers, holders={**server.holders, **had})

    def averaged(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        """The server's state after merging the replies of sites that trained; by default the average by `shares`."""
        return replace(server, global_=self.average(models_of(replies), server.n, server.global_))

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.global_)

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        return OneModel(task, released.global_, "global")

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Any:
        model = None if round.phase == TEACHER else task.shape()
        teacher = Maybe(task.shape("teacher", card.labels), once=True)
        expected: Fields = {"teacher": teacher, **self.expected(task, round)}
        return replace(self.reply(model, 0.0, 0), **expected)

    def expected(self, task: Task, round: Round) -> Fields:
        """Fields that the method adds to the expected uplink."""
        return {}


def model_of(got: PseudoLabelled.Downlink) -> Weights:
    """The common model in a downlink of phase "train"."""
    assert got.global_ is not None
    return got.global_


def models_of(replies: Mapping[SiteName, PseudoLabelled.Uplink]) -> dict[SiteName, Weights]:
    """The common model as each site trained it."""
    return {name: reply.global_ for name, reply in replies.items() if reply.global_ is not None}


def _labels(site: Site) -> dict[SiteName, tuple[str, ...]]:
    return {name: card.labels for name, card in site.roster.items()}


def _everyone(site: Site, own: Weights | None, others: Mapping[SiteName, Weights]) -> dict[SiteName, Weights]:
    assert own is not None
    return {**others, site.card.name: own}
