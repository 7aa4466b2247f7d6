"""A study run on one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium import engine
from consilium.errors import RunError
from consilium.inputs import place_of
from consilium.machine import check_compiler, default_workers, pick_device
from consilium.run_files.journal import Event
from consilium.run_folder import RunFolder
from consilium.study import Study, with_plan
from consilium.timeline import away_as, timeline
from consilium.wires.in_process import InProcess
from consilium.wires.processes import Pool, Processes

Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path  # `open_run` opens it
    summary: Mapping[str, Any]  # the content of summary.json: "headline", "best", "last", …


def run(
    study: Study,
    runs: Path | str = "runs",
    workers: int | None = None,
    pool: Pool | None = None,
    watch: Watch | None = None,
    again: bool = False,
) -> Result:
    """Train a study on this machine, in the folder `runs/<name>-s<seed>-<hash>`.

    A finished study is not trained again: its result is returned.

    Args:
        study: what `load_study` returns.
        runs: the folder for run folders.
        workers: number of worker processes, by default one per core; 0 trains all sites in this process.
        pool: worker processes to use in place of `workers`; they stay open.
        watch: called with every event of the journal, a dictionary such as `{"event": "round", "round": 1, ...}`.
        again: train in a new folder if the data or your own code changed since the last run.

    Returns:
        The run folder and its summary, the content of `summary.json`.

    Raises:
        RunError: the data or your own code changed, and `again` is false.

    >>> from consilium import load_study, run
    >>> result = run(load_study("study.toml"), workers=0)
    >>> result.summary["headline"]["metric"]
    'dice'
    """
    device = pick_device(study.local.device, 0)  # refuse what is not there before anything is written
    if study.local.compile:
        check_compiler(device)
    return go_on(RunFolder.create_at(choose_place(study, Path(runs), again), study, watch), workers, pool)


def choose_place(study: Study, runs: Path, again: bool = False) -> Path:
    """The folder of the run that was made from the present data and plug-ins, or of a new run."""
    place = place_of(study, runs, again)
    if place.changed:
        raise RunError(
            f"{place.last} was made from something else: {'; '.join(place.changed)}. Its result is not that of this "
            "study any more: train it again with --again (in a new folder), or restore what changed."
        )
    return place.path


def resume(
    path: Path | str, workers: int | None = None, pool: Pool | None = None, watch: Watch | None = None
) -> Result:
    """Continue an interrupted run; the result equals that of an uninterrupted run, bit for bit.

    Args:
        path: the run folder.
        workers: number of worker processes, by default one per core; 0 trains all sites in this process.
        pool: worker processes to use in place of `workers`; they stay open.
        watch: called with every event of the journal.

    Returns:
        The run folder and its summary; of a finished run too.

    Raises:
        RunError: the folder is not a run, is damaged, or its data or code changed.

    >>> from consilium import load_study, resume, run
    >>> begun = run(load_study("study.toml"), workers=0)
    >>> resume(begun.folder).summary == begun.summary
    True
    """
    return go_on(RunFolder.open(Path(path), watch), workers, pool)


def go_on(folder: RunFolder, workers: int | None = None, pool: Pool | None = None) -> Result:
    deployed = not folder.study.data.federation  # its sites are asked by `consilium federation resume`
    if folder.finished and (deployed or not folder.lacking):
        return Result(folder.path, folder.summary())
    pick_device(folder.study.local.device, 0)  # the machine may be another than before
    if pool is not None:
        return Result(folder.path, engine.run(folder.study, Processes(folder.study, folder.path, pool), folder))
    count = default_workers() if workers is None else workers
    if count == 0:
        return Result(folder.path, engine.run(folder.study, InProcess(folder.study, folder.path), folder))
    with Pool(count) as own:
        return Result(folder.path, engine.run(folder.study, Processes(folder.study, folder.path, own), folder))


def with_attendance(study: Study, other: Path) -> Study:
    """The study with its sites away exactly where the sites of another run were not merged."""
    folder = RunFolder.open(other)
    line = timeline(folder.study.method, folder.study.plan.rounds, folder.study.plan.score_every)
    paper = sum(phase.counts for phase, _ in line)
    names = {(phase.name, round.number): away_as(phase, round, paper) for phase, round in line}
    merged: dict[int | str, set[str]] = {}
    members: set[str] = set()
    left_out: set[str] = set()
    for event in folder.events():
        if event["event"] == "rejoined":
            raise RunError(
                f"{other} cannot be repeated: site '{event['site']}' lost its memory there and went on without it."
            )
        if event["event"] in ("start", "resume"):
            members |= set(event["sites"])
        if event["event"] == "left out":
            left_out.add(event["site"])
        if event["event"] in ("train", "lost", "refused", "away"):
            here = merged.setdefault(names[event["phase"], event["round"]], set())
            (here.add if event["event"] == "train" else here.discard)(event["site"])
    if not merged:
        raise RunError(f"{other} has no finished round, so there is no attendance to repeat.")
    away = {name: tuple(r for r in merged if name not in merged[r]) for name in sorted(members)}
    missing = {name: rounds for name, rounds in away.items() if rounds}
    never = left_out - members  # they could not take part from the start
    fewer = {"sites": tuple(sorted(members)), "leave_out": tuple(n for n in study.plan.leave_out if n not in never)}
    return with_plan(study, away=missing, sites_per_round=0, wait="all", **(fewer if never else {}))
