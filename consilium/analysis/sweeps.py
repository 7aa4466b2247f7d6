"""FedSM's two dials: γ, how sure the selector must be, of one run; λ, how much a site keeps of its own, over runs.

γ costs no training: every case is predicted once by the global model and once by the model the selector likes best,
and each γ only picks one of the two.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from consilium.analysis.opening import OpenRun
from consilium.errors import RunError
from consilium.methods.routing import GRID, SuperModel
from consilium.reports.reading import RunView, settings
from consilium.site import Batch, Task

# finer where a trained selector's confidences lie: 0, 0.01, … 1, and towards 1 ten steps to every further nine
FINE_GRID = tuple(
    sorted({*GRID, *(i / 100 for i in range(101)), *(float(1 - 10.0**-k) for k in np.linspace(1, 5, 41).round(2))})
)
SPLITS = ("valid", "test")


# --------------------------------------------------------------------------------------------------- γ


@dataclass(frozen=True)
class Routed:
    """One case, predicted by both models that may answer for it."""

    site: str
    outside: bool
    split: str
    case: str
    likes: str  # the site the selector finds most probable
    sure: float  # and its probability
    by_global: float  # the headline score of the global model's prediction
    by_personal: float  # and of the liked site's personal model's

    def score(self, gamma: float) -> float:
        return self.by_personal if self.sure > gamma else self.by_global

    def choice(self, gamma: float) -> str:
        return f"personal/{self.likes}" if self.sure > gamma else "global"


@dataclass(frozen=True)
class Oracle:
    """The γ that suits an outside site's own test cases best: the paper's choice, which no one can make beforehand."""

    gamma: float
    score: float
    at_chosen: float  # the same site's score at the run's own γ
    at_zero: float


@dataclass(frozen=True)
class GammaSweep:
    """Scores and selections for every γ of a grid."""

    grid: tuple[float, ...]
    chosen: float  # the run's γ
    cases: tuple[Routed, ...]

    def of(self, split: str, outside: bool = False) -> dict[str, list[Routed]]:
        """The cases by site."""
        found: dict[str, list[Routed]] = defaultdict(list)
        for case in self.cases:
            if case.split == split and case.outside == outside:
                found[case.site].append(case)
        return dict(sorted(found.items()))

    def site_mean(self, split: str) -> tuple[float, ...]:
        """Over the sites inside, for every γ; empty without cases."""
        sites = self.of(split).values()
        means = [[_mean_at(cases, gamma) for cases in sites] for gamma in self.grid]
        return tuple(statistics.fmean(row) for row in means) if sites else ()

    def sites(self, split: str, outside: bool = False) -> dict[str, tuple[float, ...]]:
        return {
            site: tuple(_mean_at(cases, gamma) for gamma in self.grid)
            for site, cases in self.of(split, outside).items()
        }

    def selection(self, split: str, gamma: float, outside: bool = False) -> dict[str, dict[str, float]]:
        """Site → choice → share of its cases."""
        found: dict[str, dict[str, float]] = {}
        for site, cases in self.of(split, outside).items():
            choices = [case.choice(gamma) for case in cases]
            found[site] = {choice: choices.count(choice) / len(choices) for choice in sorted(set(choices))}
        return found

    @property
    def oracle_gamma(self) -> dict[str, Oracle]:
        return {site: self._oracle(cases) for site, cases in self.of("test", outside=True).items()}

    def _oracle(self, cases: Sequence[Routed]) -> Oracle:
        scores = [_mean_at(cases, gamma) for gamma in self.grid]
        best = [gamma for gamma, score in zip(self.grid, scores) if score >= max(scores) - 1e-9]
        gamma = best[(len(best) - 1) // 2]  # of several the middle one, as the calibration does
        return Oracle(gamma, _mean_at(cases, gamma), _mean_at(cases, self.chosen), _mean_at(cases, 0.0))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"chosen": self.chosen, "grid": list(self.grid)}
        for split in SPLITS:
            if mean := self.site_mean(split):
                found[split] = {
                    "site_mean": list(mean),
                    "sites": _listed(self.sites(split)),
                    "outside": _listed(self.sites(split, outside=True)),
                    "selection": {
                        f"{gamma:g}": self.selection(split, gamma) | self.selection(split, gamma, outside=True)
                        for gamma in sorted({0.0, self.chosen})
                    },
                }
        found["oracle_gamma"] = {
            site: {**vars(oracle), "selection": self.selection("test", oracle.gamma, outside=True)[site]}
            for site, oracle in self.oracle_gamma.items()
        }
        return found


def _mean_at(cases: Sequence[Routed], gamma: float) -> float:
    return statistics.fmean(case.score(gamma) for case in cases)


def _listed(sites: Mapping[str, tuple[float, ...]]) -> dict[str, list[float]]:
    return {site: list(values) for site, values in sites.items()}


def gamma_sweep(run: OpenRun, say: Callable[[str], None] = lambda _: None) -> GammaSweep:
    """Predict every validation and test case of every site with both models; γ itself then costs nothing."""
    cases: list[Routed] = []
    chosen = 0.0
    if not run.thresholded:
        raise RunError(f"{run.path} has no γ: method '{run.study.method_name}' sets no threshold. Give a run of fedsm.")
    for name in run.sites:
        worker = run.worker(name)
        model = run.super_model(worker)
        chosen = model.confidence
        say(f"global and personal models of {run.name} on {name}")
        for split in SPLITS:
            for batch in worker.site.data.whole(split, 16):
                cases += _routed(model, batch, name, name in run.guests, split)
    return GammaSweep(tuple(sorted({*FINE_GRID, chosen})), chosen, tuple(cases))


def _routed(model: SuperModel, batch: Batch, site: str, outside: bool, split: str) -> list[Routed]:
    sites = model.classes
    chances = model.chances(batch.images)
    shared = model.fallback.answer(batch.images).output
    liked = chances.argmax(1).tolist()
    own: dict[int, Tensor] = {}
    for k in sorted(set(liked)):
        members = [i for i, top in enumerate(liked) if top == k]
        own |= dict(zip(members, model.personal[sites[k]].answer(batch.images[members]).output, strict=True))
    found = []
    for i, case in enumerate(batch.cases):
        known = batch.labels_of(i)
        scores = [_headline(model.task, output, batch.truth[i], known) for output in (shared[i], own[i])]
        if all(map(math.isfinite, scores)):  # a case whose truth is empty has no score
            sure = float(chances[i, liked[i]])
            found.append(Routed(site, outside, split, case, sites[liked[i]], sure, scores[0], scores[1]))
    return found


def _headline(task: Task, output: Tensor, truth: Tensor, known: Sequence[str] | None) -> float:
    """The deciding score of a case, mean over its labels; NaN if it has none of them."""
    marks = task.score(output, truth, full=False, labels=known)
    values = [mark.value for mark in marks if mark.metric == task.headline]
    return statistics.fmean(values) if values else math.nan


# --------------------------------------------------------------------------------------------------- λ

_MAY_DIFFER = ("study.seed", "study.name", "method.pull")


@dataclass(frozen=True)
class Level:
    """A site mean over the runs of one λ; `sd` of a single run is None."""

    mean: float
    sd: float | None

    @classmethod
    def over(cls, values: Sequence[float]) -> Level:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.sd is None else f"{self.mean:.4f} ± {self.sd:.4f}"


@dataclass(frozen=True)
class Pull:
    """What one λ gave: validation of the headline model, and test scores of every model."""

    pull: float
    runs: int
    valid: Level | None
    test: Mapping[str, Level]  # model → site mean


@dataclass(frozen=True)
class LambdaSweep:
    """Runs that differ only in λ, in its order."""

    pulls: tuple[Pull, ...]
    headline: str  # the model the method is about
    metric: str
    members: int  # K

    @property
    def chosen(self) -> float | None:
        """The λ with the best validation score; of equals the first."""
        valid = [found for found in self.pulls if found.valid is not None]
        return max(valid, key=lambda found: found.valid.mean).pull if valid else None  # type: ignore[union-attr]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(model for found in self.pulls for model in found.test))

    def to_json(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "metric": self.metric,
            "chosen": self.chosen,
            "pulls": [
                {
                    "pull": found.pull,
                    "runs": found.runs,
                    "valid": None if found.valid is None else vars(found.valid),
                    "test": {model: vars(level) for model, level in found.test.items()},
                }
                for found in self.pulls
            ],
        }

    def to_markdown(self) -> str:
        head = ["λ", "runs", "validation", *(f"test, {model}" for model in self.models)]
        rule = ["---:"] * len(head)
        rows = [
            [
                f"{found.pull:g}{' (chosen)' if found.pull == self.chosen else ''}",
                str(found.runs),
                str(found.valid or "–"),
                *(str(found.test.get(model, "–")) for model in self.models),
            ]
            for found in self.pulls
        ]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def is_lambda_sweep(runs: Sequence[RunView]) -> bool:
    """Whether these runs differ in λ, and in nothing else but their seeds."""
    return len(_pulls(runs)) > 1 and not _differing(runs)


def lambda_sweep(runs: Sequence[RunView]) -> LambdaSweep:
    """Site means by λ, from the runs' summaries; no model is opened."""
    without = [run for run in runs if "method.pull" not in settings(run)]
    if without:
        raise RunError(f"{without[0].folder} has no [method] pull; a λ sweep compares runs of fedsm.")
    if differing := _differing(runs):
        raise RunError(f"a λ sweep compares runs that differ only in method.pull; these differ in {differing[0]} too.")
    by_pull = _pulls(runs)
    if len(by_pull) < 2:
        raise RunError("a λ sweep needs runs with at least two values of method.pull; give more runs.")
    about = runs[0].headline
    assert about is not None
    found = [_pull(pull, by_pull[pull], about.metric, about.label) for pull in sorted(by_pull)]
    members = len(runs[0].summary["headline"]["sites"]) if runs[0].summary else 0
    return LambdaSweep(tuple(found), about.model, about.metric, members)


def _pulls(runs: Sequence[RunView]) -> dict[float, list[RunView]]:
    found: dict[float, list[RunView]] = defaultdict(list)
    for run in runs:
        if (pull := settings(run).get("method.pull")) is not None:
            found[float(pull)].append(run)
    return found


def _differing(runs: Sequence[RunView]) -> list[str]:
    every = [settings(run) for run in runs]
    keys = dict.fromkeys(key for found in every for key in found if key not in _MAY_DIFFER)
    return [key for key in keys if any(found.get(key) != every[0].get(key) for found in every)]


def _pull(pull: float, runs: Sequence[RunView], metric: str, label: str) -> Pull:
    summaries = [run.summary for run in runs if run.summary]
    valid = [s["best"]["valid"]["site_mean"] for s in summaries if "site_mean" in s["best"].get("valid", {})]
    models = dict.fromkeys(model for s in summaries for model in s["best"]["scores"])
    test: dict[str, Level] = {}
    for model in models:
        entries = [run.entry(model, metric, label) for run in runs]
        if values := [entry["site_mean"] for entry in entries if "site_mean" in entry]:
            test[model] = Level.over(values)
    return Pull(pull, len(runs), Level.over(valid) if valid else None, test)
