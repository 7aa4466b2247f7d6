"""A study run on one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium import engine
from consilium.errors import RunError
from consilium.inputs import place_of
from consilium.machine import default_workers, pick_device
from consilium.method import away_as, timeline
from consilium.run_folder import Event, RunFolder
from consilium.study import Study, with_plan
from consilium.wires.in_process import InProcess
from consilium.wires.processes import Pool, Processes

Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    summary: Mapping[str, Any]


def run(
    study: Study,
    runs: Path | str = "runs",
    workers: int | None = None,
    pool: Pool | None = None,
    watch: Watch | None = None,
    again: bool = False,
) -> Result:
    """Train a study in `runs/<name>-s<seed>-<hash>`; of a finished one, return what it found.

    `workers`: processes the sites share, by default one per core; 0 runs all sites in this process. A `pool` given is
    used and left open. Where data or plug-in files changed since a run, `again` makes a new one in a folder of its
    own; without it that is refused.
    """
    pick_device(study.local.device, 0)  # refuse a device that is not there before anything is written
    return go_on(RunFolder.create_at(choose_place(study, Path(runs), again), study, watch), workers, pool)


def choose_place(study: Study, runs: Path, again: bool = False) -> Path:
    """The folder of the run that was made from the data and plug-ins that are there now, or of a new one."""
    place = place_of(study, runs, again)
    if place.changed:
        raise RunError(
            f"{place.last} was made from something else: {'; '.join(place.changed)}. Its result is not that of this "
            "study any more: train it anew with --again (in a folder of its own), or restore what changed."
        )
    return place.path


def resume(
    path: Path | str, workers: int | None = None, pool: Pool | None = None, watch: Watch | None = None
) -> Result:
    """Go on with an interrupted run, bit for bit as if it had not been interrupted."""
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
    for event in folder.events():
        if event["event"] == "rejoined":
            raise RunError(
                f"{other} cannot be repeated: site '{event['site']}' lost its memory there and went on without it."
            )
        if event["event"] in ("start", "resume"):
            members |= set(event["sites"])
        if event["event"] in ("train", "lost", "refused", "away"):
            here = merged.setdefault(names[event["phase"], event["round"]], set())
            (here.add if event["event"] == "train" else here.discard)(event["site"])
    if not merged:
        raise RunError(f"{other} has no finished round, so there is no attendance to repeat.")
    away = {name: tuple(r for r in merged if name not in merged[r]) for name in sorted(members)}
    missing = {name: rounds for name, rounds in away.items() if rounds}
    return with_plan(study, away=missing, sites_per_round=0, wait="all")
