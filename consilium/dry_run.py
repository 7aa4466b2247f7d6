"""What a run would do and cost: sites, phases, messages, memory, disk, time, device. Nothing is trained for good."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from consilium.data.site_folder import Federation
from consilium.errors import StudyError
from consilium.federation.forecasting import Exchange, Forecast, forecast_study, size_text
from consilium.machine import default_workers, peak_memory_mb, pick_device
from consilium.method import Phase
from consilium.run_files.lock import at_work
from consilium.step_timing import StepTimes, time_steps
from consilium.study import Study
from consilium.timeline import timeline
from consilium.tracking import check_trackers
from consilium.validation import admitted, check_annotation, check_size, expected_roster, labelled_cases, members_of
from consilium.weights import SiteName
from consilium.wording import counted

KEPT = 3  # a site's memories: of the last merged round and the two before
STATES = 5  # the server's: two rounds, the best, best.safetensors, last.safetensors


@dataclass(frozen=True)
class SitePlan:
    """One site's cases and its steps in a round."""

    site: SiteName
    train: int
    valid: int
    test: int
    steps: int  # 0: it is a guest, and only scored


@dataclass(frozen=True)
class PhasePlan:
    """Rounds of one kind; bytes are of one site and round."""

    phase: str
    rounds: int
    counts: bool  # among the paper's rounds
    bytes_down: int
    bytes_up: int
    seconds: float  # all its rounds, on this machine


@dataclass(frozen=True)
class DryRun:
    """A run that was not made."""

    method: str
    folder: Path  # where the run would be
    state: str  # "new", "finished", "running", "interrupted"
    device: str
    device_why: str
    refused: str  # why the run could not begin, such as a device that is not there; empty: it can
    workers: int
    sites: tuple[SitePlan, ...]
    phases: tuple[PhasePlan, ...]
    scorings: int
    seconds_scoring: float
    seconds_preparing: float  # of all cases, where the cache does not have them
    bytes_cache: int
    bytes_run: int  # of models, in the run folder
    bytes_messages: int  # on their way at once, at most
    memory_mb: float  # of one process that trains
    free_memory_mb: float | None
    free_disk: int
    notes: tuple[str, ...] = ()  # what a study may not have meant, and what hospitals would say

    @property
    def seconds(self) -> float:
        """Training and scoring, without the start."""
        return sum(phase.seconds for phase in self.phases) + self.seconds_scoring

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder), "seconds": self.seconds}

    def lines(self) -> Iterator[str]:
        left = {
            "new": "",
            "finished": ", which is finished: nothing would be trained",
            "running": ", which was begun: another process is working on it",
        }.get(self.state, ", which was begun: `consilium resume` continues it")
        yield f"run: {self.method} in {self.folder}{left}"
        yield f"device: {self.device} ({self.device_why})"
        many = "everything in one process" if not self.workers else counted(self.workers, "worker process", "es")
        yield f"processes: {many}"
        width = max(len(site.site) for site in self.sites)
        for site in self.sites:
            work = f"{counted(site.steps, 'step')} a round" if site.steps else "scored only, as an outside hospital"
            cases = f"{site.train} training, {site.valid} validation, {site.test} test cases"
            yield f"  {site.site.ljust(width)}  {cases}; {work}"
        for phase in self.phases:
            paper = "" if phase.counts else " (not counted among the paper's)"
            sizes = f"{size_text(phase.bytes_down)} down and {size_text(phase.bytes_up)} up per site and round"
            rounds = f"{counted(phase.rounds, 'round')}{paper}"
            yield f"phase {phase.phase}: {rounds}, {sizes}, about {time_text(phase.seconds)}"
        yield f"scores: taken {self.scorings} times, about {time_text(self.seconds_scoring)}"
        yield (
            f"memory: about {self.memory_mb:,.0f} MB in each process that trains (measured here), messages at most "
            f"{size_text(self.bytes_messages)}{self._of_memory()}"
        )
        yield (
            f"disk: about {size_text(self.bytes_run)} of models in the run folder, beside scores and journal; cache of "
            f"prepared cases {size_text(self.bytes_cache)}; {self.free_disk / 1e9:,.1f} GB free"
        )
        yield (
            f"time: about {time_text(self.seconds)} of training and scoring, from a few timed steps on this machine; "
            f"the first run on these data also prepares them, about {time_text(self.seconds_preparing)}"
        )
        yield from (f"note: {note}" for note in self.notes)

    def _of_memory(self) -> str:
        if self.free_memory_mb is None:
            return ""
        needed = self.memory_mb * (max(1, self.workers) + bool(self.workers))  # the server's process too
        short = "; that is not enough, give fewer --workers" if needed > self.free_memory_mb else ""
        return f"; {self.free_memory_mb:,.0f} MB free{short}"


def dry_run(study: Study, folder: Path, workers: int | None = None) -> DryRun:
    """Look at a study: tables are read, a few cases of one site are tried, nothing is left behind."""
    check_trackers(study.plan.track)
    federation = study.federation()
    members = members_of(study, federation)
    check_annotation(study, federation, members)
    check_size(study)
    line = timeline(study.method, study.plan.rounds, study.plan.score_every)
    notes = admitted(study, line, expected_roster(study, federation, members))
    if study.local.threads > (cores := default_workers()):
        notes.append(
            f"[local] threads = {study.local.threads}: this machine has {counted(cores, 'core')}; more is slow"
        )
    device, why, refused = device_of(study.local.device)
    times = tried_times(study, device)
    sites, guests = _sites(study, federation, times)
    count = default_workers() if workers is None else workers
    forecast = forecast_study(study, 1 if study.pooled else None)
    parties = 1 if study.pooled else len(sites)
    every = sum(site.train + site.valid + site.test for site in (*sites, *guests))
    both = max((exchange.down + exchange.up for exchange in forecast.exchanges), default=0) * parties
    states = len(forecast.exchanges) + KEPT if study.plan.keep_rounds == "all" else STATES
    return DryRun(
        method=study.method_name,
        folder=folder,
        state=_state(folder),
        device=device,
        device_why=why,
        refused=refused,
        workers=min(count, parties),
        sites=(*sites, *guests),
        phases=tuple(_phases(study, forecast, times, sites, count)),
        scorings=forecast.scorings,
        seconds_scoring=_scoring(times, (*sites, *guests), forecast.scorings, count),
        seconds_preparing=times.prepare * every / max(1, min(count, len(sites))),
        bytes_cache=times.case_bytes * every,
        bytes_run=states * times.server_bytes + KEPT * times.memory_bytes * parties + both,
        bytes_messages=both,
        memory_mb=peak_memory_mb(),
        free_memory_mb=free_memory_mb(),
        free_disk=shutil.disk_usage(_existing(folder)).free,
        notes=tuple(notes),
    )


def tried_times(study: Study, device: str | None = None) -> StepTimes:
    """The times of a study's steps, tried at the site with the median number of training cases."""
    federation = study.federation()
    members = members_of(study, federation)
    roster = expected_roster(study, federation, members)
    sized = sorted(members, key=lambda name: labelled_cases(federation, name, "train"))
    device = device or device_of(study.local.device)[0]
    return time_steps(study, federation, sized[len(sized) // 2], roster, device)


def estimated_seconds(study: Study, times: StepTimes, workers: int | None = None) -> float:
    """Training and scoring of a whole run, from times that may be those of a run much like it."""
    sites, guests = _sites(study, study.federation(), times)
    count = default_workers() if workers is None else workers
    line = timeline(study.method, study.plan.rounds, study.plan.score_every)
    scorings = 2 + sum(round.scored for _, round in line)
    training = sum(_round_seconds(study, times, sites, phase, count) for phase, _ in line)
    return training + _scoring(times, (*sites, *guests), scorings, count)


def device_of(wanted: str) -> tuple[str, str, str]:
    """The device that would be used, why, and why the wanted one cannot be; the last is empty where it can."""
    built = f"torch {torch.__version__} is built without CUDA" if torch.version.cuda is None else "no GPU is visible"
    if torch.cuda.is_available():
        built = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, worker processes spread over them"
    try:
        found = pick_device(wanted, 0)
    except StudyError as error:
        instead = pick_device("auto", 0)
        refused = f"{str(error).rstrip('.')} ({built}). Set [local] device = 'auto', which uses {instead} here."
        return instead, f"in place of {wanted}, which cannot be used: {built}", refused
    if wanted == "auto":
        return found, f"chosen by 'auto': {built}" if found != "mps" else "chosen by 'auto'", ""
    return found, f"[local] device = '{wanted}'" + (f": {built}" if found.startswith("cuda") else ""), ""


def free_memory_mb() -> float | None:
    """What programs can still take; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages > 0 else None


def time_text(seconds: float) -> str:
    """A length of time in words that promise no more than is known."""
    if seconds < 1:
        return "a second"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _site_plan(study: Study, federation: Federation, site: SiteName, items: float) -> SitePlan:
    train, valid, test = (labelled_cases(federation, site, split) for split in ("train", "valid", "test"))
    steps = study.local.epochs * math.ceil(train * items / study.local.batch_size)
    return SitePlan(site, train, valid, test, steps)


def _sites(study: Study, federation: Federation, times: StepTimes) -> tuple[tuple[SitePlan, ...], tuple[SitePlan, ...]]:
    """Those that train, and guests."""
    members = tuple(_site_plan(study, federation, name, times.items) for name in members_of(study, federation))
    return members, tuple(_site_plan(study, federation, name, 0.0) for name in study.plan.leave_out)


def _phases(
    study: Study, forecast: Forecast, times: StepTimes, sites: Sequence[SitePlan], workers: int
) -> Iterator[PhasePlan]:
    found: dict[Phase, list[Exchange]] = {}
    line = timeline(study.method, study.plan.rounds, study.plan.score_every)
    for (phase, _), exchange in zip(line, forecast.exchanges, strict=True):
        found.setdefault(phase, []).append(exchange)
    for phase, exchanges in found.items():
        down, up = max(e.down for e in exchanges), max(e.up for e in exchanges)
        seconds = len(exchanges) * _round_seconds(study, times, sites, phase, workers)
        yield PhasePlan(phase.name, len(exchanges), phase.counts, down, up, seconds)


def _round_seconds(study: Study, times: StepTimes, sites: Sequence[SitePlan], phase: Phase, workers: int) -> float:
    dearest = max(times.step.values(), default=0.0)  # of a phase that was not timed nothing better is known
    step = times.step.get(phase.name, dearest)
    if study.pooled:  # one site that makes all steps
        return step * sum(site.steps for site in sites)
    drawn = study.plan.sites_per_round if phase.counts else 0
    return _spread([step * site.steps for site in sites], workers) * min(1.0, (drawn or len(sites)) / len(sites))


def _scoring(times: StepTimes, sites: Sequence[SitePlan], scorings: int, workers: int) -> float:
    """While training goes on, and twice in full at the end."""
    cases = [site.valid + site.test for site in sites]
    once, full = (_spread([n * seconds for n in cases], workers) for seconds in (times.score, times.score_full))
    return (scorings - 2) * once + 2 * full


def _spread(work: list[float], workers: int) -> float:
    """Seconds of sites' work over processes; no site is done faster than by itself."""
    return max(sum(work) / max(1, min(workers, len(work))), max(work, default=0.0))


def _state(folder: Path) -> str:
    if (folder / "summary.json").exists():
        return "finished"
    if at_work(folder):
        return "running"
    return "interrupted" if (folder / "journal.jsonl").exists() else "new"


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
