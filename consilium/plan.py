"""`[study]` and `[data]`: how long, who, and what of whose data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from consilium.errors import StudyError
from consilium.fields import NAME, check_choices, plain
from consilium.learning.aggregation import Aggregation
from consilium.privacy.dp import Privacy
from consilium.privacy.firewall import Firewall
from consilium.tracking import TRACKERS
from consilium.transport import KINDS

MOST_ROUNDS = 1_000_000  # a site lists the rounds of a study before it agrees to it


@dataclass(frozen=True)
class Plan:
    """`[study]`: how long, who, and what when they do not answer."""

    name: str = ""  # of the run folder; empty: the method's
    rounds: int = 150  # the paper's rounds; adaptation and calibration come on top
    seed: int = 0
    score_every: int = 5
    test_rounds: int = 0  # test cases are scored in the last so many rounds, and of the best state; 0: in every scoring
    sites: tuple[str, ...] = ()  # empty: all
    leave_out: tuple[str, ...] = ()  # guests: they do not train and are scored as outside hospitals
    # {hk = [3, 4]}: rounds a site does not answer; or by name, phases that are not the paper's rounds: "adapt"
    away: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    sites_per_round: int = 0  # 0: all, else a seeded draw
    min_sites: int = 1
    max_cases: int = 1_000_000  # training cases a site may say it has: they are its share of an average
    deadline: float = 3600.0  # seconds per round, in a real federation
    # the next four are for a real federation too; a simulation waits for all
    wait: str = "all"  # or "quorum": a round closes as soon as a quorum has answered
    quorum: float = 0.5  # below 1 a share of the sites that were asked, else their number
    silence: float = 120.0  # seconds without a sign of life after which a site counts as gone
    rejoin: bool = False  # a site that lost its key or its memory may go on as a new one
    keep_rounds: str = "last-two"  # or "all"
    transport: str = "exact"  # "float16", "bfloat16": numbers travel in two bytes, rounded; a simulation rounds too
    compress: bool = False  # between hospitals: messages are packed without loss
    track: tuple[str, ...] = ()  # tools that get the figures: "tensorboard", "mlflow", "wandb"
    firewall: Firewall = field(default_factory=Firewall)  # what becomes of odd updates; its mode alone will do
    aggregation: Aggregation = field(default_factory=Aggregation)  # one model of the sites' models; its rule will do

    def __post_init__(self) -> None:
        for name, low in (
            ("rounds", 1),
            ("score_every", 1),
            ("test_rounds", 0),
            ("min_sites", 1),
            ("max_cases", 1),
            ("sites_per_round", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                raise StudyError(f"[study] {name} = {getattr(self, name)}: it must be at least {low}.")
        if self.rounds > MOST_ROUNDS:
            raise StudyError(f"[study] rounds = {self.rounds}: it must be at most {MOST_ROUNDS}.")
        if odd := [name for name in (*self.sites, *self.leave_out, *self.away) if not name.isprintable()]:
            raise StudyError(f"[study] sites, leave_out, away: {odd[0]!r} cannot be the name of a site.")
        for name in ("deadline", "silence"):
            if not 0 < getattr(self, name) < math.inf:
                raise StudyError(f"[study] {name} = {getattr(self, name)}: it must be positive, in seconds.")
        check_choices(self, "study", wait=("all", "quorum"))
        if not (0 < self.quorum < 1 or (self.quorum >= 1 and float(self.quorum).is_integer())):
            raise StudyError(f"[study] quorum = {self.quorum}: it must be a share below 1, or a number of sites.")
        check_choices(self, "study", keep_rounds=("last-two", "all"), transport=KINDS)
        if unknown := set(self.track) - set(TRACKERS):
            raise StudyError(f"[study] track: there is no '{min(unknown)}'; choose from {', '.join(TRACKERS)}.")
        if self.name and not re.fullmatch(NAME, self.name):
            raise StudyError(f"[study] name = {self.name!r}: use letters, digits, dots, dashes and underscores.")
        for site, rounds in self.away.items():
            if any(isinstance(round, int) and round < 1 for round in rounds):
                raise StudyError(f"[study] away.{site} = {list(rounds)}: rounds count from 1.")
        if len(set(self.sites)) < len(self.sites):
            raise StudyError(f"[study] sites = {list(self.sites)}: a site is named twice.")
        both = set(self.sites) & set(self.leave_out)
        if both:
            raise StudyError(f"[study] '{min(both)}' is in both sites and leave_out; choose one.")

    def tested(self, step: int, total: int) -> bool:
        """Whether test cases too are scored after this step of a phase; those of the best and last state always are."""
        return not self.test_rounds or step >= total - self.test_rounds

    def quorum_of(self, asked: int) -> int:
        """How many of so many sites close a round."""
        if self.wait == "all":
            return asked
        return min(asked, max(self._share_of(asked), self.min_sites))

    def least_to_begin(self, named: int) -> int:
        """How many of so many sites a run can begin with: a quorum, and two where it names several."""
        return min(named, max(self._share_of(named), self.min_sites, 2))

    def too_few(self, left: int, named: int, pooled: bool) -> str:
        """Why a run cannot begin with those that are left of the sites it names; empty: it can."""
        least = self.least_to_begin(named)
        if left >= least and not pooled:
            return ""
        need = "pooled training needs all of them" if pooled else f"a run begins with at least {least}"
        return f"{left} of {named} sites are left, and {need} ([study] quorum, min_sites)"

    def _share_of(self, sites: int) -> int:
        return math.ceil(self.quorum * sites) if self.quorum < 1 else int(self.quorum)


# keys that came later: at their defaults, older runs keep their hash
_NEW = ("test_rounds", "max_cases", "wait", "quorum", "silence", "rejoin", "transport", "compress")
LATER = {name: getattr(Plan, name) for name in _NEW}
LATER["aggregation"] = plain(Aggregation())
LATER_TASK = {"scores": [], "dice_background": False, "patch_around": "labels", "keep_depth": False, "initial": ""}
LATER_TASK["decides"] = "volume"  # what runs did before they had the key
LATER_LOCAL = {"compile": False}
LATER_PRIVACY = {f.name: f.default for f in fields(Privacy) if f.name not in ("clip", "noise", "delta")}


@dataclass(frozen=True)
class Source:
    """`[data]`: which federation, and what of it may be used."""

    federation: str
    annotated: Mapping[str, Any] = field(default_factory=dict)  # {word = ["kidney"]} overrides site.toml; or "all"
    test_masks: str = "annotated"  # "complete": test cases are also scored on labels their site does not annotate
    pooled: bool = False  # train on one virtual site that holds all cases (simulation only)

    def __post_init__(self) -> None:
        for site, labels in self.annotated.items():
            if labels != "all" and not isinstance(labels, tuple):
                raise StudyError(f'[data] annotated.{site} = {labels!r}: it must be a list of labels, or "all".')
        check_choices(self, "data", test_masks=("annotated", "complete"))
