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
from consilium.extensions import code_hash, code_hashes, code_id, file_of, is_code, named_code
from consilium.fields import fill, nearest, to_toml
from consilium.files import read_json
from consilium.methods import ALIASES, METHODS
from consilium.study import Study
from consilium.study_reading import make_study
from consilium.tasks import Facts

_CODE = re.compile(r"[^\s:][^:]*:[A-Za-z_]\w* [0-9a-f]{32}")  # file.py:Name or package.module:Name, and its hash
RULES = "hospital.toml"  # its name in the folder of a simulated site that rehearses it
# keys of earlier versions, and what they are called now
OLD_LIMITS = {"run_bytes": "study_bytes", "run_seconds": "study_seconds"} | {
    f"total_{key}": key for key in ("rounds", "scorings", "bytes", "epsilon")
}
ONE_RUN = {key: f"study_{key}" for key in ("rounds", "scorings", "epsilon")}
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
code = []            # own code of studies, by name and hash: "file.py:Name HASH", beside this file, or an installed
                     # "package.module:Name HASH"; `consilium methods file.py:Name` shows the hash
approval = false     # true: a person here approves every study first, with `consilium federation review`
# what leaves in all studies together, whatever they are called; 0: no limit. `consilium federation budget` shows how
# much of it is used; who writes this file raises it
rounds = 1_000       # updates
scorings = 1_000     # times that models are scored
bytes = 0
epsilon = 0.0        # more than 0: only studies with differential privacy, and so much ε in all
delta = 1e-5         # at this δ
# what leaves in one study, with all its repetitions; 0: no limit of its own
study_rounds = 0
study_scorings = 0   # 0: in each run twice as many as the study asks for
study_bytes = 0
study_epsilon = 0.0  # more than 0: only studies with differential privacy of at most this ε
message_bytes = 0    # of one message that leaves; 0: no limit
order_bytes = 0      # of one message that arrives; 0: what the study can need, at most half of the memory
# what one study may take here, checked before it trains; 0: no limit
model_parameters = 1_000_000_000
model_bytes = 0
layers = 10_000      # of its network
memory_bytes = 0     # 0: what this machine has
disk_bytes = 0       # of the memory folder, all studies together
cache_bytes = 0      # of its preprocessed images
round_seconds = 0    # of one round; what takes longer is stopped
study_seconds = 0    # of all its work here

[keep]               # days after which `consilium federation clean` removes what nobody has used since; 0: never
memories = 0         # of runs; one that is still under way needs them
releases = 0         # the models that runs left here
jobs = 0             # the engine's own files of jobs, in the kit
"""


@dataclass(frozen=True)
class Limits:
    """`[limits]`: what this hospital does not do, whoever asks."""

    methods: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    rounds: int = 0  # of all studies together, as scorings, bytes and epsilon
    scorings: int = 0
    bytes: int = 0
    epsilon: float = 0.0
    delta: float = 1e-5
    study_rounds: int = 0  # of one study, with all its repetitions
    study_scorings: int = 0
    study_bytes: int = 0
    study_epsilon: float = 0.0
    message_bytes: int = 0
    order_bytes: int = 0
    approval: bool = False
    model_parameters: int = 1_000_000_000
    model_bytes: int = 0
    layers: int = 10_000
    memory_bytes: int = 0
    disk_bytes: int = 0
    cache_bytes: int = 0
    round_seconds: float = 0.0
    study_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise StudyError(f"[limits] delta = {self.delta}: it must be between 0 and 1.")
        for key, value in vars(self).items():
            if type(value) in (int, float) and not 0 <= value < math.inf:
                raise StudyError(f"[limits] {key} = {value}: it must be 0, for no limit, or more.")
        for key in ("methods", "refused"):
            names = tuple(ALIASES.get(name, name) for name in getattr(self, key))
            for name in names:
                if name not in METHODS:
                    raise StudyError(f"[limits] {key}: there is no method '{name}'; {nearest(name, sorted(METHODS))}")
            object.__setattr__(self, key, names)
        for entry in self.code:
            if not _CODE.fullmatch(entry):
                now = f"; what is there now has '{entry} {code_hash(entry)}'" if code_hashes([entry]) else ""
                raise StudyError(
                    f"[limits] code: '{entry}' must be a name and a hash, \"file.py:Name HASH\" or "
                    f'"package.module:Name HASH"; `consilium methods NAME` shows the hash{now}.'
                )

    @property
    def strictest_epsilon(self) -> float:
        """The most ε that one study may have; 0: also studies without differential privacy."""
        return min((most for most in (self.epsilon, self.study_epsilon) if most), default=0.0)

    def allows(self, method: str) -> bool:
        """Whether a method of the package may run here."""
        name = ALIASES.get(method, method)
        return is_code(name) or (name not in self.refused and (not self.methods or name in self.methods))

    def own_code(self, tables: Mapping[str, Any]) -> dict[str, str]:
        """The files of the code that a study names, as this hospital has them; nothing is imported.

        Raises PermissionError for code that is not in `code`, or whose files have another hash by now.
        """
        allowed = {code_id(entry.rpartition(" ")[0]): entry.rpartition(" ") for entry in self.code}
        files: dict[str, str] = {}
        for name in named_code(tables):
            if code_id(name) not in allowed:
                raise PermissionError(f"hospital.toml does not allow the code {code_id(name)}")
            full, _, hash = allowed[code_id(name)]
            if code_hash(full) != hash:
                raise PermissionError(f"the code {code_id(name)} is not what hospital.toml allows: its hash is another")
            files[file_of(name)] = file_of(full)
        return files


def too_little_privacy(limits: Limits, study: Study) -> str:
    """Why a study is not private enough for a hospital, in a sentence; empty if it is."""
    most, privacy = limits.strictest_epsilon, study.privacy
    if not most:
        return ""
    if not privacy.on:
        return (
            f"hospital.toml demands differential privacy (ε of at most {most}) and the study has none; it needs "
            "[privacy] clip and noise."
        )
    if privacy.by_patient:
        return _too_loose(most, limits.delta, study)
    told = privacy.told(study.exchanges, limits.delta)
    if told <= most:
        return ""
    return (
        f"hospital.toml demands ε of at most {most} at δ = {limits.delta}, and the study's {told:.3g} is more; it "
        "needs more [privacy] noise or fewer rounds."
    )


def _too_loose(most: float, delta: float, study: Study) -> str:
    """The same of DP-SGD. A study that names its noise instead of ε is held to the limit as it spends."""
    privacy = study.privacy
    if not privacy.epsilon or (privacy.epsilon <= most and privacy.delta <= delta):
        return ""
    return (
        f"hospital.toml demands ε of at most {most} at δ = {delta}, and the study's is {privacy.epsilon} at "
        f"{privacy.delta}; it needs a smaller [privacy] epsilon and delta."
    )


@dataclass(frozen=True)
class Keep:
    """`[keep]`: for how many days things that nobody uses stay; 0: for ever."""

    memories: int = 0
    releases: int = 0
    jobs: int = 0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if value < 0:
                raise StudyError(f"[keep] {key} = {value}: it must be 0, for ever, or a number of days.")


@dataclass(frozen=True)
class Hospital:
    """One hospital's own settings."""

    site: str
    data: str
    memory: str
    labels: tuple[str, ...]
    device: str = "auto"
    limits: Limits = field(default_factory=Limits)
    keep: Keep = field(default_factory=Keep)

    def place(self, run: str) -> Path:
        """This hospital's own folder for one run."""
        return Path(self.memory) / run

    def study(self, text: str) -> Study:
        """A study as this hospital runs it; `PermissionError` if it does not."""
        tables = tomllib.loads(text)
        method, task = tables.get("method", {}), tables.get("task", {})
        if not (isinstance(method, Mapping) and isinstance(task, Mapping)):
            raise StudyError("[method] and [task] must be sections.")
        if not self.limits.allows(str(method.get("name", ""))):
            raise PermissionError("hospital.toml does not allow this method")
        return make_study({**tables, "code": self.limits.own_code(tables)})

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
        raise DataError(
            f"cannot read {path}: {error.strerror}; `consilium federation site KIT --example` writes one."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid TOML: {error}.") from error
    here = path.resolve().parent
    limits, keep = tables.pop("limits", {}), tables.pop("keep", {})
    if not (isinstance(limits, Mapping) and isinstance(keep, Mapping)):
        raise StudyError(f"{path}: 'limits' and 'keep' must be sections.")
    if isinstance(limits.get("code"), list):
        limits = {**limits, "code": [_beside(here, entry) for entry in limits["code"]]}
    hospital = fill(Hospital, tables, "hospital.toml")
    return replace(
        hospital,
        data=str(here / hospital.data),
        memory=str(here / hospital.memory),
        limits=fill(Limits, _renamed(limits, path), "limits"),
        keep=fill(Keep, keep, "keep"),
    )


def _renamed(limits: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """`[limits]` without keys of earlier versions that limit nothing; an error says how to write the others.

    There `rounds`, `scorings` and `epsilon` were of one run. Nobody should have to guess which is meant.
    """
    if not limits.keys() & OLD_LIMITS.keys():
        return limits
    before = {**ONE_RUN, **OLD_LIMITS}
    if not any(limits.get(key) for key in before):
        return {key: value for key, value in limits.items() if key not in OLD_LIMITS}
    lines = [f"{before[key]} = {to_toml(value)}" for key, value in limits.items() if key in before and value]
    olds = ", ".join(key for key in limits if key in before)
    raise StudyError(
        f"{path} is of an earlier version: [limits] rounds, scorings, bytes and epsilon are now of all studies "
        f"together, and those of one study begin with 'study_'. In place of {olds} write: {'; '.join(lines)}."
    )


def _beside(folder: Path, entry: object) -> object:
    """An entry of `[limits] code` with the full path of its file, which lies beside hospital.toml."""
    return str(folder / entry) if isinstance(entry, str) and ".py:" in entry else entry


def write_example(path: Path, kit: Path) -> Path:
    """An example to edit, with the kit's own name in it."""
    if path.exists():
        raise DataError(f"{path} exists already; edit it.")
    name = str(read_json(kit / "consilium.json")["name"])
    values = {"site": name, "data": f"data/{name}", "memory": "memory", "labels": ["disc", "cup"]}
    path.write_text(EXAMPLE.format(**{key: to_toml(value) for key, value in values.items()}), encoding="utf-8")
    return path


def hospital_path() -> Path:
    """The file the site was started with."""
    return Path(os.environ["CONSILIUM_HOSPITAL"])
