"""Opens a finished run for analysis: its models as each site has them, and its data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from consilium.data.site_folder import Federation
from consilium.errors import NotForOutsiders, RunError, StudyError
from consilium.files import read_json
from consilium.messages import card_from_json
from consilium.method import LossOfBatch
from consilium.methods.routers import GLOBAL
from consilium.methods.routing import EnsembleModel, SuperModel
from consilium.predictor import OneModel, Predictor, WithOthers
from consilium.reports.grouping import groups
from consilium.reports.reading import RunView, read_run, run_folders
from consilium.run_files.lock import way_on
from consilium.run_folder import RunFolder
from consilium.site import Roster, Round
from consilium.site_opening import open_worker, place_in
from consilium.study import Study
from consilium.timeline import timeline
from consilium.tree import flatten
from consilium.validation import members_of
from consilium.weights import SiteName
from consilium.worker import Worker


@dataclass(frozen=True)
class OpenRun:
    """The best state of a finished run, with its federation."""

    path: Path
    name: str  # in figures: the method, and its differences from the other runs
    study: Study
    federation: Federation
    roster: Roster
    server: Any
    merged: Mapping[SiteName, int]  # the round of each site's memory that goes with this state
    round: Round  # the round of this state

    @property
    def members(self) -> list[SiteName]:
        return members_of(self.study, self.federation)

    @property
    def guests(self) -> list[SiteName]:
        return sorted(self.study.plan.leave_out)

    @property
    def sites(self) -> list[SiteName]:
        return sorted((*self.members, *self.guests))

    def worker(self, site: SiteName) -> Worker:
        if site not in self.federation.sites:
            raise StudyError(f"there is no site '{site}'; the federation has {', '.join(self.federation.sites)}.")
        torch.set_num_threads(self.study.local.threads)  # as in training and scoring: it changes the last bits
        return open_worker(self.study, self.federation, site, self.roster, place_in(self.path, site))

    def predictor(self, worker: Worker) -> Predictor:
        """The predictor of the run's release at this site."""
        site = worker.site.card.name
        # a run fetched from a real federation has no memories: they are at the hospitals
        merged = self.merged.get(site, -1) if worker.memories.folder.is_dir() else -1
        return worker.predictor(flatten(self.study.method.release(self.server, self.roster.get(site))), merged)

    def trained_loss(self, worker: Worker) -> LossOfBatch:
        """The loss that the run minimised at this site in the round of its best state."""
        site = worker.site.card.name
        kept = worker.kept(self.merged.get(site, -1)) if worker.memories.folder.is_dir() else None
        return self.study.method.trained_loss(worker.site, self.server, kept.memory if kept else None, self.round)

    def super_model(self, worker: Worker) -> SuperModel:
        """The super model of a method with a selector; RunError for another method."""
        predictor = self.predictor(worker)
        parts = predictor.parts if isinstance(predictor, EnsembleModel) else predictor
        if not isinstance(parts, SuperModel):
            raise RunError(
                f"{self.path} has no selector: method '{self.study.method_name}' does not choose between models. "
                "Give a run of fedsm."
            )
        return parts

    @property
    def selects(self) -> bool:
        return isinstance(self.predictor(self.worker(self.members[0])), (SuperModel, EnsembleModel))

    @property
    def thresholded(self) -> bool:
        """Whether γ decides which model answers; a selector with the global model as a class needs no threshold."""
        predictor = self.predictor(self.worker(self.members[0]))
        return isinstance(predictor, SuperModel) and GLOBAL not in predictor.classes

    def models(self, worker: Worker) -> dict[str, OneModel]:
        """The single networks that this site can use, by their kind: "global", "personal", "local" …"""
        site = worker.site.card.name
        try:
            first = self.predictor(worker)
        except NotForOutsiders:
            return {}
        found = [p.first if isinstance(p, WithOthers) else p for p in (first, *first.others())]
        return {p.model: p for p in reversed(found) if isinstance(p, OneModel) and p.plain and p.of in ("", site)}


class Runs:
    """The runs to analyse; their scores are read, and their models opened, when an analysis needs them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(dict.fromkeys(path.resolve() for path in run_folders(paths)))

    @cached_property
    def views(self) -> list[RunView]:
        views = [read_run(path) for path in self.paths]
        for view in views:
            if view.summary is None:
                raise RunError(f"{view.folder} is not finished; {way_on(view.folder)}.")
        return views

    @cached_property
    def names(self) -> dict[Path, str]:
        """The name of each run in figures."""
        found = {
            run.folder: group.name if len(group.runs) == 1 else f"{group.name}, seed {run.seed}"
            for group in groups(self.views)
            for run in group.runs
        }
        return {view.folder: found.get(view.folder, view.name) for view in self.views}  # a run again is in no group

    @cached_property
    def opened(self) -> list[OpenRun]:
        return [open_run(view.folder, self.names[view.folder]) for view in self.views]


def open_run(path: Path, name: str = "") -> OpenRun:
    """Open a finished run with its data; `name` is its name in figures."""
    path = path.resolve()
    _check_federation(path)
    folder = RunFolder.open(path)
    best_round = folder.summary()["best"]["round"]  # raises RunError if the run is not finished
    study = folder.study
    line = [round for phase, round in timeline(study.method, study.plan.rounds) if phase.counts]
    round = next((one for one in line if one.number == best_round), line[-1])
    server = folder.server(study.method)
    facts = read_json(path / "origin.json")
    roster = {site: card_from_json(card) for site, card in facts["members"].items()}
    best = folder.states.best(study.method) if (path / "server" / "best.json").exists() else None
    merged = best.merged if best else {}
    return OpenRun(path, name or study.name, study, study.federation(), roster, server, merged, round)


def _check_federation(path: Path) -> None:
    """Raise an error in terms of a run, not of a new study, if its data are no longer there."""
    try:
        place = tomllib.loads((path / "study.toml").read_text(encoding="utf-8"))["data"]["federation"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # opening the run folder reports its own errors
    if not Path(place).is_dir():
        raise RunError(
            f"the data of {path} are not at {place} any more; move them back, or write their new place into "
            f"[data] federation of {path / 'study.toml'}."
        )
