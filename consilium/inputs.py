"""The inputs of a study beside the study itself (sites, files, code), and which of its runs used the current ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data.cache import case_facts
from consilium.extensions import code_hashes
from consilium.hospital import RULES
from consilium.policy import alias_of, simulated_secret
from consilium.run_files.origin import differences
from consilium.run_folder import RunFolder
from consilium.site_opening import place_in
from consilium.study import Study
from consilium.validation import annotated_at, members_of


@dataclass(frozen=True)
class RunPlace:
    """Where the run of a study is, or will be made."""

    path: Path
    changed: tuple[str, ...] = ()  # differences from the last run, if no run used the current inputs
    last: Path | None = None  # that run


def current_inputs(study: Study) -> dict[str, Any]:
    """The facts of a study's sites and plug-in files as a run notes them; files that did not change are not read."""
    federation = study.federation()
    names = (*members_of(study, federation), *study.plan.leave_out)
    sites = {
        name: case_facts(federation, federation.sites[name], study.preprocess, annotated_at(study, federation, name))
        for name in names
    }
    return {"sites": sites, "plugins": code_hashes(study.plugins)}


def place_of(study: Study, runs: Path, again: bool = False) -> RunPlace:
    """The newest run of a study that used the current inputs, else the folder for a new run.

    `again` always gives a new folder. A second run of the same study is called `<name>-s<seed>-<hash>-2`.
    """
    made = RunFolder.attempts(study, runs)
    fresh = RunFolder.path_of(study, runs, len(made) + 1)
    if made and not (made[-1] / "origin.json").exists():  # it was stopped before its first round
        fresh = made[-1]
    if again or not made:
        return RunPlace(fresh)
    now = current_inputs(study)
    for path in reversed(made):
        if not differences(path, as_told(now, study, path)):
            return RunPlace(path)
    return RunPlace(fresh, tuple(differences(made[-1], as_told(now, study, made[-1]))), made[-1])


def as_told(now: Mapping[str, Any], study: Study, run: Path) -> dict[str, Any]:
    """The inputs as a run notes them: a site that goes by a hospital's rules tells its hashes under an alias."""
    sites = {}
    for name, facts in now["sites"].items():
        secret = simulated_secret(study, name)
        ruled = (place_in(run, name) / RULES).exists()
        hidden = {key: alias_of(facts[key], secret) for key in ("table", "arrays", "key") if ruled and key in facts}
        sites[name] = {**facts, **hidden}
    return {**now, "sites": sites}
