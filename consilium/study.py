"""A study: one TOML file as frozen dataclasses; unknown keys are refused with the nearest valid name."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from consilium.data.check import check
from consilium.data.preprocess import Preprocess, told
from consilium.data.site_folder import Federation, read_federation, refuse
from consilium.errors import DataError, StudyError
from consilium.fields import NAME, fill, nearest, plain, to_toml
from consilium.legacy import current_study
from consilium.method import Method
from consilium.methods import ALIASES, METHODS
from consilium.methods.averaged import Averaged, Release, check_averaging
from consilium.networks import NETWORKS, Network
from consilium.privacy.dp import Privacy
from consilium.privacy.firewall import Firewall
from consilium.site import Local, Task
from consilium.tasks import Facts, TaskFields, build_task, default_network


@dataclass(frozen=True)
class Plan:
    """`[study]`: how long, who, and what when they do not answer."""

    name: str = ""  # of the run folder; empty: the method's
    rounds: int = 150  # the paper's rounds; adaptation and calibration come on top
    seed: int = 0
    score_every: int = 5
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
    firewall: Firewall = field(default_factory=Firewall)  # what becomes of odd updates; its mode alone will do

    def __post_init__(self) -> None:
        for name, low in (
            ("rounds", 1),
            ("score_every", 1),
            ("min_sites", 1),
            ("max_cases", 1),
            ("sites_per_round", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < low:
                raise StudyError(f"[study] {name} = {getattr(self, name)}: it must be at least {low}.")
        for name in ("deadline", "silence"):
            if not 0 < getattr(self, name) < math.inf:
                raise StudyError(f"[study] {name} = {getattr(self, name)}: it must be positive, in seconds.")
        if self.wait not in ("all", "quorum"):
            raise StudyError(f"[study] wait = {self.wait!r}: it must be one of all, quorum.")
        if not (0 < self.quorum < 1 or (self.quorum >= 1 and float(self.quorum).is_integer())):
            raise StudyError(f"[study] quorum = {self.quorum}: it must be a share below 1, or a number of sites.")
        if self.keep_rounds not in ("last-two", "all"):
            raise StudyError(f"[study] keep_rounds = {self.keep_rounds!r}: it must be one of last-two, all.")
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

    def quorum_of(self, asked: int) -> int:
        """How many of so many sites close a round."""
        if self.wait == "all":
            return asked
        number = math.ceil(self.quorum * asked) if self.quorum < 1 else int(self.quorum)
        return min(asked, max(number, self.min_sites))


# keys that came later: at their defaults, older runs keep their hash
_LATER = {name: getattr(Plan, name) for name in ("max_cases", "wait", "quorum", "silence", "rejoin")}


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
        if self.test_masks not in ("annotated", "complete"):
            raise StudyError(f"[data] test_masks = {self.test_masks!r}: it must be one of annotated, complete.")


@dataclass(frozen=True)
class Study:
    """Everything that decides a run."""

    plan: Plan
    data: Source
    preprocess: Preprocess
    task_fields: TaskFields
    network: Network
    local: Local
    method_name: str
    method: Method  # as it runs: `Averaged` where the study averages releases
    facts: Facts
    release: Release = field(default_factory=Release)
    privacy: Privacy = field(default_factory=Privacy)

    @cached_property
    def task(self) -> Task:
        return build_task(self.task_fields, self.network, self.seen, self.plan.seed)

    @property
    def seen(self) -> Facts:
        """The facts as the network sees them: a volume taken apart is a stack of images."""
        return _seen(self.facts, self.preprocess)

    @property
    def name(self) -> str:
        return self.plan.name or self.method_name.replace(":", "-")

    @property
    def pooled(self) -> bool:
        return self.data.pooled or self.method.pooled

    @property
    def exchanges(self) -> int:
        """How often a site is asked at most: the rounds of all phases."""
        return sum(phase.rounds for phase in self.method.phases(self.plan.rounds))

    @property
    def scorings(self) -> int:
        """How often a site is asked for scores: in the rounds that are due, and of the best and the last state."""
        counting = [phase.rounds for phase in self.method.phases(self.plan.rounds) if phase.counts]
        return sum(-(-rounds // self.plan.score_every) for rounds in counting) + 2

    @property
    def plugins(self) -> tuple[str, ...]:
        """The classes that are not the project's own, as `package.module:Class`."""
        return tuple(name for name in (self.method_name, self.task_fields.network) if ":" in name)

    @property
    def hash(self) -> str:
        """Eight characters that differ when anything that decides the run differs."""
        tables = self.tables()
        tables["preprocess"] = told(tables["preprocess"])
        for key, value in _LATER.items():
            if tables["study"].get(key) == value:
                del tables["study"][key]
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:8]

    def tables(self) -> dict[str, dict[str, Any]]:
        """The complete study as TOML tables, every default written out."""
        method = self.method.inner if isinstance(self.method, Averaged) else self.method
        release = {"release": plain(self.release)} if self.release.swa_from else {}  # older runs keep their hash
        return {
            "study": plain(self.plan),
            "data": plain(self.data),
            "preprocess": plain(self.preprocess),
            "task": {**plain(self.task_fields), **plain(self.network)},
            "local": plain(self.local),
            "method": {"name": self.method_name, **plain(method)},
            **release,
            "privacy": plain(self.privacy),
            "facts": plain(self.facts),
        }

    def to_toml(self) -> str:
        parts = [
            "\n".join([f"[{section}]", *(f"{key} = {to_toml(value)}" for key, value in table.items()), ""])
            for section, table in self.tables().items()
        ]
        return "\n".join(parts)

    def check_size(self) -> None:
        """Refuse images that the network cannot take, before any site tries; without numbers, so it costs nothing."""
        size = self.task_fields.patch or self.preprocess.size
        if not size:  # images keep their own sizes
            return
        try:
            with torch.device("meta"):
                self.task.network()(torch.empty(2, self.seen.channels, *size))
        except (ValueError, RuntimeError) as error:
            if "meta" in str(error) or isinstance(error, NotImplementedError):  # a layer that needs numbers
                return
            key = "[task] patch" if self.task_fields.patch else "[preprocess] size"
            raise StudyError(
                f"{key} = {list(size)} does not suit the network ({error}); take larger images, or fewer [task] widths."
            ) from error

    def federation(self) -> Federation:
        if not self.data.federation:
            raise StudyError("[data] federation names no folder of sites, and this needs their cases.")
        return read_federation(Path(self.data.federation))


# -------------------------------------------------------------------------------------------------- reading


def load_study(path: Path | str, changes: Sequence[str] = ()) -> Study:
    """Read a study file; `changes` are `key=value` texts as of `--set`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StudyError(f"cannot read the study {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise StudyError(f"cannot read the study {path}: it is not text in UTF-8.") from error
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{path} is not valid TOML: {error}.") from error
    for change in changes:
        _apply(tables, change)
    return make_study(tables, path.parent)


def make_study(tables: Mapping[str, Any], beside: Path | None = None) -> Study:
    """A study from TOML tables; a relative federation is looked for here, then beside the study file."""
    sections = ("study", "data", "preprocess", "task", "local", "method", "privacy", "facts", "release")
    for section, table in tables.items():
        if section == "suite":
            raise StudyError("this is a suite, not a study; give it to `consilium suite`.")
        if section not in sections:
            raise StudyError(f"there is no section [{section}]{_hint(section, sections)}")
        if not isinstance(table, Mapping):
            raise StudyError(f"'{section}' must be a section: write [{section}] and its keys below it.")
    tables = current_study(tables)
    if "facts" in tables:  # a run's own study, and an office's, can be read where the data are not
        data = fill(Source, {"federation": "", **tables.get("data", {})}, "data")
    else:
        data = _located(fill(Source, tables.get("data", {}), "data"), beside)
    facts = fill(Facts, tables["facts"], "facts") if "facts" in tables else _facts(data)
    name, method = _method(tables.get("method", {}))
    preprocess = fill(Preprocess, _oriented(tables, facts), "preprocess")
    if preprocess.slices and (facts.dimensions != 3 or facts.task != "segmentation"):
        raise StudyError(f"[preprocess] slices = '{preprocess.slices}' is for segmentation of volumes.")
    seen = _seen(facts, preprocess)
    if preprocess.size and len(preprocess.size) != seen.dimensions:
        kind = "slices" if preprocess.slices else "images"
        raise StudyError(f"[preprocess] size = {list(preprocess.size)}: the network sees {seen.dimensions}-D {kind}.")
    task_fields, network = _task(tables.get("task", {}), seen)
    local = _local(tables.get("local", {}), name, method)
    plan = fill(Plan, _spelled_out(tables.get("study", {})), "study")
    privacy = fill(Privacy, tables.get("privacy", {}), "privacy")
    privacy.check(name, method, local)
    release = fill(Release, tables.get("release", {}), "release")
    if release.swa_from:
        check_averaging(method)
        method = Averaged(method, release)
    return Study(plan, data, preprocess, task_fields, network, local, name, method, facts, release, privacy)


def _spelled_out(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """`firewall = "refuse"` is `firewall = {mode = "refuse"}`."""
    firewall = table.get("firewall")
    return {**table, "firewall": {"mode": firewall}} if isinstance(firewall, str) else table


def _oriented(tables: Mapping[str, Any], facts: Facts) -> Mapping[str, Any]:
    """[preprocess] with the orientation that a missing key means.

    Pictures are used as they are stored. So are the volumes of a run of 0.1, which had no such key: a run's own study
    (it has [facts]) is complete, so only those lack it.
    """
    table = tables.get("preprocess", {})
    if facts.dimensions == 2 and table.get("orientation"):
        raise StudyError(
            f"[preprocess] orientation = {table['orientation']!r} is for volumes; leave it out for pictures."
        )
    as_stored = facts.dimensions == 2 or "facts" in tables
    return {"orientation": "", **table} if as_stored else table


def _seen(facts: Facts, preprocess: Preprocess) -> Facts:
    return replace(facts, dimensions=2) if preprocess.slices else facts


def with_plan(study: Study, **changes: Any) -> Study:
    return replace(study, plan=replace(study.plan, **changes))


def _located(data: Source, beside: Path | None) -> Source:
    for folder in (Path.cwd(), beside):
        if folder is not None and (folder / data.federation).is_dir():
            return replace(data, federation=str((folder / data.federation).resolve()))
    raise StudyError(
        f"[data] federation = {data.federation!r}: there is no such folder here"
        f"{f' or beside the study in {beside}' if beside and beside.name else ''}. Make one with "
        f"`consilium phantom retina --to {data.federation}`, or name yours; an office without data writes [facts]."
    )


def _facts(data: Source) -> Facts:
    try:
        federation = read_federation(Path(data.federation))
    except DataError:
        refuse(check(Path(data.federation)).faults, data.federation)  # those of images too, none hidden
        raise
    return Facts(**{f.name: getattr(federation, f.name) for f in fields(Facts)})


def _method(table: Mapping[str, Any]) -> tuple[str, Method]:
    table = dict(table)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise StudyError(f"[method] name is required; choose from {', '.join(METHODS)}.")
    name = ALIASES.get(name, name)
    kind: Any = imported(name, "method", Method) if ":" in name else METHODS.get(name)
    if kind is None:
        raise StudyError(f"[method] name = '{name}': there is no such method{_hint(name, METHODS)}")
    return name, fill(kind, table, "method", about=f" of {name}")


def _local(table: Mapping[str, Any], name: str, method: Method) -> Local:
    """`[local]`; a method that fixes the optimiser's state has it its way, unless the study asks for the other."""
    local = fill(Local, table, "local")
    fixed = method.optimizer_state
    if not fixed or local.optimizer_state == fixed:
        return local
    if "optimizer_state" in table:
        raise StudyError(
            f"[local] optimizer_state = '{local.optimizer_state}': method '{name}' fixes it to '{fixed}', as its paper "
            f"does; write '{fixed}', or leave the key out."
        )
    return replace(local, optimizer_state=fixed)


def _task(table: Mapping[str, Any], facts: Facts) -> tuple[TaskFields, Network]:
    own = {f.name for f in fields(TaskFields)}
    name = table.get("network") or default_network(facts)
    kind: Any = imported(name, "network", object) if ":" in str(name) else NETWORKS.get(name)
    if kind is None:
        raise StudyError(f"[task] network = '{name}': there is no such network{_hint(str(name), NETWORKS)}")
    rest = {key: value for key, value in table.items() if key not in own}
    known = [*own, *(f.name for f in fields(kind))]
    for key in rest:
        if key not in known:
            raise StudyError(f"[task] has no key '{key}'{_hint(key, known)}")
    task = fill(
        TaskFields, {"network": name, **{k: v for k, v in table.items() if k in own and k != "network"}}, "task"
    )
    return task, fill(kind, rest, "task")


def imported(name: str, what: str, base: type) -> Any:
    """`package.module:Class`, in simulation; a hospital must allow it in its hospital.toml."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise StudyError(f"[{'task' if what == 'network' else 'method'}] cannot import {name}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base) and dataclasses.is_dataclass(found)):
        raise StudyError(
            f"{name} is not a {what}: it must be a dataclass "
            f"{'derived from Method' if what == 'method' else 'with build()'}."
        )
    return found


def _hint(word: str, valid: Iterable[str]) -> str:
    return f"; {nearest(word, sorted(valid))}"


def _apply(tables: dict[str, Any], change: str) -> None:
    """One `--set section.key=value`; values are TOML, else text."""
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise StudyError(f"--set {change}: write it as section.key=value, for instance --set local.lr=0.01.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
        if value.startswith(("[", "{")):
            raise StudyError(f'--set {change}: texts inside need quotes, for instance \'{key}=["a", "b"]\'.') from None
    table = tables
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise StudyError(f"--set {change}: '{part}' is not a section.")
    table[path[-1]] = value
