"""A run folder, read for a report."""

from __future__ import annotations

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from consilium.errors import RunError, not_a_run
from consilium.files import read_line
from consilium.legacy import current_study, reject_other_format
from consilium.run_files import UNDER_RULES
from consilium.scores.means import MEAN, ScoreEntry, summarise, with_label_mean
from consilium.scores.rows import ScoreRow, check_rows, read_rows
from consilium.scores.summary import unscored
from consilium.tracking import MLFLOW_STORE

Kind = Literal["bound", "local", "federated"]

_LOCAL = ("local", "separate")
_BOUND = ("pooled", "centralized")
# what an unfinished run is probably about: the first of these it has scores of
_MODELS = ("super", "ensemble", "personal", "global", "pooled", "local", "solo", "teacher")
_METRICS = ("dice", "accuracy")
_SUPER = ("super", "ensemble")  # made of a global model and personal ones
# methods that fix the optimiser's state; written out, because methods themselves take seconds to import
FIXED_STATES = {"apple": "fresh", "pfedme": "fresh", "scaffold": "fresh"}
_CHOSEN_ROUNDS = ("best", "last")  # phases of rows that belong to no single round of training


@dataclass(frozen=True)
class Headline:
    """Which of a run's scores its method is about."""

    model: str
    metric: str
    label: str


@dataclass(frozen=True)
class Curve:
    """Scores of one split over rounds; NaN where a site was not scored."""

    rounds: tuple[int, ...]
    site_mean: tuple[float, ...]
    sites: Mapping[str, tuple[float, ...]]
    model: str = ""  # if it is not the headline's


@dataclass(frozen=True, eq=False)
class RunView:
    """What a report needs of one run; scores and journal are read when first asked for."""

    folder: Path
    study: Mapping[str, Any]
    summary: Mapping[str, Any] | None  # None: unfinished
    origin: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def method(self) -> str:
        return str(self.summary["method"] if self.summary else self.study["method"]["name"])

    @property
    def seed(self) -> int:
        return int(self.summary["seed"] if self.summary else self.study.get("study", {}).get("seed", 0))

    @property
    def kind(self) -> Kind:
        if self.method in _BOUND or self.study.get("data", {}).get("pooled") is True:
            return "bound"
        return "local" if self.method in _LOCAL else "federated"

    def rehearsed(self, site: str) -> bool:
        """Whether the site went by a hospital's rules, in a simulation (`consilium.rehearsal`)."""
        return (self.folder / "sites" / site / "hospital.toml").exists()

    @property
    def optimizer_state(self) -> str:
        """What becomes of the optimiser's state between rounds: "kept" or "fresh"; empty if the study does not say."""
        return str(self.study.get("local", {}).get("optimizer_state", ""))

    @property
    def fixes_state(self) -> bool:
        """Whether its method leaves a study no choice of the optimiser's state."""
        return self.method in FIXED_STATES

    @property
    def parts(self) -> tuple[str, ...]:
        """Models that tables show beside the headline: of a super model its global one, the counterpart of FedAvg's."""
        about = self.headline
        if about is None or about.model not in _SUPER:
            return ()
        return ("global",) if self.entry("global", about.metric, about.label) else ()

    @property
    def task(self) -> str:
        """What is learned, in words; empty if the study does not say."""
        facts = self.study.get("facts", {})
        return f"{facts['dimensions']}-D {facts['task']} of {', '.join(facts['labels'])}" if facts else ""

    @cached_property
    def rows(self) -> list[ScoreRow]:
        path = self.folder / "scores.csv"
        rows = read_rows(path) if path.exists() else []
        check_rows(rows, self.events, path)
        return rows

    @cached_property
    def events(self) -> list[Mapping[str, Any]]:
        """The journal; a resumed run repeats a round, and the last event of an (event, phase, round, site) counts."""
        path = self.folder / "journal.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # [:-1]: empty, or cut short by a crash
        last: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            event = _event(line, number, path)
            last[event.get("event"), event.get("phase"), event.get("round"), event.get("site")] = event
        return list(last.values())

    @cached_property
    def headline(self) -> Headline | None:
        if self.summary:
            found = self.summary["headline"]
            return Headline(found["model"], found["metric"], found["label"])
        pairs = {(row.model, row.metric) for row in self.rows}
        about = [(model, metric) for metric in _METRICS for model in _MODELS if (model, metric) in pairs]
        if not about:
            return None
        model, metric = about[0]
        return Headline(model, metric, MEAN)

    @cached_property
    def best_rows(self) -> list[ScoreRow]:
        """Scores of the models that were best on validation, label means included; none of an unfinished run."""
        if not self.summary:
            return []
        marked = [row for row in self.rows if row.phase == "best"]
        round_ = self.summary["best"]["round"]
        return with_label_mean(marked or [row for row in self.rows if row.round == round_ and row.phase != "last"])

    @cached_property
    def unscored(self) -> tuple[str, ...]:
        """Sites whose scores of the best or the last state are missing from a finished run."""
        if not self.summary:
            return ()
        return tuple(sorted({site for sites in unscored(self.events).values() for site in sites}))

    def entry(self, model: str, metric: str, label: str) -> ScoreEntry:
        """Test scores of the best round from the summary; empty if there are none."""
        scores = self.summary["best"]["scores"] if self.summary else {}
        found: ScoreEntry = scores.get(model, {}).get(metric, {}).get(label, {})
        return found

    @cached_property
    def curve(self) -> Curve:
        """Of validation cases; where the headline's model is made after training, of the one scored in training."""
        found = self._curve("valid")
        scored = [e["model"] for e in self.events if e["event"] == "score" and e["phase"] not in _CHOSEN_ROUNDS]
        if found.rounds or self.headline is None or not scored:
            return found
        return replace(self._curve("valid", model=scored[-1]), model=scored[-1])

    @cached_property
    def test_curve(self) -> Curve:
        """Of test cases: to look at, not to choose by."""
        return self._curve("test")

    def label_curve(self, label: str, split: str) -> Curve:
        """Of one label; the site mean is over the sites whose truth shows it."""
        return self._curve(split, label)

    def _curve(self, split: str, label: str | None = None, model: str | None = None) -> Curve:
        if self.headline is None:
            return Curve((), (), {})
        about = replace(self.headline, model=model or self.headline.model)
        rounds: dict[int, list[ScoreRow]] = defaultdict(list)
        for row in self.rows:
            about_it = (row.model, row.metric, row.split) == (about.model, about.metric, split)
            if about_it and row.phase not in _CHOSEN_ROUNDS and label in (None, row.label):
                rounds[row.round].append(row)
        return _curve(rounds, about if label is None else replace(about, label=label), split)


def read_run(folder: Path) -> RunView:
    """Open a run folder; an unfinished one has no summary."""
    study = current_study(_toml(folder / "study.toml", folder))
    if "name" not in study.get("method", {}):
        raise RunError(f"{folder / 'study.toml'} names no method, so {folder} is not a run; give a folder under runs/.")
    summary = _json(folder / "summary.json", "`consilium resume` writes it again")
    if summary is not None:
        _check(summary, folder / "summary.json")
    origin = _json(folder / "origin.json", "restore it, or repeat the run")
    if origin and "format" in origin:
        reject_other_format(folder, origin)
    return RunView(folder.resolve(), study, summary, origin or {})


def run_folders(named: Iterable[Path]) -> list[Path]:
    """The folders as named, without what lies beside them.

    A shell's `runs/*` also names suites, folders of runs under rules, and MLflow's store.
    """
    folders = list(named)
    return [path for path in folders if not _is_beside(path)] or folders


def _is_beside(path: Path) -> bool:
    if path.name == MLFLOW_STORE:
        return True
    kept = (path / "choices.json").exists() or path.name.startswith(UNDER_RULES)
    return kept and not (path / "study.toml").exists()


def settings(run: RunView) -> dict[str, Any]:
    """The study as `section.key` → value."""
    return dict(flat(run.study))


def flat(tree: Mapping[str, Any], under: str = "") -> Iterable[tuple[str, Any]]:
    """Leaves of nested tables with dotted names; an empty table is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}", value


def lower_is_better(metric: str) -> bool:
    return _bare(metric).startswith(
        ("hd", "hausdorff", "loss", "volume_error", "relative_volume", "false_positive", "missed")
    )


def best_of(metric: str, values: Iterable[float]) -> float | None:
    """The value that leads; None of a signed error, which is good neither high nor low."""
    if _bare(metric) == "volume_error":
        return None
    return (min if lower_is_better(metric) else max)(values)


def _bare(metric: str) -> str:
    return metric.removeprefix("slice_").removeprefix("clean_")


def _curve(rounds: Mapping[int, list[ScoreRow]], about: Headline, split: str) -> Curve:
    entries: dict[int, ScoreEntry] = {}
    for round_ in sorted(rounds):
        labels = summarise(with_label_mean(rounds[round_]), split).get(about.model, {}).get(about.metric, {})
        if "site_mean" in (entry := labels.get(about.label, ScoreEntry())):
            entries[round_] = entry
    names = sorted({site for entry in entries.values() for site in entry["sites"]})
    sites = {name: tuple(entry["sites"].get(name, math.nan) for entry in entries.values()) for name in names}
    return Curve(tuple(entries), tuple(entry["site_mean"] for entry in entries.values()), sites)


def _toml(path: Path, folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise not_a_run(folder) from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; restore it, or repeat the run.") from None


def _json(path: Path, remedy: str) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; {remedy}.") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} does not hold a JSON object; {remedy}.")
    return found


def _check(summary: Mapping[str, Any], path: Path) -> None:
    try:
        headline, best = summary["headline"], summary["best"]
        _ = summary["method"], summary["seed"], best["round"], best["scores"].keys(), headline["sites"].keys()
        _ = headline["model"], headline["metric"], headline["label"]
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not a run's summary ({error!r}); `consilium resume` writes it again.") from None


def _event(line: bytes, number: int, path: Path) -> Mapping[str, Any]:
    try:
        return read_line(line.decode())
    except ValueError:
        raise RunError(f"{path}: line {number} is not an event; restore the file, or repeat the run.") from None
