"""What methods share whose sites annotate different organs: teachers, sent once, label what a site does not."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.learning.pseudo_labels import Maps, Said, maps_of, opinions, read_maps, said, with_truth
from consilium.method import LossOfBatch, Maybe, Method, OptimizerState, Phase, message
from consilium.methods.merged import check_exclusive, merged_logits
from consilium.methods.selector import check_fields
from consilium.methods.shares import WithShares
from consilium.site import Batch, Local, OneModel, Predictor, Roster, Round, Site, SiteCard, Task
from consilium.weights import SiteName, Weights

PAPER = "Jiang et al., UFPS: a unified framework for partially annotated federated segmentation (Patterns 2024)"
DIFFERENCES = (
    "A voxel belongs to one label; background is what nobody claims, after the site's own annotation was put in.",
    "Hidden masks reach nothing: neither the choice of patches nor that of rounds, as they do in the published code.",
    "A site that lacks a teacher waits a round; then the organ is unknown there until the teacher comes.",
)
TEACHER = "teacher"  # the phase before the paper's rounds


@message
class School:
    """A site's own teacher in the making, the teachers of others, and what they all say of the training cases."""

    teacher: Weights  # as trained so far
    state: OptimizerState | None  # of its optimiser, until it is done
    best: Weights | None  # its best round on the site's own validation cases
    valid: float  # and that round's score
    rounds: int  # it has been trained for
    others: Mapping[SiteName, Weights]  # never change once they have come
    maps: Maps | None  # with `teachers = "cached"`


class Lesson(NamedTuple):
    """A batch with its pseudo labels."""

    batch: Batch  # its truth: the site's annotation, then the teachers' labels
    said: Said


Teach = Callable[[Batch], Lesson]


@dataclass(frozen=True)
class PseudoLabelled(WithShares, Method):
    """Phase "teacher": each site trains one on its own organs. Phase "train": one model of all organs on their labels.

    A method's own part is how a site learns from a labelled batch (`learn`) and how the server averages (`averaged`).
    """

    teacher_rounds: int = 0  # local rounds of every teacher, before the study's; 0: as many as the study's
    teachers: str = "cached"  # their labels are made once, on whole cases; "live": on every batch, as augmented
    priority: tuple[str, ...] = ()  # organs that win a voxel two teachers claim; else the more probable one does

    headline: ClassVar[str] = "global"
    differences: ClassVar[tuple[str, ...]] = DIFFERENCES
    unlabelled: ClassVar[bool] = True
    hears_doubt: ClassVar[bool] = False  # `learn` uses the teachers' entropy

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]
        teachers: Mapping[SiteName, Weights]  # as they came, once
        holders: Mapping[SiteName, tuple[SiteName, ...]]  # by site: whose teachers it has

    @message
    class Downlink:
        global_: Weights | None  # not while teachers are trained
        teachers: Mapping[SiteName, Weights]  # those the site does not have yet
        wanted: bool  # the server lacks the site's teacher, and it is due

    @message
    class Uplink:
        global_: Weights | None
        teacher: Weights | None  # background and the site's own organs; once
        loss: float
        steps: int  # 0: the site waited for a teacher

    @message
    class Memory(Method.Memory):
        school: School  # its teacher in the making, the others' teachers, what they say of the site's cases

    @message
    class Release:
        global_: Weights

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_rounds < 0:
            raise StudyError(f"[method] teacher_rounds = {self.teacher_rounds}: it cannot be negative.")
        check_fields(teachers=(self.teachers, ("cached", "live")))
        if len(set(self.priority)) < len(self.priority):
            raise StudyError(f"[method] priority = {list(self.priority)}: a label is named twice.")

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_exclusive(task, local.batchnorm, "learning from teachers")
        for label in self.priority:
            if label not in task.labels:
                raise StudyError(
                    f"[method] priority: there is no label '{label}'; choose from {', '.join(task.labels)}."
                )
        if all(card.labels == task.labels for card in roster.values()):
            return ["every site annotates all labels, so there is nothing for teachers to add."]
        return []

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase(TEACHER, self.teacher_rounds or rounds, counts=False), Phase("train", rounds)]

    def schooled(self, site: Site) -> School:
        """A site's first school: its own teacher before the first step."""
        return School(site.task.initial("teacher", site.card.labels), None, None, -1.0, 0, {}, None)

    def remember(self, site: Site) -> Any:
        return self.Memory(self.schooled(site))

    def start(self, task: Task, roster: Roster) -> Any:
        n = {name: card.n + card.unlabelled for name, card in roster.items()}
        return self.Server(task.initial(), n, {}, dict.fromkeys(roster, ()))

    def send(self, server: Any, site: SiteCard, round: Round) -> Any:
        lacks = site.name not in server.teachers
        if round.phase == TEACHER:
            return self.Downlink(None, {}, lacks and round.step + 1 == round.total)
        return self.Downlink(**self.sent(server, site, round))

    def sent(self, server: Any, site: SiteCard, round: Round) -> dict[str, Any]:
        """The fields of a downlink while the common model is trained."""
        held = (site.name, *server.holders[site.name])
        new = {name: weights for name, weights in server.teachers.items() if name not in held}
        return {"global_": server.global_, "teachers": new, "wanted": site.name not in server.teachers}

    # ------------------------------------------------------------------------------------ at the site

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        if round.phase == TEACHER:
            school, loss, steps = taught(site, memory.school, round.step + 1, round.total)
            return self.reply(None, loss, steps, school if got.wanted else None), replace(memory, school=school)
        school, _, _ = taught(
            site, memory.school, self.teacher_rounds or round.total, self.teacher_rounds or round.total
        )
        site = replace(site, data=site.data.with_unlabelled())
        school = self._with_teachers(site, school, got.teachers)
        memory = replace(memory, school=school)
        if round.step == 0 and set(self._known(site, school)) < set(site.task.labels):
            uplink = self.reply(got.global_, 0.0, 0)  # a late teacher may still come; the round is not spoilt
        else:
            uplink, memory = self.learn(self._with_maps(site, school), memory, got, self._teach(site, school), round)
        return replace(uplink, teacher=school.best) if got.wanted else uplink, memory

    @abstractmethod
    def learn(self, site: Site, memory: Any, got: Any, teach: Teach, round: Round) -> tuple[Any, Any]:
        """Train the common model on the site's batches as `teach` labels them."""

    def reply(self, global_: Weights | None, loss: float, steps: int, school: School | None = None) -> Any:
        """An uplink; with a `school`, its teacher goes along."""
        return self.Uplink(global_, None if school is None else school.best, loss, steps)

    def _with_teachers(self, site: Site, school: School, new: Mapping[SiteName, Weights]) -> School:
        others = {**school.others, **new}
        if self.teachers == "live" or (school.maps is not None and others.keys() == school.others.keys()):
            return replace(school, others=others)
        everyone = _everyone(site, school.best, others)
        return replace(school, others=others, maps=maps_of(site, everyone, _labels(site), self.priority))

    def _known(self, site: Site, school: School) -> tuple[str, ...]:
        """The labels that the site annotates or that a teacher it has knows."""
        drawn = {label for name in (site.card.name, *school.others) for label in _labels(site)[name]}
        return tuple(label for label in site.task.labels if label in drawn)

    def _with_maps(self, site: Site, school: School) -> Site:
        maps = school.maps
        if maps is None:
            return site

        def beside(case: str) -> Tensor:
            if not self.hears_doubt:
                return maps.labels[case][:1]
            return torch.cat([maps.labels[case].half(), maps.entropy[case]])

        return replace(site, data=site.data.with_maps(beside))

    def _teach(self, site: Site, school: School) -> Teach:
        known = self._known(site, school)
        everyone = _everyone(site, school.best, school.others)

        def teach(batch: Batch) -> Lesson:
            if batch.beside is not None:
                heard = read_maps(batch)
            else:
                given = opinions(site.task, everyone, _labels(site), batch.images)
                heard = said(given, site.task.labels, site.card.labels, batch.bare.cpu(), self.priority)
                heard = Said(*(part.to(batch.images.device) for part in heard))
            shown = None if known == site.task.labels else (known,) * len(batch.cases)
            return Lesson(replace(batch, truth=with_truth(heard.others, batch.truth), labels=shown), heard)

        return teach

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        """The loss on the site's annotation and the labels of all teachers that the server has."""
        teach = self._teach_of(site, server)
        if teach is None:
            return super().trained_loss(site, server, memory, round)
        return lambda batch: partial(site.task.loss, batch=teach(batch).batch)

    def _teach_of(self, site: Site, server: Any) -> Teach | None:
        """How a site is taught by the teachers of a server's state; None where it takes no part or has no teacher."""
        name = site.card.name
        if name not in site.roster or name not in server.teachers:
            return None
        others = {other: weights for other, weights in server.teachers.items() if other != name}
        return self._teach(site, replace(self.schooled(site), best=server.teachers[name], others=others))

    # ------------------------------------------------------------------------------------ at the server

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        came = {k: r.teacher for k, r in replies.items() if r.teacher is not None and k not in server.teachers}
        teachers = {**server.teachers, **came}
        if round.phase == TEACHER:
            return replace(server, teachers=teachers)
        # a reply shows that its order arrived, and all the teachers there were with it
        had = {name: tuple(sorted(server.teachers.keys() - {name})) for name in replies}
        trained = {name: reply for name, reply in replies.items() if reply.steps}
        server = self.averaged(server, trained, round) if trained else server
        return replace(server, teachers=teachers, holders={**server.holders, **had})

    def averaged(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        """The server after the sites that trained have answered; here: averaged by `shares`."""
        models = {name: reply.global_ for name, reply in replies.items()}
        return replace(server, global_=self.average(models, server.n))

    def release(self, server: Any, site: SiteCard | None) -> Any:
        return self.Release(server.global_)

    def deploy(self, task: Task, memory: Any | None, released: Any) -> Predictor:
        return OneModel(task, released.global_, "global")

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Any:
        model = None if round.phase == TEACHER else task.shape()
        return replace(self.reply(model, 0.0, 0), teacher=Maybe(task.shape("teacher", card.labels), once=True))


def _labels(site: Site) -> dict[SiteName, tuple[str, ...]]:
    return {name: card.labels for name, card in site.roster.items()}


def _everyone(site: Site, own: Weights | None, others: Mapping[SiteName, Weights]) -> dict[SiteName, Weights]:
    assert own is not None
    return {**others, site.card.name: own}


def taught(site: Site, school: School, until: int, total: int) -> tuple[School, float, int]:
    """The site's own teacher after `until` of its `total` rounds: a site that was away catches up.

    The best round on its own organs in its own validation cases is the teacher; without such cases, the last.
    """
    loss, steps = 0.0, 0
    for step in range(school.rounds, until):
        job = Job(school.teacher, kind="teacher", labels=site.card.labels)
        before = {} if school.state is None else {TEACHER: school.state}
        fits = fit(site, {TEACHER: job}, Round(step, TEACHER, step, total), before)
        done = fits[TEACHER]
        loss, steps = done.loss, steps + done.steps
        score = own_score(site, lambda images, teacher=done.weights: _wide(site, teacher, images))  # type: ignore[misc]
        better = score is None or score > school.valid
        school = replace(
            school,
            teacher=done.weights,
            state=fits.states.get(TEACHER) if step + 1 < total else None,
            best=done.weights if better or school.best is None else school.best,
            valid=score if better and score is not None else school.valid,
            rounds=step + 1,
        )
    return school, loss, steps


def _wide(site: Site, teacher: Weights, images: Tensor) -> Tensor:
    """A teacher's logits, with channels for all labels."""
    output = site.task.infer(teacher, images, "teacher", site.card.labels)
    return merged_logits([(site.card.labels, output)], site.task.labels)


def own_score(site: Site, answer: Callable[[Tensor], Tensor]) -> float | None:
    """The mean validation score of logits over all labels, on those the site annotates; None without such cases."""
    values: list[float] = []
    for batch in site.data.whole("valid", site.local.batch_size):
        output = answer(batch.images)
        for i in range(len(batch.cases)):
            marks = site.task.score(output[i], batch.truth[i], False, batch.labels_of(i), batch.spacing_of(i))
            values += [mark.value for mark in marks if mark.metric == site.task.headline]
    return sum(values) / len(values) if values else None
