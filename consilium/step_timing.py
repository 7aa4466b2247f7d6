"""How long one site's work takes: a few cases are prepared, trained on and scored, and nothing is kept."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilium.data.cache import open_site
from consilium.data.cases import Cases
from consilium.data.site_arrays import SiteArrays
from consilium.data.site_folder import Case, Federation, SiteFolder
from consilium.errors import NotForOutsiders
from consilium.machine import threads_of_torch
from consilium.policy import Permissive, simulated_secret
from consilium.predictor import Predictor
from consilium.site import Roster, Site
from consilium.site_opening import patient_privacy
from consilium.study import Study
from consilium.timeline import timeline
from consilium.tree import flatten
from consilium.validation import annotated_at
from consilium.weights import SiteName

BATCHES = 2  # of training cases that are tried
WAITED = 0.01  # of another phase's step: then the site did not train


@dataclass(frozen=True)
class StepTimes:
    """Seconds on this machine by one process, and what the tried site's messages weigh."""

    prepare: float  # one case, from its file
    step: dict[str, float]  # phase → one training step of a site, with all models of the method
    score: float  # one case by all models that are scored while training goes on
    score_full: float  # the same with all scores, at the end
    case_bytes: int  # one case in the cache
    items: float  # what one training case counts in batches: 1, or its slices
    server_bytes: int  # the server's state
    memory_bytes: int  # what a site keeps between rounds


def time_steps(study: Study, federation: Federation, site: SiteName, roster: Roster, device: str) -> StepTimes:
    """Try a site alone, phase by phase; the server's state goes on with its reply only.

    A phase in which the site waits for others is left out; it counts as the dearest of the others.
    """
    with threads_of_torch(study.local.threads), tempfile.TemporaryDirectory(prefix="consilium-") as place:
        return _timed(study, federation, site, roster, device, Path(place))


def _timed(study: Study, federation: Federation, name: SiteName, roster: Roster, device: str, place: Path) -> StepTimes:
    folder = federation.sites[name]
    few = replace(folder, cases=few_cases(folder, study))
    labels, complete = annotated_at(study, federation, name), study.data.test_masks == "complete"
    with _clock() as preparing:
        arrays = open_site(federation, few, study.preprocess, place, labels, complete)
    site = _site(study, arrays, name, roster, device, len(folder.cases), place)
    method, local = study.method, study.local
    server: Any = method.start(site.task, roster)
    memory = method.remember(site)
    steps: dict[str, float] = {}
    for phase, round in timeline(method, study.plan.rounds, study.plan.score_every):
        if round.step or (order := method.send(server, site.card, round)) is None:
            continue
        first, kept = method.train(site, memory, order, round)  # warms caches, picks algorithms; teachers catch up
        if steps:  # a later phase is timed after what only its first round does
            memory, server = kept, method.merge(server, {name: first}, round)
            order = method.send(server, site.card, round) or order
        with _clock() as training:
            uplink, memory = method.train(site, memory, order, round)
        seconds = training[0] / (local.epochs * math.ceil(len(site.data) / local.batch_size))
        if seconds > WAITED * max(steps.values(), default=0.0):
            steps[phase.name] = seconds
        server = method.merge(server, {name: uplink}, round)
    predictor = method.deploy(site.task, memory, method.release(server, site.card))
    trained = len(arrays.indices("train"))
    return StepTimes(
        prepare=preparing[0] / len(few.cases),
        step=steps,
        score=_scoring(site, [predictor, *predictor.others()], full=False),
        score_full=_scoring(site, [predictor, *predictor.others(), *predictor.elsewhere()], full=True),
        case_bytes=sum(file.stat().st_size for file in arrays.folder.rglob("*") if file.is_file()) // len(few.cases),
        items=len(site.data) / trained,
        server_bytes=flatten(server).nbytes(),
        memory_bytes=flatten(memory).nbytes(),
    )


def few_cases(folder: SiteFolder, study: Study) -> tuple[Case, ...]:
    """Enough for two batches, and one case to score; of volumes that are taken apart one is many."""
    training = [case for case in folder.cases if case.split == "train" and case.label is not None]
    count = 1 if study.preprocess.slices else BATCHES * study.local.batch_size
    scored = [case for case in folder.cases if case.split in ("valid", "test") and case.label is not None]
    return (*training[:count], *scored[:1])


def _site(
    study: Study, arrays: SiteArrays, name: SiteName, roster: Roster, device: str, cases: int, place: Path
) -> Site:
    fields = study.task_fields
    data = Cases(
        (arrays,), fields.augment, fields.patch, bool(study.preprocess.slices), patch_around=fields.patch_around
    )
    task = study.task.on(device) if device != "cpu" else study.task
    private = patient_privacy(study, cases, Permissive(simulated_secret(study, name), place))
    card = roster.get(name) or next(iter(roster.values()))  # pooled training has one virtual site
    return Site(card, roster, task, data, study.local, device, study.plan.seed, private)


def _scoring(site: Site, predictors: Sequence[Predictor], full: bool) -> float:
    """Seconds of one case; the second time counts."""
    split = next((split for split in ("valid", "test", "train") if site.data.cases(split)), "train")
    seconds = 0.0
    for _ in range(2):
        with _clock() as scoring:
            for predictor in predictors:
                _score(site, predictor, split, full)
        seconds = scoring[0] / max(1, len(site.data.cases(split)))
    return seconds


def _score(site: Site, predictor: Predictor, split: str, full: bool) -> None:
    for batch in site.data.whole(split, 16):
        try:
            answer = predictor.answer(batch.images, bool(batch.volume))
        except NotForOutsiders:
            return
        output = answer.output.transpose(0, 1)[None] if batch.volume else answer.output
        truths = batch.truth[None] if batch.volume else batch.truth
        for i in range(len(output)):
            site.task.score(output[i], truths[i], full, batch.labels_of(i), batch.spacing_of(i))


@contextmanager
def _clock() -> Iterator[list[float]]:
    seconds = [0.0]
    start = time.perf_counter()
    yield seconds
    seconds[0] = time.perf_counter() - start
