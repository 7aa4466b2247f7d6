"""Tools of the suite tests: suite files on the toy federation, and runs that take no time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from consilium.files import write_json
from consilium.run_folder import RunFolder
from consilium.scores.rows import ScoreRow
from consilium.scores.summary import run_summary
from consilium.simulation import Result
from consilium.study import Study

Scores = Mapping[str, list[float]]  # site → a value per case

BASE = """
[base.study]
name = "toy"
rounds = 2
score_every = 2
[base.data]
federation = "{federation}"
[base.task]
widths = [4, 8]
residual_units = 0
selector_widths = [4, 8]
[base.local]
batch_size = 8
lr = 0.01
"""


def write_suite(folder: Path, federation: Path, head: str, rest: str = "") -> Path:
    """A suite file; `head` is what stands below [suite] beside its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "suite.toml"
    path.write_text(f'[suite]\nname = "toys"\n{head}\n{BASE.format(federation=federation)}\n{rest}', encoding="utf-8")
    return path


class Teller:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, text: str) -> None:
        self.words.append(text)

    def show(self, event: Mapping[str, Any]) -> None: ...


class FakeRuns:
    """Stands for `consilium.simulation`: a run is finished at once with the scores a function gives it."""

    def __init__(self, scores: Callable[[Study], tuple[Scores, Scores]], metric: str = "dice") -> None:
        self.scores = scores  # of a study: validation, test
        self.metric = metric
        self.made: list[Study] = []

    def run(self, study: Study, runs: Path, **how: Any) -> Result:
        self.made.append(study)
        valid, test = self.scores(study)
        folder = RunFolder.create(study, runs)
        model = study.method.headline
        rows = [
            ScoreRow(2, "best", model, "", "merged", site, False, split, f"{split}{i}", "blob", self.metric, value)
            for split, sites in (("valid", valid), ("test", test))
            for site, values in sites.items()
            for i, value in enumerate(values)
        ]
        rows = self.rows(study, rows)
        folder.add_scores(rows)
        facts = {"best_rows": rows, "last_rows": rows, "best_round": 2, "last_round": 2, "all_rows": rows}
        cost: dict[str, Any] = {"seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "peak_memory_mb": 1.0}
        about: dict[str, Any] = {"method": study.method_name, "seed": study.plan.seed, "rounds": 2}
        summary = run_summary(**about, headline_model=model, headline_metric=self.metric, **facts, **cost)  # type: ignore[arg-type]
        write_json(summary, folder.path / "summary.json")
        return Result(folder.path, summary)

    def rows(self, study: Study, rows: list[ScoreRow]) -> list[ScoreRow]:
        """What a test adds to the scores."""
        return rows

    def resume(self, path: Path, **how: Any) -> Result:
        return self.run(RunFolder.open(path).study, path.parent)
