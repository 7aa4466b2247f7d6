"""Algorithm 2 of FedSM: the most probable site's model answers if the selector is sure enough, else the global one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.site import Answer, Batch, Choice, OneModel, Predictor, Site, Task
from consilium.weights import SiteName, Weights

GLOBAL = "(global)"  # the selector's class of the global model; no site can be called that
GRID = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)  # of γ; 0: never global, 1: always


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
        self.route = route  # "volume": the slices of a volume go to one model; "slice": each to its own
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
    ) -> None:
        self.parts = SuperModel(task, global_, personal, selector, 0.0, home, with_global=True)

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


def calibration(predictor: Predictor, site: Site) -> tuple[tuple[float, ...], int]:
    """For every γ of the grid the sum of validation scores at this site, and the number of cases."""
    assert isinstance(predictor, SuperModel)
    sums, cases = [0.0] * len(GRID), 0
    for batch in site.data.whole("valid", site.local.batch_size):
        chances = predictor.routed(predictor.chances(batch.images), batch.volume)
        common = predictor.fallback.answer(batch.images).output
        own = common.clone()
        for top in sorted(set(chances.argmax(1).tolist())):
            members = (chances.argmax(1) == top).nonzero()[:, 0]
            own[members] = predictor.personal[predictor.classes[top]].answer(batch.images[members]).output
        for sure, *scores in _candidates(site.task, batch, chances.max(1).values, common, own, predictor.route):
            if None in scores:
                continue
            sums = [total + scores[sure > gamma] for total, gamma in zip(sums, GRID)]
            cases += 1
    return tuple(sums), cases


def _candidates(
    task: Task, batch: Batch, sure: Tensor, common: Tensor, own: Tensor, route: str
) -> Iterator[tuple[Any, ...]]:
    """How sure the selector is, and the scores of the global and the chosen personal model: by image or by volume."""
    if batch.volume and route == "volume":
        both = [_headline(task, output.transpose(0, 1), batch.truth, batch.labels_of(0)) for output in (common, own)]
        yield float(sure[0]), *both
        return
    for i in range(len(batch.images)):
        known = batch.labels_of(i)
        yield float(sure[i]), *(_headline(task, output[i], batch.truth[i], known) for output in (common, own))


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
