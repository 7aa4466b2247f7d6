"""Chooses settings on validation cases; no test score is read here."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilium.errors import StudyError
from consilium.files import read_json, write_json
from consilium.suites.planning import SuiteRow, candidates, finished, folder_of, settings_text, study_of, trials
from consilium.suites.sections import STATE, Suite
from consilium.suites.settings import Settings, names

RULE = "the highest validation site mean of the method's headline model at its best round; of equals the first"

FOR_ALL = "chosen once for all methods: the highest mean, over the rows, of each row's best validation site mean"


@dataclass(frozen=True)
class Candidate:
    """One candidate."""

    settings: Settings
    run: str  # the name of its folder
    valid: float | None  # None: not finished


@dataclass(frozen=True)
class SettingsChoice:
    """The candidates of a row, and the one used for all seeds."""

    row: SuiteRow
    tried: tuple[Candidate, ...]  # empty: there is nothing to choose
    chosen: Settings | None  # None: not yet, or no candidate could be trained

    def to_json(self) -> dict[str, Any]:
        tried = [{"settings": dict(t.settings), "valid_site_mean": t.valid, "run": t.run} for t in self.tried]
        chosen = None if self.chosen is None else dict(self.chosen)
        about = {"row": self.row.name, "method": self.row.method, "settings": dict(self.row.settings)}
        return {**about, "tried": tried, "chosen": chosen}

    def at_an_end(self) -> Iterator[str]:
        """The chosen numbers beyond which nothing was tried: "lr 0.1, the largest". Only of three values or more.

        Counts, such as epochs, and 0 as the smallest have nothing beyond them.
        """
        for key, value in (self.chosen or {}).items():
            tried = {t.settings[key] for t in self.tried if isinstance(t.settings.get(key), (int, float))}
            if len(tried) < 3 or not any(isinstance(one, float) for one in tried):
                continue
            end = "largest" if value == max(tried) else "smallest" if 0 != value == min(tried) else ""
            if end:
                yield f"{settings_text({key: value})}, the {end}"


def choose(suite: Suite, row: SuiteRow, runs: Path, failed: Collection[str] = ()) -> SettingsChoice:
    """The choice for a row, made once every candidate is finished or has `failed` (names of run folders)."""
    found = candidates(suite, row)
    if len(found) == 1:
        return SettingsChoice(row, (), found[0])
    tried = [_tried(suite, planned.chosen, folder_of(study_of(suite, planned), runs)) for planned in trials(suite, row)]
    scored = [t for t in tried if t.valid is not None]
    waiting = [t for t in tried if t.valid is None and t.run not in failed]
    if waiting or not scored:
        return SettingsChoice(row, tuple(tried), None)
    return SettingsChoice(row, tuple(tried), max(scored, key=lambda t: t.valid or 0.0).settings)


def choose_all(
    suite: Suite, every: Sequence[SuiteRow], runs: Path, failed: Collection[str] = ()
) -> list[SettingsChoice]:
    """The choices of all rows of a suite; a common choice waits until all rows have been tried."""
    choices = [choose(suite, row, runs, failed) for row in every]
    if STATE not in names(suite.choose):
        return choices
    levels = state_levels(choices, failed)
    state = max(levels, key=lambda name: levels[name]) if levels else None
    return [_within(choice, state) if _has_states(choice) else choice for choice in choices]


def state_levels(choices: Sequence[SettingsChoice], failed: Collection[str] = ()) -> dict[str, tuple[int, float]]:
    """By optimiser state: how many rows could be trained with it, and the mean of their best validation scores.

    Empty until every candidate of every row is finished or has failed.
    """
    tried = [choice.tried for choice in choices if _has_states(choice)]
    if any(t.valid is None and t.run not in failed for row in tried for t in row):
        return {}
    levels = {}
    for state in dict.fromkeys(t.settings[STATE] for row in tried for t in row):
        known = [[t.valid for t in row if t.settings[STATE] == state and t.valid is not None] for row in tried]
        best = [max(values) for values in known if values]
        if best:
            levels[state] = (len(best), statistics.fmean(best))
    return levels


def _has_states(choice: SettingsChoice) -> bool:
    return any(STATE in t.settings for t in choice.tried)


def _within(choice: SettingsChoice, state: str | None) -> SettingsChoice:
    """The row's best candidate among those with this optimiser state."""
    scored = [t for t in choice.tried if t.valid is not None and t.settings[STATE] == state]
    return replace(choice, chosen=max(scored, key=lambda t: t.valid or 0.0).settings if scored else None)


def end_notes(choices: Iterable[SettingsChoice]) -> list[str]:
    """A sentence on the rows whose search may have been too narrow, if there are any."""
    found = {choice.row.name: ", ".join(choice.at_an_end()) for choice in choices}
    texts = [f"{name}: {text}" for name, text in found.items() if text]
    return [f"At an end of what was tried, so that a value beyond it may be better: {'; '.join(texts)}."] * bool(texts)


def write_choices(suite: Suite, choices: Sequence[SettingsChoice], path: Path, failed: Collection[str] = ()) -> None:
    rows = [choice.to_json() for choice in choices if choice.tried]
    untrained = {t.run for choice in choices for t in choice.tried if t.valid is None}
    facts: dict[str, Any] = {
        "suite": suite.name,
        "seed": suite.heading.chosen_on,
        "rule": RULE,
        "rows": rows,
        "failed": sorted(untrained.intersection(failed)),
    }
    if STATE in names(suite.choose):
        levels = {state: level for state, (_, level) in state_levels(choices, failed).items()}
        facts["for_all"] = {"setting": STATE, "rule": FOR_ALL, "valid_site_mean": levels}
    write_json(facts, path)


def failed_before(path: Path) -> set[str]:
    """The runs that had failed when the choices were last written."""
    if not path.exists():
        return set()
    return set(read_json(path, "remove it, the suite writes it again").get("failed", ()))


def _tried(suite: Suite, settings: Settings, folder: Path) -> Candidate:
    if not finished(folder):
        return Candidate(settings, folder.name, None)
    valid = read_json(folder / "summary.json")["best"].get("valid", {}).get("site_mean")
    if valid is None:
        raise StudyError(
            f"{folder} has no validation score, so nothing can be chosen by it: give the federation validation cases "
            f"(`consilium check --split`), or take [choose] out of {suite.path}."
        )
    return Candidate(settings, folder.name, float(valid))
