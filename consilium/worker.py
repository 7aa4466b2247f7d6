"""A site's answers; the same object behind every wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consilium import __version__
from consilium.data.cache import SiteArrays, open_site, table_hash
from consilium.data.cases import Cases
from consilium.data.preprocess import fingerprint
from consilium.data.site_folder import Federation
from consilium.errors import NotForOutsiders, StudyError
from consilium.local_norm import LocalNorm
from consilium.machine import pick_device
from consilium.messages import SCORED, AnswerHead, Request, ScoredModel, SiteFacts
from consilium.method import Method
from consilium.outgoing import Outgoing, SiteRules, leave
from consilium.policy import Permissive, Policy, simulated_secret
from consilium.score_sheets import WHOLE, Score, make_sheet
from consilium.site import POOLED, Local, Mark, Predictor, Roster, Site, SiteCard, Task
from consilium.store import MemoryShelf, read_release, write_release
from consilium.study import Study
from consilium.tree import Packet, unflatten
from consilium.weights import SiteName, Weights

Measure = Callable[[], AnswerHead]  # what is told beside an answer, when the work is done


@dataclass(frozen=True)
class Worker:
    """One hospital at work for one run."""

    study: Study
    site: Site
    shelf: MemoryShelf
    norm: LocalNorm
    member: bool
    place: Path  # the site's own folder for this run
    policy: Policy

    @property
    def method(self) -> Method:
        return self.study.method

    def train(self, order: Packet, request: Request, measure: Measure = AnswerHead) -> Outgoing:
        """Answer an order; a lost or repeated order leaves no other trace than this round's memory."""
        assert request.round is not None
        torch.set_num_threads(self.site.local.threads)
        kept = self.kept(request.merged)
        memory = kept.memory if kept else self.method.remember(self.site)
        own = kept.norm if kept else None
        got: Any = unflatten(self.norm.onto(order, own), self.method.Downlink)
        uplink, memory = self.method.train(self.site, memory, got, request.round)

        def keep(norm: Weights | None) -> None:
            assert request.round is not None
            if self.norm.remembers(self.method, self.site.local):
                # a later memory was never merged; the one before the merged is wanted if the server, which may be
                # writing that round only now, does not live to do so, and the one before that if its last state is
                # damaged
                before = self.shelf.before(request.merged)
                rounds = (request.merged, before, self.shelf.before(before), *request.wanted)
                self.shelf.put(request.round.index, self.norm.kept(self.method)(memory, norm), rounds)

        rules = SiteRules(self.study, self.policy, self.norm, order, own, keep)
        return leave(uplink, measure(), rules, request)

    def kept(self, round: int) -> Any | None:
        """The memory of that round, where there is one."""
        return kept_at(self.shelf, round, self.method, self.norm, self.site.local) if self.member else None

    def predictor(self, release: Packet, merged: int) -> Predictor:
        """What a release becomes at this site, with its memory."""
        return deployed(self.method, self.site.task, self.norm, self.kept(merged), release)

    def score(self, release: Packet, request: Request, measure: Measure = AnswerHead) -> Outgoing:
        """Every model of the release on this site's validation and test cases."""
        torch.set_num_threads(self.site.local.threads)
        sheet = make_sheet(self.scores(release, request))
        return leave(sheet, measure(), SiteRules(self.study, self.policy), request)

    def scores(self, release: Packet, request: Request) -> Iterator[Score]:
        try:
            first = self.predictor(release, request.merged)
        except NotForOutsiders:
            return
        predictors = [first, *first.others(), *(first.elsewhere() if request.full else ())]
        for split in SCORED:
            for predictor in predictors:
                try:
                    yield from self._scores(predictor, split, request.full)
                except NotForOutsiders:
                    continue

    def _scores(self, predictor: Predictor, split: str, full: bool) -> list[Score]:
        name, task = self.site.card.name, self.site.task
        model = ScoredModel(predictor.model, predictor.of, predictor.when)
        scores: list[Score] = []

        def add(case: str, slice: int, marks: Iterable[Mark]) -> None:
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
                    marks = [Mark(m.label, f"slice_{m.metric}", m.value) for m in marks if m.metric != "empty"]
                add(*place, marks)
                choice = answer.choices[i]
                if choice.chances:
                    add(*place, [Mark("", f"chosen:{choice.key}", 1.0)])
                    add(*place, [Mark("", "confidence", choice.confidence or 0.0)])
                    if name in choice.chances:
                        right = max(choice.chances, key=choice.chances.__getitem__) == name
                        add(*place, [Mark("", "routed", float(right))])
            if task.needs_all:
                outputs += list(answer.output)
                truths += list(batch.truth)
        add("", WHOLE, task.score_all(outputs, truths, full))
        return scores

    def deliver(self, release: Packet, request: Request, measure: Measure = AnswerHead) -> Outgoing:
        """Store the release beside the memory it goes with, for use without the server."""
        facts = {"run": request.run, "method": request.method, "merged": request.merged}
        write_release(release, facts, self.place, self.shelf.durable, self.shelf.private)
        return leave(None, measure(), SiteRules(self.study, self.policy), request)

    def released(self) -> Predictor:
        """What was delivered here, ready to use; the server is not asked."""
        return open_released(self.method, self.site.task, self.norm, self.site.local, self.place, self.site.card.name)


def kept_at(shelf: MemoryShelf, round: int, method: Method, norm: LocalNorm, local: Local) -> Any | None:
    """What a site kept in that round; None where there is nothing to keep."""
    return shelf.at(round, norm.kept(method)) if norm.remembers(method, local) else None


def open_released(method: Method, task: Task, norm: LocalNorm, local: Local, place: Path, site: SiteName) -> Predictor:
    """What was delivered to a site's folder, with the memory beside it; neither the server nor the data are needed."""
    release, facts = read_release(place)
    kept = kept_at(MemoryShelf(place / "memory", site), facts["merged"], method, norm, local)
    return deployed(method, task, norm, kept, release)


def deployed(method: Method, task: Task, norm: LocalNorm, kept: Any | None, release: Packet) -> Predictor:
    """What a release becomes at a site with what it kept."""
    released: Any = unflatten(norm.onto(release, kept.norm if kept else None), method.Release)
    return method.deploy(task, kept.memory if kept else None, released)


# ---------------------------------------------------------------------------------------------- opening a site


def members_of(study: Study, federation: Federation) -> list[SiteName]:
    """The sites that train, in name order."""
    names = sorted(study.plan.sites or federation.sites)
    for name in (*names, *study.plan.leave_out, *study.plan.away, *study.data.annotated):
        if name not in federation.sites:
            raise StudyError(f"there is no site '{name}'; the federation has {', '.join(federation.sites)}.")
    members = [name for name in names if name not in study.plan.leave_out]
    if not members:
        raise StudyError("[study] leave_out leaves no site to train.")
    return members


def annotated_at(study: Study, federation: Federation, site: SiteName) -> tuple[str, ...]:
    """The labels a site draws, in the federation's order; all else is unknown in its masks, even if it is there."""
    override = study.data.annotated.get(site, federation.sites[site].annotated)
    if override == "all":
        return federation.labels
    for label in override:
        if label not in federation.labels:
            raise StudyError(f"[data] annotated.{site}: there is no label '{label}'; choose from {federation.labels}.")
    if not override:
        raise StudyError(
            f"[data] annotated.{site} is empty: with nothing annotated there is nothing to learn at '{site}'; "
            "name a label, or leave the site out with study.leave_out."
        )
    return tuple(label for label in federation.labels if label in override)


def check_annotation(study: Study, federation: Federation, members: Sequence[SiteName]) -> None:
    """Every label must be drawn by someone who trains, or a channel of the network would never learn."""
    drawn = {label for site in members for label in annotated_at(study, federation, site)}
    nobody = [label for label in federation.labels if label not in drawn]
    if nobody and federation.task == "segmentation":
        raise StudyError(
            f"no site that trains annotates {', '.join(map(repr, nobody))}; give it to one with [data] annotated "
            "or its site.toml, or take it out of labels in federation.toml."
        )


def open_arrays(study: Study, federation: Federation, site: SiteName) -> SiteArrays:
    return open_site(
        federation,
        federation.sites[site],
        study.preprocess,
        annotated=annotated_at(study, federation, site),
        complete_tests=study.data.test_masks == "complete",
    )


def place_in(run: Path, site: SiteName) -> Path:
    """The folder of a site in a simulated run, where nobody else writes."""
    return run / "sites" / site


def open_worker(study: Study, federation: Federation, site: SiteName, roster: Roster, place: Path) -> Worker:
    """A site of a simulation: it has no rules of its own and no secrets."""
    return open_at(study, federation, site, roster, place, Permissive(simulated_secret(study, site)))


def open_at(
    study: Study,
    federation: Federation,
    site: SiteName,
    roster: Roster,
    place: Path,
    policy: Policy,
    hospital: bool = False,
) -> Worker:
    """A site with its data and `place`, its own folder for this run; of the federation it need know only itself.

    At a `hospital` what it keeps is on the disk before it answers, and closed to other users.
    """
    sources = members_of(study, federation) if is_pooled(site, study, federation) else [site]
    arrays = tuple(open_arrays(study, federation, name) for name in sources)
    member = site in roster
    card = roster.get(site) or SiteCard(site, -1, 0, federation.labels)
    device = pick_device(study.local.device, card.index)
    task = study.task.on(device) if device != "cpu" else study.task
    data = Cases(arrays, study.task_fields.augment, study.task_fields.patch, bool(study.preprocess.slices))
    return Worker(
        study,
        Site(card, roster, task, data, study.local, device, study.plan.seed),
        MemoryShelf(place / "memory", site, durable=hospital, private=hospital),
        LocalNorm.of(task, study.local.batchnorm, site),
        member,
        place,
        policy,
    )


def is_pooled(site: SiteName, study: Study, federation: Federation) -> bool:
    """Whether this is the virtual site that holds all cases; runs of version 0.1 called it "pooled"."""
    return site == POOLED or (study.pooled and site == POOLED.strip("()") and site not in federation.sites)


def site_facts(study: Study, federation: Federation, site: SiteName) -> SiteFacts:
    """What a site says at roll call, its own names and hashes included: they are hidden when it leaves."""
    arrays = open_arrays(study, federation, site)
    cases = Cases((arrays,), slices=bool(study.preprocess.slices))
    n, more = len(cases), len(cases.with_unlabelled()) - len(cases)
    profile = None if study.privacy.on else arrays.profile("train")  # noise does not cover it, so it stays
    return SiteFacts(
        n=n,
        unlabelled=more,
        labels=annotated_at(study, federation, site),
        cases=len(arrays.cases),
        scored={split: len(arrays.indices(split)) for split in SCORED},
        table=table_hash(arrays.cases),
        arrays=arrays.folder.name,  # content and preprocessing, by hash
        version=__version__,
        study=study.hash,
        preprocessing=fingerprint(study.preprocess),
        profile=profile,
    )
