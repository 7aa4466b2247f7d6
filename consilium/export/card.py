"""What a model card says, as facts: what the models were trained on, how well they do where, how they are chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from consilium import __version__
from consilium.describe import describe_all
from consilium.export.models import Model, Released
from consilium.methods import METHODS
from consilium.reports.reading import RunView
from consilium.scores.means import MEAN, ByCase
from consilium.scores.rows import EMPTY, ScoreRow, bounds_of
from consilium.scores.statistics import interval
from consilium.scores.views import by_case, matrix, selection
from consilium.study import Study

Facts = dict[str, Any]


def facts(study: Study, view: RunView, out: Released, onnx: bool) -> Facts:
    """Everything the card says, as JSON; no case, path or machine in it."""
    assert view.summary is not None
    rows = view.best_rows
    metric = study.task.headline
    models = sorted({row.model for row in rows if row.metric == metric}, key=lambda m: (m != study.method.headline, m))
    return {
        "name": study.name,
        "hash": study.hash,
        "headline": study.method.headline,  # the model the method is about
        "released": out.predictor.model,  # the model an outside hospital gets
        "exported_by": f"consilium {__version__}",
        "method": _method(study),
        "task": {
            **study.tables()["facts"],
            "network": study.tables()["task"],
            "preprocess": study.tables()["preprocess"],
        },
        "training": _training(study, view),
        "metric": metric,
        "scores": {model: _scores(rows, model, metric, study) for model in models},
        "away": {m: table for m in models if (table := _elsewhere(matrix(rows, m, metric, MEAN, "test")))},
        "selector": _selector(rows, out),
        "models": [{"name": m.name, "kind": m.kind, "of": m.of, "numbers": m.weights.numel()} for m in out.models],
        "parts": list(out.parts),
        "onnx": onnx,
        "batchnorm": study.local.batchnorm,
    }


def about(model: Model) -> str:
    """One sentence for a bundle."""
    whose = {
        "global": "The model shared by all sites",
        "pooled": "A model trained on all sites' cases in one place",
    }
    return f"{whose.get(model.kind, f'The {model.kind} model')}{f' of site {model.of}' if model.of else ''}."


def own_scores(facts: Facts, model: Model) -> dict[str, float]:
    """A model's test scores by site, where it was scored: an owned model at home, another everywhere."""
    sites = facts["scores"].get(model.kind, {}).get(MEAN, {}).get("sites", {})
    return {f"{facts['metric']} at {s}": cell["value"] for s, cell in sites.items() if model.of in ("", s)}


# ---------------------------------------------------------------------------------------------- gathering


def _method(study: Study) -> Facts:
    known = describe_all([study.method_name])[0] if study.method_name in METHODS else {}
    return {
        "name": study.method_name,
        "about": known.get("about", ""),
        "paper": study.method.paper,
        "differences": list(study.method.differences),
        "fields": study.tables()["method"],
    }


def _training(study: Study, view: RunView) -> Facts:
    times = [str(event["time"]) for event in view.events if "time" in event]
    origin = view.origin
    assert view.summary is not None
    sliced = bool(study.preprocess.slices)
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in view.best_rows:
        if not sliced or row.metric in (study.task.headline, EMPTY):  # other rows may be of single slices
            seen[row.site, row.split].add(row.case)
    sites = {}
    for name, known in origin.get("sites", {}).items():
        guest = name in study.plan.leave_out
        counts = {split: len(seen[name, split] - {""}) for split in ("valid", "test")}
        sites[name] = {
            "train": 0 if guest else known.get("n", 0), **counts,
            "unlabelled": known.get("unlabelled", 0) if study.method.unlabelled and not guest else 0,
            "labels": list(known.get("labels", study.facts.labels)), "guest": guest,
        }  # fmt: skip
    return {
        "sites": sites,
        "unit": "slices" if sliced else "cases",  # of the training
        "rounds": study.plan.rounds,
        "best_round": view.summary["best"]["round"],
        "best_rounds": view.summary["best"].get("rounds", {}),
        "seed": study.plan.seed,
        "local": study.tables()["local"],
        "augment": list(study.task_fields.augment),
        "begun": min(times, default="")[:10],
        "finished": max(times, default="")[:10],
        "versions": origin.get("versions", {}),
        "distribution": origin.get("distribution"),
        "commit": origin.get("commit", ""),
    }


def _scores(rows: Sequence[ScoreRow], model: str, metric: str, study: Study) -> Facts:
    """Label → sites, guests and site mean, each with a 95 % interval."""
    inside = [row for row in rows if not row.outside]
    outside = [replace(row, outside=False) for row in rows if row.outside]
    labels = [MEAN, *study.facts.labels] if len(study.facts.labels) > 1 else [MEAN]
    found, bounds = {}, bounds_of(metric)
    for label in labels:
        here, there = (by_case(part, model, metric, label, "test") for part in (inside, outside))
        if here or there:
            found[label] = {
                "sites": _cells(here, bounds),
                "guests": _cells(there, bounds),
                **({"site_mean": _mean(here, bounds)} if here else {}),
            }
    return found


def _elsewhere(table: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    """Owner → site → score; empty if every model was scored at home only."""
    return table if any(site != owner for owner, row in table.items() for site in row) else {}


def _cells(values: ByCase, bounds: tuple[float, float]) -> Facts:
    return {site: {**_mean({site: cases}, bounds), "cases": len(cases)} for site, cases in values.items()}


def _mean(values: ByCase, bounds: tuple[float, float]) -> Facts:
    low, high = interval(values, within=bounds)
    means = [sum(found.values()) / len(found) for found in values.values()]
    return {"value": sum(means) / len(means), "low": low, "high": high}


def _selector(rows: Sequence[ScoreRow], out: Released) -> Facts:
    """How often each model was chosen on test cases; empty without a selector."""
    chosen = selection(rows, "test")
    if not chosen:
        return {}
    routed: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.metric == "routed" and row.split == "test":
            routed[row.site].append(row.value)
    return {
        "confidence": getattr(out.message, "confidence", None),
        "outliers": bool(getattr(getattr(out.message, "discriminant", None), "limits", None)),
        "chosen": chosen,
        "routed": {site: sum(found) / len(found) for site, found in sorted(routed.items())},
    }
