"""A site's answers; the same object behind every wire."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consilium import __version__
from consilium.data.cache import SiteArrays, open_site
from consilium.data.cases import Cases
from consilium.data.site_folder import Federation
from consilium.envelope import Envelope
from consilium.errors import NotForOutsiders, StudyError
from consilium.local_norm import LocalNorm
from consilium.machine import pick_device
from consilium.method import Method
from consilium.privacy.dp import Veil
from consilium.refusal import stamped
from consilium.scores import Row
from consilium.site import Batch, Local, Mark, Predictor, Roster, Site, SiteCard, Task
from consilium.store import MemoryShelf, read_release, write_release
from consilium.study import Study
from consilium.tree import Packet, flatten, unflatten
from consilium.weights import SiteName

POOLED = "pooled"  # the virtual site that holds all cases
SCORED = ("valid", "test")


@dataclass(frozen=True)
class Worker:
    """One hospital at work for one run."""

    method: Method
    site: Site
    shelf: MemoryShelf
    norm: LocalNorm
    member: bool
    outside: bool
    place: Path  # the site's own folder for this run
    veil: Veil
    alias: Callable[[str], str] = str  # a case's name as the server may read it

    def train(self, order: Packet, head: Envelope) -> Packet:
        """Answer an order; a lost or repeated order leaves no other trace than this round's memory."""
        torch.set_num_threads(self.site.local.threads)
        merged = head.merged[self.site.card.name]
        kept = self.kept(merged)
        memory = kept.memory if kept else self.method.remember(self.site)
        own = kept.norm if kept else None
        got: Any = unflatten(self.norm.onto(order, own), self.method.Downlink)
        uplink, memory = self.method.train(self.site, memory, got, head.round)
        reply, own = self.norm.off(flatten(self.veil.bare(uplink)), order, own)
        reply = self.veil.over(reply, order, head.run, head.round)
        if self.norm.remembers(self.method, self.site.local):
            # a later memory was never merged; the one before the merged is wanted if the server, which may be
            # writing that round only now, does not live to do so, and the one before that if its last state is damaged
            before = self.shelf.before(merged)
            keep = (merged, before, self.shelf.before(before), *head.wanted.get(self.site.card.name, ()))
            self.shelf.put(head.round.index, self.norm.kept(self.method)(memory, own), keep)
        return stamped(reply, head, self.site.card.name)

    def kept(self, round: int) -> Any | None:
        """The memory of that round, where there is one."""
        return kept_at(self.shelf, round, self.method, self.norm, self.site.local) if self.member else None

    def predictor(self, release: Packet, merged: int) -> Predictor:
        """What a release becomes at this site, with its memory."""
        return deployed(self.method, self.site.task, self.norm, self.kept(merged), release)

    def score(self, release: Packet, head: Envelope) -> list[Row]:
        """Every model of the release on this site's validation and test cases."""
        torch.set_num_threads(self.site.local.threads)
        try:
            first = self.predictor(release, head.merged.get(self.site.card.name, -1))
        except NotForOutsiders:
            return []
        predictors = [first, *first.others(), *(first.elsewhere() if head.full else ())]
        rows: list[Row] = []
        for split in SCORED:
            for predictor in predictors:
                try:
                    rows += self._score(predictor, split, head)
                except NotForOutsiders:
                    continue
        return rows

    def _score(self, predictor: Predictor, split: str, head: Envelope) -> Iterator[Row]:
        name = self.site.card.name

        def row(case: str, label: str, metric: str, value: float) -> Row:
            return Row(
                head.round.number, head.round.phase, predictor.model, predictor.of, predictor.when,
                name, self.outside, split, self.alias(case) if case else "", label, metric, float(value),
            )  # fmt: skip

        outputs: list[Tensor] = []
        truths: list[Tensor] = []
        rows: list[Row] = []
        for batch in self.site.data.whole(split, 16):
            answer = predictor.answer(batch.images, batch.volume)
            if batch.volume:
                whole = answer.output.transpose(0, 1)
                marks = self.site.task.score(whole, batch.truth, head.full, batch.labels_of(0), batch.spacing_of(0))
                rows += [row(volume_of(batch), mark.label, mark.metric, mark.value) for mark in marks]
            for i, case in enumerate(batch.cases):
                full, known, spacing = head.full and not batch.volume, batch.labels_of(i), batch.spacing_of(i)
                marks = self.site.task.score(answer.output[i], batch.truth[i], full, known, spacing)
                if batch.volume:  # slices without the organ have no score; the volume counts what is found there
                    marks = [Mark(m.label, f"slice_{m.metric}", m.value) for m in marks if m.metric != "empty"]
                rows += [row(case, mark.label, mark.metric, mark.value) for mark in marks]
                choice = answer.choices[i]
                if choice.chances:
                    rows.append(row(case, "", f"chosen:{choice.key}", 1.0))
                    rows.append(row(case, "", "confidence", choice.confidence or 0.0))
                    if name in choice.chances:
                        right = max(choice.chances, key=choice.chances.__getitem__) == name
                        rows.append(row(case, "", "routed", float(right)))
            if self.site.task.needs_all:
                outputs += list(answer.output)
                truths += list(batch.truth)
        rows += [row("", m.label, m.metric, m.value) for m in self.site.task.score_all(outputs, truths, head.full)]
        return iter(rows)

    def deliver(self, release: Packet, head: Envelope) -> None:
        """Store the release beside the memory it goes with, for use without the server."""
        facts = {"run": head.run, "method": head.method, "merged": head.merged.get(self.site.card.name, -1)}
        write_release(release, facts, self.place, self.shelf.durable, self.shelf.private)

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


def volume_of(batch: Batch) -> str:
    """The name of the volume whose slices a batch holds."""
    return batch.cases[0].rpartition("#")[0]


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


def open_worker(
    study: Study,
    federation: Federation,
    site: SiteName,
    roster: Roster,
    place: Path,
    hospital: bool = False,
    alias: Callable[[str], str] = str,
    secret: bytes = b"",
) -> Worker:
    """A site with its data and `place`, its own folder for this run; of the federation it need know only itself.

    At a `hospital` what it keeps is on the disk before it answers, and closed to other users.
    """
    sources = members_of(study, federation) if site == POOLED else [site]
    arrays = tuple(open_arrays(study, federation, name) for name in sources)
    member = site in roster
    card = roster.get(site) or SiteCard(site, -1, 0, federation.labels)
    device = pick_device(study.local.device, card.index)
    task = study.task.on(device) if device != "cpu" else study.task
    data = Cases(arrays, study.task_fields.augment, study.task_fields.patch, bool(study.preprocess.slices))
    return Worker(
        study.method,
        Site(card, roster, task, data, study.local, device, study.plan.seed),
        MemoryShelf(place / "memory", site, durable=hospital, private=hospital),
        LocalNorm.of(task, study.local.batchnorm, site),
        member,
        outside=site in study.plan.leave_out,
        place=place,
        veil=Veil(study.privacy, secret or f"{study.plan.seed}|{site}".encode()),  # a simulation has no secrets
        alias=alias,
    )


def site_facts(study: Study, federation: Federation, site: SiteName) -> dict[str, Any]:
    """What a site says at roll call."""
    arrays = open_arrays(study, federation, site)
    cases = Cases((arrays,), slices=bool(study.preprocess.slices))
    n, more = len(cases), len(cases.with_unlabelled()) - len(cases)
    table = "\n".join(f"{case.name},{case.patient},{case.split}" for case in arrays.cases)
    return {
        "name": site,
        "n": n,
        **({"unlabelled": more} if more else {}),
        "labels": list(annotated_at(study, federation, site)),
        "cases": len(arrays.cases),
        "table": hashlib.sha256(table.encode()).hexdigest()[:16],
        "arrays": arrays.folder.name,  # content and preprocessing, by hash
        "version": __version__,
    }
