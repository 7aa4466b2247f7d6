"""Choices made on validation cases; no test score is read here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import StudyError
from consilium.files import read_json, write_json
from consilium.suites.planning import Row, candidates, finished, folder_of, study_of, trials
from consilium.suites.reading import Suite
from consilium.suites.settings import Settings

RULE = "the highest validation site mean of the method's headline model at its best round; of equals the first"


@dataclass(frozen=True)
class Tried:
    """One candidate."""

    settings: Settings
    run: str  # the name of its folder
    valid: float | None  # None: not finished


@dataclass(frozen=True)
class Choice:
    """What was tried for a row, and what is taken for all seeds."""

    row: Row
    tried: tuple[Tried, ...]  # empty: there was nothing to choose
    chosen: Settings | None  # None: not yet, or nothing that was tried could be trained

    def to_json(self) -> dict[str, Any]:
        tried = [{"settings": dict(t.settings), "valid_site_mean": t.valid, "run": t.run} for t in self.tried]
        chosen = None if self.chosen is None else dict(self.chosen)
        about = {"row": self.row.name, "method": self.row.method, "settings": dict(self.row.settings)}
        return {**about, "tried": tried, "chosen": chosen}


def choose(suite: Suite, row: Row, runs: Path, failed: Collection[str] = ()) -> Choice:
    """The choice for a row, made once every candidate is finished or has `failed` (names of run folders)."""
    found = candidates(suite, row)
    if len(found) == 1:
        return Choice(row, (), found[0])
    tried = [_tried(suite, planned.chosen, folder_of(study_of(suite, planned), runs)) for planned in trials(suite, row)]
    scored = [t for t in tried if t.valid is not None]
    waiting = [t for t in tried if t.valid is None and t.run not in failed]
    if waiting or not scored:
        return Choice(row, tuple(tried), None)
    return Choice(row, tuple(tried), max(scored, key=lambda t: t.valid or 0.0).settings)


def write_choices(suite: Suite, choices: Sequence[Choice], path: Path) -> None:
    rows = [choice.to_json() for choice in choices if choice.tried]
    write_json({"suite": suite.name, "seed": suite.heading.chosen_on, "rule": RULE, "rows": rows}, path)


def _tried(suite: Suite, settings: Settings, folder: Path) -> Tried:
    if not finished(folder):
        return Tried(settings, folder.name, None)
    valid = read_json(folder / "summary.json")["best"].get("valid", {}).get("site_mean")
    if valid is None:
        raise StudyError(
            f"{folder} has no validation score, so nothing can be chosen by it: give the federation validation cases "
            f"(`consilium check --split`), or take [choose] out of {suite.path}."
        )
    return Tried(settings, folder.name, float(valid))
