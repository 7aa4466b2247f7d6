"""What a study's result depends on beside the study itself, and which of its runs was made from that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data.cache import case_facts
from consilium.plugins import plugin_hashes
from consilium.run_folder import RunFolder, differences
from consilium.study import Study
from consilium.worker import annotated_at, members_of


@dataclass(frozen=True)
class RunPlace:
    """Where the run of a study is, or will be made."""

    path: Path
    changed: tuple[str, ...] = ()  # what differs from the last run, where none was made from what lies there now
    last: Path | None = None  # that run


def current_inputs(study: Study) -> dict[str, Any]:
    """The facts of a study's sites and plug-in files as a run notes them; files that did not change are not read."""
    federation = study.federation()
    names = (*members_of(study, federation), *study.plan.leave_out)
    sites = {
        name: case_facts(federation, federation.sites[name], study.preprocess, annotated_at(study, federation, name))
        for name in names
    }
    return {"sites": sites, "plugins": plugin_hashes(study.plugins)}


def place_of(study: Study, runs: Path, again: bool = False) -> RunPlace:
    """The newest run of a study that was made from what lies on the disk now, else where a new one goes.

    `again` asks for a new one in any case. A second run of the same study is called `<name>-s<seed>-<hash>-2`.
    """
    made = RunFolder.attempts(study, runs)
    fresh = RunFolder.path_of(study, runs, len(made) + 1)
    if made and not (made[-1] / "origin.json").exists():  # it was stopped before it began
        fresh = made[-1]
    if again or not made:
        return RunPlace(fresh)
    now = current_inputs(study)
    for path in reversed(made):
        if not differences(path, now):
            return RunPlace(path)
    return RunPlace(fresh, tuple(differences(made[-1], now)), made[-1])
