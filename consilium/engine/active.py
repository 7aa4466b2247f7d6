"""An active run: its study, sites and folder, and the checks and log entries before its first round."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from consilium.data.profile import DataProfile, joined, read_profile, scale_faults
from consilium.errors import StudyError
from consilium.extensions import code_hashes
from consilium.fields import plain
from consilium.files import sweep_drafts
from consilium.messages import Envelope, Reply, RollCall, card_to_json
from consilium.method import Method, Phase
from consilium.run_folder import RunFolder
from consilium.site import Roster, Round
from consilium.study import Study
from consilium.task import Task
from consilium.timeline import Line, timeline
from consilium.tree import Packet
from consilium.validation import admitted, check_size
from consilium.weights import SiteName


class Wire(Protocol):
    """Carries packets; a site that fails or is late is a `Reply` without a packet.

    `train` and `score` may have sent the orders when they return. They yield replies as they arrive, so that the server
    checks one while other sites still work. The wire itself knows the site and the order of a reply. `deliver`
    returns the sites that did not accept their release.
    """

    closes_early: bool  # whether a round may end before all have answered: between separate machines

    def roll_call(self) -> RollCall: ...
    def train(self, orders: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]: ...
    def score(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Iterator[tuple[SiteName, Reply]]: ...
    def deliver(self, releases: Mapping[SiteName, Packet], head: Envelope) -> Collection[SiteName]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ActiveRun:
    """An active run, as every part of the engine sees it."""

    study: Study
    wire: Wire
    folder: RunFolder
    line: Line  # every round, with its phase
    roll: RollCall  # the sites that answered
    profiles: Mapping[SiteName, DataProfile]  # ranges of each site's training images
    memory_mb: dict[SiteName, float] = field(default_factory=dict)  # the sites' peak memory, as they answer

    @property
    def method(self) -> Method:
        return self.study.method

    @property
    def task(self) -> Task:
        return self.study.task

    @property
    def roster(self) -> Roster:
        return self.roll.members

    @property
    def rounds(self) -> int:
        """The number of the paper's rounds."""
        return sum(phase.counts for phase, _ in self.line)

    @property
    def last_counting(self) -> tuple[Phase, Round]:
        return next((phase, round) for phase, round in reversed(self.line) if phase.counts)

    @property
    def refines(self) -> list[str]:
        """The phases after the paper's rounds: what they change is the best state, not the last."""
        return list(dict.fromkeys(phase.name for phase, _ in self.line[self.last_counting[1].index + 1 :]))


def opened(study: Study, wire: Wire, folder: RunFolder) -> ActiveRun:
    """Repair the folder after a crash, make the roll call, and reject a study that cannot work with these sites."""
    sweep_drafts(folder.path)  # the run is locked, and its sites have not been asked yet
    folder.journal.mend()
    folder.check_method()
    folder.mend_scores()
    check_size(study)
    roll = wire.roll_call()
    line = timeline(study.method, study.plan.rounds, study.plan.score_every)
    active = ActiveRun(study, wire, folder, line, roll, _profiles(roll))
    wrong: list[str] = []
    odd: list[str] = []
    if folder.begun:
        folder.origin.check(_facts(active), roll.rejoined)
    else:
        wrong, odd = scale_faults(active.profiles, study.preprocess)
    if wrong:
        raise StudyError(wrong[0])
    for warning in (*_admitted(active), *odd):
        folder.note("warning", text=warning)
    return active


def _facts(active: ActiveRun) -> dict[str, Any]:
    """The sites, their cases and the code of a run, which may not change during the run."""
    return {
        "members": {name: card_to_json(card) for name, card in active.roster.items()},
        "sites": {
            name: {key: value for key, value in plain(facts).items() if key != "profile"}
            for name, facts in active.roll.facts.items()
        },
        "plugins": code_hashes(active.study.plugins),
    }


def _never_in(active: ActiveRun) -> dict[SiteName, str]:
    """The sites that could not take part at the start of the run, with the reasons; they stay out."""
    now = {name: why for name, why in active.roll.left_out.items() if name not in active.roll.audience}
    return {**active.folder.origin.left_out(), **now}


def say_hello(active: ActiveRun, done: int) -> None:
    """Write the run's origin, and log the sites that take part."""
    # of all sites at the start: some may be away now
    trained_on = active.folder.origin.trained_on() or joined(active.profiles.values())
    told = {"distribution": trained_on.to_json()} if trained_on else {}
    out = {"left_out": absent} if (absent := _never_in(active)) else {}
    active.folder.origin.write({**_facts(active), **told, **out})
    active.folder.note(
        "resume" if done else "start",
        method=active.study.method_name,
        round=sum(phase.counts for phase, _ in active.line[:done]),
        rounds=active.rounds,
        aside=sorted({phase.name for phase, _ in active.line if not phase.counts}),
        refines=active.refines,
        sites={n: c.n + (c.unlabelled if active.method.unlabelled else 0) for n, c in active.roster.items()},
    )
    for name, why in sorted(active.roll.left_out.items()):
        active.folder.note("left out", site=name, why=why)
    for name, why in sorted(active.roll.rejoined.items()):
        active.folder.note("rejoined", site=name, why=why)
    if active.study.privacy.on and not done:
        active.folder.note("privacy", **privacy_spent(active))


def privacy_spent(active: ActiveRun) -> dict[str, Any]:
    """The greatest privacy cost of every site, by the noise it adds."""
    told, local, method = active.study.privacy, active.study.local, active.method
    facts = {"delta": told.delta, "rounds": len(active.line), "unit": told.unit}
    if told.by_update:
        return {"epsilon": round3(told.told(len(active.line))), **facts}
    spends = method.passes(active.study.plan.rounds, local.epochs), method.noised_statistics()
    sites = {name: round3(told.epsilon_at(card.n, local, *spends)) for name, card in active.roster.items()}
    return {"epsilon": max(sites.values()), **facts, "accountant": told.accountant, "sites": sites}


def _admitted(active: ActiveRun) -> list[str]:
    """Warnings about the study with these sites; an error names the sites that were left out."""
    try:
        return admitted(active.study, active.line, active.roster)
    except StudyError as error:
        if not active.roll.left_out:
            raise
        out = "; ".join(f"{name}: {why}" for name, why in sorted(active.roll.left_out.items()))
        raise StudyError(f"{error} Left out: {out.removesuffix('.')}.") from error


def _profiles(roll: RollCall) -> dict[SiteName, DataProfile]:
    """The ranges of training images, of each site that trains and reports them."""
    guests = {name for name, outside in roll.audience.items() if outside}
    told = {name: facts.profile for name, facts in sorted(roll.facts.items()) if name not in guests}
    found = {name: read_profile(plain(profile)) for name, profile in told.items() if profile is not None}
    return {name: profile for name, profile in found.items() if profile is not None}


def round3(number: float) -> float:
    return round(number, 3)
