"""Algorithm 2 of FedSM: the most probable site's model answers if the selector is sure enough, else the global one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from consilium.errors import StudyError, UserError
from consilium.learning.discriminant import Discriminant, Space, probabilities
from consilium.site import Answer, Batch, Choice, OneModel, Predictor, Site, Task
from consilium.tasks.inference import on_bench
from consilium.weights import SiteName, Weights

GLOBAL = "(global)"  # the selector's class of the global model; no site can be called that
GRID = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)  # of γ; 0: never global, 1: always

ROUTES = ("volume", "slice")  # of a volume trained as slices: one model for all, or each slice its own


NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@dataclass(frozen=True)
class Routes:
    """What a selector says of a batch of images."""

    chances: Tensor  # (batch, classes)
    unlike: tuple[str, ...]  # by image: why it is like none of the classes; empty: it is like one


class Router(ABC):
    """A selector in use."""

    classes: list[str]  # the sites it can name, and perhaps the global model

    @abstractmethod
    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        """For every image; `whole`: they are slices of one volume that is routed as one."""

    @abstractmethod
    def seen(self, images: Tensor) -> Tensor:
        """The features it decides by, (batch, features)."""


class NetworkRouter(Router):
    """A trained network with one output per class."""

    def __init__(self, task: Task, weights: Weights, classes: Sequence[str]) -> None:
        self.task, self.weights, self.classes = task, weights, list(classes)

    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        chances = self.task.infer(self.weights, images, "selector", labels=self.classes).softmax(1)
        if whole:  # the mean over slices
            chances = chances.mean(0, keepdim=True).expand_as(chances)
        return Routes(chances, ("",) * len(images))

    def seen(self, images: Tensor) -> Tensor:
        return penultimate(on_bench(self.task, self.weights, "selector", self.classes), images.to(self.task.device))


class DiscriminantRouter(Router):
    """A linear discriminant on the features of a model; it also knows how far an image is from every site."""

    def __init__(self, task: Task, weights: Weights, found: Discriminant) -> None:
        self.task, self.weights, self.found = task, weights, found
        self.classes, self.space = found.sites, Space(found)

    def routes(self, images: Tensor, whole: bool = False) -> Routes:
        features = self.task.features(self.weights, images)
        if whole:
            features = features.mean(0, keepdim=True).expand_as(features)
        squared = self.space.squared(features)
        return Routes(probabilities(squared, self.found.temperature).float(), tuple(map(self._unlike, squared.sqrt())))

    def seen(self, images: Tensor) -> Tensor:
        return self.space.whitened(self.task.features(self.weights, images), self.found.shrinkage)

    def _unlike(self, distances: Tensor) -> str:
        """Why an image with these distances to the sites is like none of them; empty if it is near one."""
        limits = [self.found.limits.get(site, math.inf) for site in self.classes]
        if any(distance <= limit for distance, limit in zip(distances.tolist(), limits)):
            return ""
        near = int(distances.argmin())
        many = NUMBERS[len(limits)] if len(limits) < len(NUMBERS) else len(limits)
        gap = f"distance {float(distances[near]):.3g} > {limits[near]:.3g}"
        return f"unlike all {many} sites (nearest {self.classes[near]}, {gap})"


def penultimate(network: nn.Module, images: Tensor) -> Tensor:
    """The input of the network's last linear layer, (batch, features), on the CPU."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError("the selector has no linear layer, so it has no last hidden features to show.")
    caught: list[Tensor] = []
    hook = linear[-1].register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach().cpu()))
    try:
        with torch.no_grad():
            network(images)
    finally:
        hook.remove()
    return caught[-1].flatten(1)


class SuperModel(Predictor):
    """A global model, a personal model per site, and the selector between them."""

    model, of, when = "super", "", "merged"

    def __init__(
        self,
        task: Task,
        global_: Weights,
        personal: Mapping[SiteName, Weights],
        router: Router,
        confidence: float,
        home: SiteName,
        route: str = "volume",
    ) -> None:
        self.route = route
        self.task, self.router, self.confidence, self.home = task, router, confidence, home
        self.fallback = OneModel(task, global_, "global")
        self.personal = {name: OneModel(task, weights, "personal", name) for name, weights in personal.items()}

    @property
    def classes(self) -> list[str]:
        return self.router.classes

    def routes(self, images: Tensor, volume: bool = False) -> Routes:
        """What the selector says; `volume`: the images are slices of one, routed as the study asks."""
        return self.router.routes(images, volume and self.route == "volume")

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        routes = self.routes(images, volume)
        choices = [self._choice(row, unlike) for row, unlike in zip(routes.chances, routes.unlike)]
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

    def _choice(self, chances: Tensor, unlike: str) -> Choice:
        top = int(chances.argmax())
        name, sure = self.classes[top], float(chances[top])
        table = {site: float(chance) for site, chance in zip(self.classes, chances)}
        if unlike:
            return Choice("global", "", sure, unlike, table)
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
        router: Router,
        home: SiteName,
        route: str = "volume",
    ) -> None:
        self.parts = SuperModel(task, global_, personal, router, 0.0, home, route)

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        parts = self.parts
        chances = parts.routes(images, volume).chances
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
    sure: float  # and its probability; −1: the image is unlike every site, whatever γ is
    by_global: float  # the deciding score of the global model's answer
    by_personal: float  # and of the liked site's personal model's


def both_ways(model: SuperModel, batch: Batch) -> Iterator[BothWays]:
    """Every γ then only picks one of the two answers; a case whose truth is empty has no score and is left out."""
    routes = model.routes(batch.images, bool(batch.volume))
    liked = routes.chances.argmax(1)
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
            sure = -1.0 if routes.unlike[i] else float(routes.chances[i].max())
            yield BothWays(case, model.classes[int(liked[i])], sure, scores[0], scores[1])


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
    """The γ with the best pooled validation score; of several, the middle one. None: nobody had validation cases.

    Only a γ whose mean over sites is not below that of γ = 1, the global model for all, comes into question.
    """
    tallies = [(scores, cases) for scores, cases in tallies if cases]
    if not tallies:
        return None
    sums = torch.tensor([scores for scores, _ in tallies], dtype=torch.float64)
    counts = torch.tensor([cases for _, cases in tallies], dtype=torch.float64)
    means = (sums / counts[:, None]).mean(0)
    totals = sums.sum(0).masked_fill(means < means[-1] - 1e-9, -math.inf)
    best = [gamma for gamma, total in zip(GRID, totals.tolist()) if total >= totals.max().item() - 1e-9]
    return best[(len(best) - 1) // 2]
