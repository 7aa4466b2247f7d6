"""The models a run gives to a hospital outside: what the bundles are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from consilium import tree
from consilium.methods.site_models import SiteModels
from consilium.predictor import OneModel, Predictor, WithOthers
from consilium.study import Study
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class Model:
    """One network's weights, and whose they are."""

    kind: str  # "global", "personal", "local", "pooled"
    of: SiteName  # empty: nobody's own
    weights: Weights

    @property
    def name(self) -> str:
        """Of its folder."""
        return "_".join(part.replace("/", "_") for part in (self.kind, self.of) if part)


@dataclass(frozen=True)
class Released:
    """What a hospital outside the federation gets, and what it can do with it."""

    message: Any  # the method's Release
    predictor: Predictor
    models: tuple[Model, ...]
    parts: tuple[str, ...]  # weights that are not a whole model, such as a selector


def released(study: Study, server: Any) -> Released:
    """The release of a server state, on the CPU; a method without one for outsiders says so (NotForOutsiders)."""
    message = study.method.release(server, None)
    task = study.task.on("cpu")
    predictor = study.method.deploy(task, None, message)
    models, parts = [], []
    for path, weights in tree.split(message).weights.items():
        if _is_plain(predictor) and _is_whole(weights, task):
            kind, _, of = path.partition("/")
            models.append(Model(kind, of, weights))
        else:
            parts.append(path)
    return Released(message, predictor, tuple(models), tuple(parts))


def whole_models(predictor: Predictor) -> tuple[Model, ...]:
    """The networks a predictor answers with; one that mixes answers is not among them, its parts are."""
    found: dict[str, Model] = {}
    for part in (predictor, *predictor.others()):
        first = part.first if isinstance(part, WithOthers) else part
        if isinstance(first, OneModel) and first.plain:
            model = Model(first.model, first.of, first.weights)
            found.setdefault(model.name, model)
    return tuple(found.values())


def _is_plain(predictor: Predictor) -> bool:
    """Whether a network alone answers as the predictor does; some methods change it, or what becomes of its output."""
    first = predictor.first if isinstance(predictor, WithOthers) else predictor
    return not isinstance(first, SiteModels) and not (isinstance(first, OneModel) and not first.plain)


def _is_whole(weights: Weights, task: Task) -> bool:
    """The weights are those of the task's network: the same names and shapes."""
    expected = task.shape()
    return list(weights) == list(expected) and all(weights[k].shape == expected[k].shape for k in expected)
