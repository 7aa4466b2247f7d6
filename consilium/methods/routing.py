"""Algorithm 2 of FedSM: the most probable site's model answers if the selector is sure enough, else the global one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.site import Answer, Batch, Choice, OneModel, Predictor, Site, Task
from consilium.weights import SiteName, Weights

GLOBAL = "(global)"  # the selector's class of the global model; no site can be called that
GRID = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)  # of γ; 0: never global, 1: always

ROUTES = ("volume", "slice")  # of a volume trained as slices: one model for all, or each slice its own


class SuperModel(Predictor):
    """A global model, a personal model per site, and the selector between them."""

    model, of, when = "super", "", "merged"

    def __init__(
        self,
        task: Task,
        global_: Weights,
        personal: Mapping[SiteName, Weights],
        selector: Weights,
        confidence: float,
        home: SiteName,
        with_global: bool = False,
        route: str = "volume",
    ) -> None:
        self.route = route
        self.task, self.selector, self.confidence, self.home = task, selector, confidence, home
        self.classes = [*([GLOBAL] if with_global else []), *personal]  # FedSM-extra's selector knows the global model
        self.fallback = OneModel(task, global_, "global")
        self.personal = {name: OneModel(task, weights, "personal", name) for name, weights in personal.items()}

    def chances(self, images: Tensor) -> Tensor:
        """The selector's probabilities, (batch, sites)."""
        return self.task.infer(self.selector, images, "selector", labels=self.classes).softmax(1)

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        choices = [self._choice(row) for row in self.routed(self.chances(images), volume)]
        groups: dict[str, list[int]] = {}
        for i, choice in enumerate(choices):
            groups.setdefault(choice.of, []).append(i)
        output: Tensor | None = None
        for of, members in groups.items():
            model = self.personal[of] if of else self.fallback
            part = model.answer(images[members]).output
            output = part.new_empty((len(images), *part.shape[1:])) if output is None else output
            output[members] = part
        assert output is not None
        return Answer(output, tuple(choices))

    def routed(self, chances: Tensor, volume: bool) -> Tensor:
        """The probabilities that decide: of a volume routed as one, the mean over its slices."""
        return chances.mean(0, keepdim=True).expand_as(chances) if volume and self.route == "volume" else chances

    def _choice(self, chances: Tensor) -> Choice:
        top = int(chances.argmax())
        name, sure = self.classes[top], float(chances[top])
        table = {site: float(chance) for site, chance in zip(self.classes, chances)}
        if name == GLOBAL:
            return Choice("global", "", sure, f"the selector chose the global model ({sure:.3f})", table)
        if sure > self.confidence:
            return Choice("personal", name, sure, f"most like {name} ({sure:.3f} > {self.confidence:g})", table)
        why = f"not sure of any site (at most {name} with {sure:.3f} <= {self.confidence:g})"
        return Choice("global", "", sure, why, table)

    def others(self) -> Sequence[Predictor]:
        own = [self.personal[self.home]] if self.home in self.personal else []
        return (self.fallback, *own)

    def of_site(self, site: SiteName) -> Predictor:
        if site not in self.personal:
            raise StudyError(f"there is no site '{site}' in this run; its sites are {', '.join(self.personal)}.")
        return self.personal[site]


class EnsembleModel(Predictor):
    """All models answer, averaged by the selector's probabilities."""

    model, of, when = "ensemble", "", "merged"

    def __init__(
        self,
        task: Task,
        global_: Weights,
        personal: Mapping[SiteName, Weights],
        selector: Weights,
        home: SiteName,
        route: str = "volume",
    ) -> None:
        self.parts = SuperModel(task, global_, personal, selector, 0.0, home, with_global=True, route=route)

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        parts = self.parts
        chances = parts.routed(parts.chances(images), volume)
        outputs = [model.answer(images).output for model in (parts.fallback, *parts.personal.values())]
        tables = [{name: float(chance) for name, chance in zip(parts.classes, row)} for row in chances]
        choices = tuple(Choice("ensemble", "", max(table.values()), "all models, weighed", table) for table in tables)
        return Answer(parts.task.blend(outputs, chances), choices)

    def others(self) -> Sequence[Predictor]:
        return self.parts.others()

    def of_site(self, site: SiteName) -> Predictor:
        return self.parts.of_site(site)


@dataclass(frozen=True)
class BothWays:
    """One image, or one volume routed as a whole, by both models that may answer for it."""

    case: str
    likes: SiteName  # the site the selector finds most probable
    sure: float  # and its probability
    by_global: float  # the deciding score of the global model's answer
    by_personal: float  # and of the liked site's personal model's


def both_ways(model: SuperModel, batch: Batch) -> Iterator[BothWays]:
    """Every γ then only picks one of the two answers; a case whose truth is empty has no score and is left out."""
    chances = model.routed(model.chances(batch.images), bool(batch.volume))
    liked = chances.argmax(1)
    common = model.fallback.answer(batch.images).output
    own = common.clone()
    for top in sorted(set(liked.tolist())):
        members = (liked == top).nonzero()[:, 0]
        own[members] = model.personal[model.classes[top]].answer(batch.images[members]).output
    if batch.volume and model.route == "volume":
        whole = [(batch.volume, 0, common.transpose(0, 1), own.transpose(0, 1), batch.truth)]
    else:
        whole = [(case, i, common[i], own[i], batch.truth[i]) for i, case in enumerate(batch.cases)]
    for case, i, shared, personal, truth in whole:
        scores = [_headline(model.task, output, truth, batch.labels_of(i)) for output in (shared, personal)]
        if scores[0] is not None and scores[1] is not None:
            yield BothWays(case, model.classes[int(liked[i])], float(chances[i].max()), scores[0], scores[1])


def calibration(predictor: Predictor, site: Site) -> tuple[tuple[float, ...], int]:
    """For every γ of the grid the sum of validation scores at this site, and the number of cases."""
    assert isinstance(predictor, SuperModel)
    sums, cases = [0.0] * len(GRID), 0
    for batch in site.data.whole("valid", site.local.batch_size):
        for case in both_ways(predictor, batch):
            sums = [
                sum_ + (case.by_personal if case.sure > gamma else case.by_global) for sum_, gamma in zip(sums, GRID)
            ]
            cases += 1
    return tuple(sums), cases


def _headline(task: Task, output: Tensor, truth: Tensor, known: Sequence[str] | None) -> float | None:
    """The deciding score of a case, mean over its labels; None if it has none of them."""
    marks = task.score(output, truth, full=False, labels=known)
    values = [mark.value for mark in marks if mark.metric == task.headline]
    return sum(values) / len(values) if values else None


def chosen_confidence(tallies: Sequence[tuple[Sequence[float], int]]) -> float | None:
    """The γ with the best pooled validation score; of several, the middle one. None: nobody had validation cases."""
    tallies = [(scores, cases) for scores, cases in tallies if cases]
    if not tallies:
        return None
    totals = torch.tensor([scores for scores, _ in tallies], dtype=torch.float64).sum(0)
    best = [gamma for gamma, total in zip(GRID, totals.tolist()) if total >= totals.max().item() - 1e-9]
    return best[(len(best) - 1) // 2]
