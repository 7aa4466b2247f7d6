"""Scores a finished model on labelled cases, old or new, with intervals for each site."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.cases import Cases
from consilium.data.site_folder import SPLITS, Federation, read_federation
from consilium.errors import DataError, StudyError
from consilium.predictor import Predictor, most_common
from consilium.scores.classes import ClassReport, class_report
from consilium.scores.rows import bounds_of
from consilium.scores.statistics import interval
from consilium.site_opening import open_arrays
from consilium.study import Study
from consilium.task import CaseScore
from consilium.training_cases import Seen, seen_cases

COUNTED = ("empty", "missed")  # counts of cases, not scores


@dataclass(frozen=True)
class ScoredCase:
    """One case: its scores, and in classification the true class and the probabilities."""

    site: str
    case: str
    model: str  # that answered
    scores: tuple[CaseScore, ...]
    truth: int | None = None
    chances: tuple[float, ...] = ()


@dataclass(frozen=True)
class SiteScore:
    """A score's mean over some cases, with its 95 % interval, which one case does not have."""

    mean: float
    low: float | None
    high: float | None
    cases: int


@dataclass(frozen=True)
class EvaluatedScore:
    """One score of one label: site by site, the mean of the sites, the mean of all cases."""

    metric: str
    label: str
    sites: dict[str, SiteScore]
    site_mean: SiteScore
    pooled: float

    def to_json(self) -> dict[str, Any]:
        sites = {site: vars(found) for site, found in self.sites.items()}
        facts = {"metric": self.metric, "label": self.label, "sites": sites}
        return {**facts, "site_mean": vars(self.site_mean), "pooled": self.pooled}


@dataclass(frozen=True)
class Evaluation:
    """All scores of a model on a federation's cases."""

    federation: str
    split: str
    cases: tuple[ScoredCase, ...]
    scores: tuple[EvaluatedScore, ...]
    classes: dict[str, ClassReport]  # by site, and "" of all cases; {} in segmentation
    seen: Seen = field(default_factory=Seen)  # by the model in its training

    @property
    def warning(self) -> str:
        return self.seen.warning(len(self.cases))

    def to_json(self) -> dict[str, Any]:
        return {
            "federation": self.federation,
            "split": self.split,
            "scores": [score.to_json() for score in self.scores],
            "classes": {site or "all": report.to_json() for site, report in self.classes.items()},
            "seen_in_training": list(self.seen.cases),
            "changed_since_training": list(self.seen.changed),
            "cases": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per case, label and score."""
        seen = frozenset(self.seen.cases)
        return [
            {
                **{"site": one.site, "case": one.case, "label": score.label, "metric": score.metric},
                **{"value": score.value, "model": one.model, "seen": f"{one.site}/{one.case}" in seen},
            }
            for one in self.cases
            for score in one.scores
        ]


def evaluate_on(
    study: Study, predictor: Predictor, federation: Path, split: str = "test", run: Path | None = None
) -> Evaluation:
    """Score a model on every labelled case of a split.

    Args:
        federation: a folder of site folders with the study's labels.
        split: "train", "valid", "test", or "all".
        run: the model's run folder, which tells what cases the model has seen.
    """
    cases = tuple(scored_cases(study, predictor, federation, split))
    if not cases:
        held = f"no labelled {split} case" if split != "all" else "no labelled case"
        raise DataError(
            f"{federation} has {held}; name another --split, or draw splits with `consilium check --split`."
        )
    scores = tuple(averaged(cases))
    classes = _classes(cases, study.facts.labels)
    names, splits = {f"{one.site}/{one.case}" for one in cases}, SPLITS if split == "all" else (split,)
    seen = seen_cases(study, run, predictor.of, read_federation(federation), splits, names) if run else Seen()
    return Evaluation(str(federation), split, cases, scores, classes, seen)


def scored_cases(study: Study, predictor: Predictor, federation: Path, split: str) -> Iterator[ScoredCase]:
    """The scores of every case of every site."""
    if split not in (*SPLITS, "all"):
        raise StudyError(f"split = {split!r}: it must be one of {', '.join(SPLITS)}, all.")
    found = read_federation(federation)
    _refuse_others(study, found)
    own = replace(study, data=replace(study.data, federation=str(federation.resolve()), annotated={}))
    task, sliced = own.task.on("cpu"), bool(own.preprocess.slices)
    for name in found.sites:
        data = Cases((open_arrays(own, found, name),), (), own.task_fields.patch, sliced)
        for part in SPLITS if split == "all" else (split,):
            for batch in data.whole(part, 8):
                answer = predictor.answer(batch.images, bool(batch.volume))
                if batch.volume:
                    whole = [(batch.volume, answer.output.transpose(0, 1), batch.truth)]
                else:
                    whole = list(zip(batch.cases, answer.output, batch.truth, strict=True))
                for i, (case, output, truth) in enumerate(whole):
                    marks = task.score(output, truth, True, batch.labels_of(i), batch.spacing_of(i))
                    key = (most_common(answer.choices) if batch.volume else answer.choices[i]).key
                    if study.facts.task == "classification":
                        chances = tuple(float(p) for p in output.softmax(0))
                        yield ScoredCase(name, case, key, tuple(marks), int(truth), chances)
                    else:
                        yield ScoredCase(name, case, key, tuple(marks))


def _refuse_others(study: Study, found: Federation) -> None:
    """Reject a federation with other labels or another kind of images (StudyError)."""
    for what, ours, theirs in (
        ("task", study.facts.task, found.task),
        ("labels", list(study.facts.labels), list(found.labels)),
        ("dimensions", study.facts.dimensions, found.dimensions),
        ("channels", study.facts.channels, found.channels),
    ):
        if ours != theirs:
            raise DataError(
                f"{found.folder / 'federation.toml'} says {what} = {theirs}, the model was trained with {ours}; "
                "give it the model's, and its masks the model's values."
            )


def averaged(cases: Sequence[ScoredCase]) -> Iterator[EvaluatedScore]:
    """Every score of every label; of several labels also their mean in each case."""
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in cases:
        by_metric: dict[str, list[float]] = defaultdict(list)
        for score in one.scores:
            values[score.metric, score.label][one.site].append(score.value)
            by_metric[score.metric].append(score.value)
        for metric, found in by_metric.items():
            values[metric, "mean"][one.site].append(statistics.fmean(found))
    labels = {label for _, label in values} - {"mean"}
    for (metric, label), sites in values.items():
        if metric.endswith(COUNTED) or (label == "mean" and len(labels) < 2):
            continue
        bounds = bounds_of(metric)
        per_site = {site: _site_score({site: found}, bounds) for site, found in sites.items()}
        pooled = statistics.fmean(value for found in sites.values() for value in found)
        yield EvaluatedScore(metric, label, per_site, _site_score(sites, bounds), pooled)


def _site_score(sites: dict[str, list[float]], bounds: tuple[float, float]) -> SiteScore:
    cases = sum(map(len, sites.values()))
    low, high = interval(sites, within=bounds) if cases > 1 else (None, None)
    mean = statistics.fmean(statistics.fmean(found) for found in sites.values())
    return SiteScore(mean, low, high, cases)


def _classes(cases: Sequence[ScoredCase], labels: Sequence[str]) -> dict[str, ClassReport]:
    told = [one for one in cases if one.truth is not None]
    groups = {"": told, **{site: [one for one in told if one.site == site] for site in {one.site for one in told}}}
    return {
        site: class_report([int(one.truth or 0) for one in found], np.array([one.chances for one in found]), labels)
        for site, found in sorted(groups.items())
        if found
    }
