"""A site's answers; the same object behind every wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from consilium import tree
from consilium.errors import NotForOutsiders
from consilium.fields import plain
from consilium.local_norm import LocalNorm
from consilium.local_training import Local
from consilium.machine import use_threads
from consilium.messages import SCORED, AnswerHead, Request, ScoredModel
from consilium.method import Method
from consilium.outgoing import Outgoing, SiteRules, leave
from consilium.policy import Policy
from consilium.predictor import Predictor
from consilium.score_sheets import WHOLE, Score, make_sheet
from consilium.site import Site
from consilium.stopwatch import Stopwatch
from consilium.store import MemoryStore, read_release, write_release
from consilium.study import Study
from consilium.task import CaseScore, Task
from consilium.tree import Packet, unflatten
from consilium.weights import SiteName, Weights

Measure = Callable[[], AnswerHead]  # what is told beside an answer, when the work is done


@dataclass(frozen=True)
class Worker:
    """One hospital at work for one run."""

    study: Study
    site: Site
    memories: MemoryStore
    norm: LocalNorm
    member: bool
    place: Path  # the site's own folder for this run
    policy: Policy
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # what one round may take; its data look at it

    @property
    def method(self) -> Method:
        return self.study.method

    def train(self, order: Packet, request: Request, measure: Measure = AnswerHead) -> Outgoing:
        """Answer an order; a lost or repeated order leaves no other trace than this round's memory."""
        assert request.round is not None
        use_threads(self.site.local.threads)
        kept = self.kept(request.merged)
        memory = kept.memory if kept else self.method.remember(self.site)
        own = kept.norm if kept else None
        got: Any = unflatten(self.norm.onto(order, own), self.method.Downlink)
        site = self._spending(got, memory)
        uplink, memory = self.method.train(site, memory, got, request.round)

        def keep(norm: Weights | None) -> None:
            assert request.round is not None
            if self.norm.remembers(self.method, self.site.local):
                # a later memory was never merged; the one before the merged is wanted if the server, which may be
                # writing that round only now, does not live to do so, and the one before that if its last state is
                # damaged
                before = self.memories.before(request.merged)
                rounds = (request.merged, before, self.memories.before(before), *request.wanted)
                self.memories.put(request.round.index, self.norm.kept(self.method)(memory, norm), rounds)

        spent = tuple(site.private.spent) if site.private else ()
        rules = SiteRules(self.study, self.policy, self.norm, order, own, keep, spent)
        return leave(uplink, measure(), rules, request)

    def _spending(self, got: Any, memory: Any) -> Site:
        """The site with an empty account: what one answer costs is written there."""
        if self.site.private is None:
            return self.site
        given = tuple(weights.digest for weights in (*tree.split(got).models(), *tree.split(memory).weights.values()))
        return replace(self.site, private=replace(self.site.private, given=given, spent=[]))

    def kept(self, round: int) -> Any | None:
        """The memory of that round, where there is one."""
        return kept_at(self.memories, round, self.method, self.norm, self.site.local) if self.member else None

    def predictor(self, release: Packet, merged: int) -> Predictor:
        """What a release becomes at this site, with its memory."""
        return deployed(self.method, self.site.task, self.norm, self.kept(merged), release)

    def score(self, release: Packet, request: Request, measure: Measure = AnswerHead) -> Outgoing:
        """Every model of the release on this site's validation and test cases."""
        use_threads(self.site.local.threads)
        sheet = make_sheet(self.scores(release, request))
        return leave(sheet, measure(), SiteRules(self.study, self.policy), request)

    def scores(self, release: Packet, request: Request) -> Iterator[Score]:
        try:
            first = self.predictor(release, request.merged)
        except NotForOutsiders:
            return
        predictors = [first, *first.others(), *(first.elsewhere() if request.full else ())]
        assert request.round is not None
        tested = request.full or self.study.plan.tested(request.round.step, request.round.total)
        for split in SCORED if tested else SCORED[:1]:
            for predictor in predictors:
                try:
                    yield from self._scores(predictor, split, request.full)
                except NotForOutsiders:
                    continue

    def _scores(self, predictor: Predictor, split: str, full: bool) -> list[Score]:
        name, task = self.site.card.name, self.site.task
        model = ScoredModel(predictor.model, predictor.of, predictor.when)
        scores: list[Score] = []

        def add(case: str, slice: int, marks: Iterable[CaseScore]) -> None:
            scores.extend(Score(model, split, case, slice, mark.label, mark.metric, mark.value) for mark in marks)

        outputs: list[Tensor] = []
        truths: list[Tensor] = []
        for batch in self.site.data.whole(split, 16):
            answer = predictor.answer(batch.images, bool(batch.volume))
            if batch.volume:
                whole = answer.output.transpose(0, 1)
                marks = task.score(whole, batch.truth, full, batch.labels_of(0), batch.spacing_of(0))
                add(batch.volume, WHOLE, marks)
            for i, case in enumerate(batch.cases):
                place = (batch.volume, i) if batch.volume else (case, WHOLE)
                detailed, known, spacing = full and not batch.volume, batch.labels_of(i), batch.spacing_of(i)
                marks = task.score(answer.output[i], batch.truth[i], detailed, known, spacing)
                if batch.volume:  # slices without the organ have no score; the volume counts what is found there
                    marks = [CaseScore(m.label, f"slice_{m.metric}", m.value) for m in marks if m.metric != "empty"]
                add(*place, marks)
                choice = answer.choices[i]
                if choice.chances:
                    add(*place, [CaseScore("", f"chosen:{choice.key}", 1.0)])
                    add(*place, [CaseScore("", "confidence", choice.confidence or 0.0)])
                    if name in choice.chances:
                        right = max(choice.chances, key=choice.chances.__getitem__) == name
                        add(*place, [CaseScore("", "routed", float(right))])
            if task.needs_all:
                outputs += list(answer.output)
                truths += list(batch.truth)
        add("", WHOLE, task.score_all(outputs, truths, full))
        return scores

    def deliver(self, release: Packet, request: Request, measure: Measure = AnswerHead) -> Outgoing:
        """Store the release beside the memory it goes with, for use without the server."""
        facts: dict[str, Any] = {"run": request.run, "method": request.method, "merged": request.merged}
        if request.profile is not None:
            facts["distribution"] = request.profile.to_json()
        if request.seal is not None:
            facts["seal"] = {**plain(request.seal), "header": release.header, "tensors": dict(request.tensors)}
        write_release(release, facts, self.place, self.memories.durable, self.memories.private)
        return leave(None, measure(), SiteRules(self.study, self.policy), request)


def kept_at(memories: MemoryStore, round: int, method: Method, norm: LocalNorm, local: Local) -> Any | None:
    """What a site kept in that round; None where there is nothing to keep."""
    return memories.at(round, norm.kept(method)) if norm.remembers(method, local) else None


def open_released(method: Method, task: Task, norm: LocalNorm, local: Local, place: Path, site: SiteName) -> Predictor:
    """What was delivered to a site's folder, with the memory beside it; neither the server nor the data are needed."""
    release, facts = read_release(place)
    kept = kept_at(MemoryStore(place / "memory", site), facts["merged"], method, norm, local)
    return deployed(method, task, norm, kept, release)


def deployed(method: Method, task: Task, norm: LocalNorm, kept: Any | None, release: Packet) -> Predictor:
    """What a release becomes at a site with what it kept."""
    released: Any = unflatten(norm.onto(release, kept.norm if kept else None), method.Release)
    return method.deploy(task, kept.memory if kept else None, released)
