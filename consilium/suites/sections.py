"""The sections of a suite file as frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consilium.data.partition import SCHEMES
from consilium.data.phantoms import PHANTOMS
from consilium.errors import StudyError
from consilium.fields import check_choices, nearest
from consilium.method import Method
from consilium.scores.means import MEAN
from consilium.suites.settings import (
    Lists,
    Settings,
    refuse_twice,
)
from consilium.wording import counted

STATE = "local.optimizer_state"  # of all methods of a table alike: in [grid] a table for each, in [choose] one for all
FEDERATION = "data.federation"  # in [grid]: the table has a column for each
ABOUT = ("scores", "selection", "choices", "audit")  # of a paper's table
LEAVE_OUT = "study.leave_out"  # in [grid]: sites are left out in turn, and the table is about them
COLUMNS = (FEDERATION, LEAVE_OUT, STATE)  # keys of [grid] that make columns or tables, not rows


@dataclass(frozen=True)
class SuiteSection:
    """`[suite]`: what is run and compared."""

    name: str  # of the folder with choices.json, table.md and table.json
    methods: tuple[str, ...]
    base: str = ""  # a study file beside the suite; empty: the tables below [base]
    seeds: tuple[int, ...] = (0,)
    choose_seed: int = -1  # choices are made on this seed's validation cases; -1: the first of `seeds`
    reference: Any = ""  # the row others are compared with: a method, or {method = "fedsm", "method.pull" = 0.7}
    labels: tuple[str, ...] = (MEAN,)  # one table for each
    metrics: tuple[str, ...] = ()  # one table for each: "dice", "hd95_mm", "clean_dice"; empty: the score that decides
    audit: str = ""  # "quick", "full": attack the runs' models, with a table for each row
    oscillation: bool = False  # a table and a figure of the oscillation of scores
    last_rounds: int = 0  # a column with the mean over this many last scored rounds

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise StudyError(f"[suite] name = {self.name!r}: use letters, digits, dots, dashes and underscores.")
        for key in ("methods", "seeds", "labels"):
            values = getattr(self, key)
            if not values:
                raise StudyError(f"[suite] {key} is empty: name at least one.")
            refuse_twice(values, f"[suite] {key}")
        refuse_twice(self.metrics, "[suite] metrics")
        if self.audit not in ("", "quick", "full"):
            raise StudyError(f"[suite] audit = {self.audit!r}: it must be quick or full, or left out.")
        if self.last_rounds < 0:
            raise StudyError(f"[suite] last_rounds = {self.last_rounds}: it cannot be negative.")
        if min(self.seeds) < 0 or self.choose_seed < -1:
            raise StudyError("[suite] seeds and choose_seed: seeds are whole numbers from 0 on.")

    @property
    def chosen_on(self) -> int:
        return self.seeds[0] if self.choose_seed < 0 else self.choose_seed


@dataclass(frozen=True)
class Phantom:
    """`[phantom]`: the federation to draw if it is not there."""

    kind: str
    to: str  # relative to here
    cases: int = 0  # of all sites and splits; 0: the kind's own number
    size: int = 0  # pixels; 0: the kind's own
    seed: int = 0  # of the patients
    tests: int = 0  # of the abdomen: test cases of all sites; 0: as `cases` gives
    division: int = 0  # of the abdomen: which site annotates which organ; 0: the first division
    alike: float = 0.0  # of the retina: the share of a site's patients behind its partner's camera
    each_seed: bool = False  # every seed of the suite draws its own patients, in <to>-s<seed>
    partitions: tuple[str, ...] = ()  # one site is drawn and cut into twelve, in <to>-<scheme>; a column for each

    def __post_init__(self) -> None:
        if self.kind not in PHANTOMS:
            raise StudyError(
                f"[phantom] kind = '{self.kind}': there is no such phantom; {nearest(self.kind, PHANTOMS)}"
            )
        for key in ("cases", "size", "seed", "division", "tests"):
            if getattr(self, key) < 0:
                raise StudyError(f"[phantom] {key} = {getattr(self, key)}: it cannot be negative.")
        if self.partitions and self.kind != "digits":
            raise StudyError(
                f"[phantom] partitions: the {self.kind} phantom has sites of its own; only digits are cut."
            )
        if self.division and self.kind != "abdomen":
            raise StudyError(f"[phantom] division: sites of the {self.kind} phantom annotate everything; leave it out.")
        if self.tests and self.kind != "abdomen":
            raise StudyError(f"[phantom] tests: only the abdomen has it; give the {self.kind} phantom more cases.")
        if self.alike and self.kind != "retina":
            raise StudyError(f"[phantom] alike: sites of the {self.kind} phantom share no cameras; leave it out.")
        refuse_twice(self.partitions, "[phantom] partitions")
        for scheme in self.partitions:
            if scheme not in SCHEMES:
                raise StudyError(f"[phantom] partitions: there is no scheme '{scheme}'; {nearest(scheme, SCHEMES)}")

    @property
    def federations(self) -> dict[str, str]:
        """Folder → how it is cut; empty for a phantom with sites of its own."""
        return {f"{self.to}-{scheme}": scheme for scheme in self.partitions} or {self.to: ""}


@dataclass(frozen=True)
class PaperTable:
    """A table as the paper prints it."""

    caption: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float | str, ...]]  # text where the paper has no number
    label: str = MEAN  # of our table that it belongs to
    metric: str = ""  # and of that table's score; empty: the first
    about: str = "scores"  # "selection": the selector's choices at sites left out; "choices"; "audit"
    digits: int = 4  # behind the point

    def __post_init__(self) -> None:
        check_choices(self, "paper", about=ABOUT)
        for name, values in self.rows.items():
            if len(values) != len(self.columns):
                many = f"{counted(len(values), 'value')} for {counted(len(self.columns), 'column')}"
                raise StudyError(f"[paper] row '{name}' has {many}; write \"\" where the paper has no number.")


@dataclass(frozen=True)
class RowSection:
    """`[[row]]`: a row written out, where rows are not the combinations of a grid."""

    name: str  # as tables call it
    method: str
    settings: Settings
    choose: Lists = field(default_factory=dict)  # what is chosen for this row besides


@dataclass(frozen=True)
class MethodPart:
    """`[methods.<name>]`: settings of one method."""

    fixed: Settings = field(default_factory=dict)
    choose: Lists = field(default_factory=dict)


@dataclass(frozen=True)
class ChooseWhereSection:
    """`[[choose_where]]`: additional choices, for some combinations of the grid only."""

    rows: Settings
    choose: Lists


@dataclass(frozen=True)
class Suite:
    """The content of a suite file, checked."""

    path: Path
    heading: SuiteSection
    kinds: Mapping[str, type[Method]]  # by name, in the order of the table
    base: Mapping[str, Mapping[str, Any]]
    beside: Path  # where a relative federation is searched after the current folder
    grid: Lists
    listed: tuple[RowSection, ...]
    choose: Lists
    where: tuple[ChooseWhereSection, ...]
    parts: Mapping[str, MethodPart]
    phantom: Phantom | None
    papers: tuple[PaperTable, ...]

    @property
    def name(self) -> str:
        return self.heading.name
