"""`hospital.toml`: what a hospital lets a federation do. The server can neither read nor set it."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from consilium.data.site_folder import Federation, read_own_site
from consilium.errors import DataError, StudyError
from consilium.fields import fill, nearest, to_toml
from consilium.files import read_json
from consilium.methods import ALIASES, METHODS
from consilium.study import Study, make_study
from consilium.tasks import Facts

RULES = "hospital.toml"  # its name in the folder of a simulated site that rehearses it
EXAMPLE = """\
# What this hospital lets the federation do. Nobody else reads this file.
site = {site}          # the name on the kit and in the site folder's site.toml
data = {data}          # the site folder: site.toml, cases.csv, images, labels
memory = {memory}        # memories of runs, releases, the log of everything that left
labels = {labels}        # in the order of the mask values 1, 2, … (classification: the classes)
device = "auto"      # cpu, cuda, cuda:1, mps

[limits]
methods = []         # only these methods; empty: every method of the package
refused = []         # never these
code = []            # "package.module:Class" of other packages that this hospital has installed and trusts
rounds = 0           # of one run; 0: no limit
scorings = 0         # of one run; 0: twice as many as the study asks for
message_bytes = 0    # of one message that leaves; 0: no limit
run_bytes = 0        # of all messages of one run; 0: no limit
epsilon = 0.0        # only studies with differential privacy of at most this ε; 0: also studies without
delta = 1e-5         # at this δ
# of all studies together, whatever they are called; 0: no limit
total_rounds = 0
total_scorings = 0
total_bytes = 0
total_epsilon = 0.0
"""


@dataclass(frozen=True)
class Limits:
    """`[limits]`: what this hospital does not do, whoever asks."""

    methods: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    rounds: int = 0
    scorings: int = 0
    message_bytes: int = 0
    run_bytes: int = 0
    epsilon: float = 0.0
    delta: float = 1e-5
    total_rounds: int = 0
    total_scorings: int = 0
    total_bytes: int = 0
    total_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.epsilon < math.inf and 0 <= self.total_epsilon < math.inf and 0 < self.delta < 1):
            raise StudyError("[limits] epsilon and total_epsilon must be numbers from 0 up, and delta in (0, 1).")
        for key, value in vars(self).items():
            if type(value) is int and value < 0:
                raise StudyError(f"[limits] {key} = {value}: it must be 0, for no limit, or more.")
        for key in ("methods", "refused"):
            names = tuple(ALIASES.get(name, name) for name in getattr(self, key))
            for name in names:
                if name not in METHODS:
                    raise StudyError(f"[limits] {key}: there is no method '{name}'; {nearest(name, sorted(METHODS))}")
            object.__setattr__(self, key, names)
        for name in self.code:
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
                raise StudyError(f"[limits] code: '{name}' is no class; write it as package.module:Class.")

    def allows(self, method: str, network: str = "") -> bool:
        """Whether a method may run here; code of other packages must be named, before it is imported."""
        name = ALIASES.get(method, method)
        if ":" in network and network not in self.code:
            return False
        if ":" in name:
            return name in self.code
        return name not in self.refused and (not self.methods or name in self.methods)


def too_little_privacy(limits: Limits, study: Study) -> str:
    """Why a study is not private enough for a hospital, in a sentence; empty if it is."""
    if not (limits.epsilon or limits.total_epsilon):
        return ""
    if not study.privacy.on:
        return (
            f"hospital.toml demands differential privacy (epsilon = {limits.epsilon or limits.total_epsilon}) and the "
            "study has none; it needs [privacy] clip and noise."
        )
    told = study.privacy.epsilon(study.exchanges, limits.delta)
    if not limits.epsilon or told <= limits.epsilon:
        return ""
    return (
        f"hospital.toml demands ε of at most {limits.epsilon} at δ = {limits.delta}, and the study's {told:.3g} is "
        "more; it needs more [privacy] noise or fewer rounds."
    )


@dataclass(frozen=True)
class Hospital:
    """One hospital's own settings."""

    site: str
    data: str
    memory: str
    labels: tuple[str, ...]
    device: str = "auto"
    limits: Limits = field(default_factory=Limits)

    def place(self, run: str) -> Path:
        """This hospital's own folder for one run."""
        return Path(self.memory) / run

    def study(self, text: str) -> Study:
        """A study as this hospital runs it; `PermissionError` if it does not."""
        tables = tomllib.loads(text)
        method, task = tables.get("method", {}), tables.get("task", {})
        if not (isinstance(method, Mapping) and isinstance(task, Mapping)):
            raise StudyError("[method] and [task] must be sections.")
        if not self.limits.allows(str(method.get("name", "")), str(task.get("network", ""))):
            raise PermissionError("hospital.toml does not allow this method")
        return make_study(tables)

    def on_own_device(self, study: Study) -> Study:
        return replace(study, local=replace(study.local, device=self.device))

    def federation(self, facts: Facts) -> Federation:
        """The hospital's own data as a federation of one site."""
        return read_own_site(
            Path(self.data), facts.task, facts.labels, facts.dimensions, facts.channels, facts.contains
        )


def read_hospital(path: Path) -> Hospital:
    """A hospital.toml; relative folders are beside it."""
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; docs/deployment.md shows how to write it.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid TOML: {error}.") from error
    limits = tables.pop("limits", {})
    if not isinstance(limits, Mapping):
        raise StudyError(f"{path}: 'limits' must be a section.")
    hospital = fill(Hospital, tables, "hospital.toml")
    here = path.resolve().parent
    return replace(
        hospital,
        data=str(here / hospital.data),
        memory=str(here / hospital.memory),
        limits=fill(Limits, limits, "limits"),
    )


def write_example(path: Path, kit: Path) -> Path:
    """An example to edit, with the kit's own name in it."""
    if path.exists():
        raise DataError(f"{path} is there already; edit it.")
    name = str(read_json(kit / "consilium.json")["name"])
    values = {"site": name, "data": f"data/{name}", "memory": "memory", "labels": ["disc", "cup"]}
    path.write_text(EXAMPLE.format(**{key: to_toml(value) for key, value in values.items()}), encoding="utf-8")
    return path


def hospital_path() -> Path:
    """The file the site was started with."""
    return Path(os.environ["CONSILIUM_HOSPITAL"])
