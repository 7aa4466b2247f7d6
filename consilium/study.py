"""A study: everything that decides a run, as frozen dataclasses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from consilium.data.preprocess import Preprocess, told
from consilium.data.site_folder import Federation, read_federation
from consilium.errors import StudyError
from consilium.extensions import named_code, shortened
from consilium.fields import plain, to_toml
from consilium.legacy import told_by_0_1, with_gone
from consilium.local_training import Local
from consilium.method import Method
from consilium.methods.averaged import Averaged, Release
from consilium.networks import Network
from consilium.plan import LATER, LATER_LOCAL, LATER_PRIVACY, LATER_TASK, Plan, Source
from consilium.privacy.dp import Privacy
from consilium.task import Task
from consilium.tasks import Facts, TaskFields, build_task


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
    code: Mapping[str, str] = field(default_factory=dict)  # files of the user's own code: name in the study → path

    @cached_property
    def task(self) -> Task:
        return build_task(self.task_fields, self.network, self.seen, self.plan.seed)

    @property
    def headline(self) -> str:
        """The score that decides and that tables show first; of volumes trained as slices it may be the slices'."""
        by_slice = self.preprocess.slices and self.task_fields.decides == "slice"
        return f"slice_{self.task.headline}" if by_slice else self.task.headline

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all scores that its cases can have; a slice of a volume has only the task's first."""
        return (*self.task.metrics, *([f"slice_{self.task.headline}"] if self.preprocess.slices else []))

    @property
    def seen(self) -> Facts:
        """The facts as the network sees them: a volume taken apart is a stack of images."""
        return seen_by_network(self.facts, self.preprocess)

    @property
    def name(self) -> str:
        return self.plan.name or self.method_name.replace(".py:", "-").replace(":", "-").replace("/", "-")

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
        """The code that is not the project's own, as `/path/file.py:Name` or `package.module:Name`."""
        tables = {"method": {"name": self._method_path}, "task": plain(self.task_fields)}
        return named_code({**tables, "preprocess": plain(self.preprocess)})

    @property
    def _method_path(self) -> str:
        file, colon, name = self.method_name.rpartition(":")
        return f"{self.code.get(file, file)}{colon}{name}"

    @property
    def hash(self) -> str:
        """Eight characters that differ when anything that decides the run differs."""
        tables = self.tables()
        tables["preprocess"] = told(tables["preprocess"])
        tables["method"] = told_by_0_1(tables["method"])
        if not self.preprocess.slices:  # whole images: how slices are routed and judged changes nothing
            tables["task"]["decides"] = "volume"
            tables["method"] |= {"route": "volume"} if "route" in tables["method"] else {}
        tables["study"] = with_gone(tables["study"])
        tables.pop("code", None)  # the same code elsewhere is the same study
        del tables["study"]["track"]  # who looks on changes nothing
        for section, later in (
            ("study", LATER),
            ("task", LATER_TASK),
            ("local", LATER_LOCAL),
            ("privacy", LATER_PRIVACY),
        ):
            for key, value in later.items():
                if tables[section].get(key) == value:
                    del tables[section][key]
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:8]

    def tables(self) -> dict[str, dict[str, Any]]:
        """The complete study as TOML tables, every default written out."""
        method = self.method.inner if isinstance(self.method, Averaged) else self.method
        release = {"release": plain(self.release)} if self.release.swa_from else {}  # older runs keep their hash
        code = {"code": dict(self.code)} if self.code else {}
        tables = {
            "study": plain(self.plan),
            "data": plain(self.data),
            "preprocess": plain(self.preprocess),
            "task": {**plain(self.task_fields), **plain(self.network)},
            "local": plain(self.local),
            "method": {"name": self.method_name, **plain(method)},
            **release,
            "privacy": plain(self.privacy),
            "facts": plain(self.facts),
            **code,
        }
        return shortened(tables, self.code)

    def to_toml(self, places: bool = True) -> str:
        """The complete study as text; without `places`, the files of the user's own code are to lie beside it."""
        tables = self.tables()
        if not places:
            tables.pop("code", None)
        parts = [
            "\n".join([f"[{section}]", *(f"{_key(key)} = {to_toml(value)}" for key, value in table.items()), ""])
            for section, table in tables.items()
        ]
        return "\n".join(parts)

    def federation(self) -> Federation:
        if not self.data.federation:
            raise StudyError("[data] federation names no folder of sites, and this needs their cases.")
        return read_federation(Path(self.data.federation))


def seen_by_network(facts: Facts, preprocess: Preprocess) -> Facts:
    return replace(facts, dimensions=2) if preprocess.slices else facts


def with_plan(study: Study, **changes: Any) -> Study:
    return replace(study, plan=replace(study.plan, **changes))


def _key(key: str) -> str:
    """A key as TOML writes it: `mine.py` needs quotes."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
