"""Algorithm 2 of FedSM: if the selector is certain of a site, that site's model answers, else the global model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.methods.routers import GLOBAL, Router, Routes
from consilium.predictor import Answer, ModelChoice, OneModel, Predictor
from consilium.ranges import Items, Range
from consilium.site import Count, Site
from consilium.task import Task
from consilium.tree import message
from consilium.weights import SiteName, Weights

GRID = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)  # of γ; 0: never global, 1: always

ROUTES = ("volume", "slice")  # volumes trained as slices: one model for a volume, or one per slice


class SuperModel(Predictor):
    """A global model, a personal model per site, and a selector that chooses between them."""

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
        """The selector's output; `volume`: the images are slices of one volume, routed as the study says."""
        return self.router.routes(images, volume and self.route == "volume")

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        routes = self.routes(images, volume)
        choices = [self._choice(row, outlier) for row, outlier in zip(routes.chances, routes.outliers)]
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

    def _choice(self, chances: Tensor, outlier: str) -> ModelChoice:
        top = int(chances.argmax())
        name, sure = self.classes[top], float(chances[top])
        table = {site: float(chance) for site, chance in zip(self.classes, chances)}
        if outlier:
            return ModelChoice("global", "", sure, outlier, table)
        if name == GLOBAL:
            return ModelChoice("global", "", sure, f"the selector chose the global model ({sure:.3f})", table)
        if sure > self.confidence:
            return ModelChoice("personal", name, sure, self.router.reason(name, sure, self.confidence), table)
        if self.confidence < 1:
            why = f"not sure of any site (at most {name} with {sure:.3f} <= {self.confidence:g})"
        else:
            why = f"every image goes to the global model, because γ is 1 (most like {name} with {sure:.3f})"
        return ModelChoice("global", "", sure, why, table)

    def others(self) -> Sequence[Predictor]:
        own = [self.personal[self.home]] if self.home in self.personal else []
        return (self.fallback, *own)

    def of_site(self, site: SiteName) -> Predictor:
        if site not in self.personal:
            raise StudyError(f"there is no site '{site}' in this run; its sites are {', '.join(self.personal)}.")
        return self.personal[site]


class EnsembleModel(Predictor):
    """The mean of all models' predictions, weighted by the selector's probabilities."""

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

    @property
    def passes(self) -> int:
        return 1 + len(self.parts.personal)

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        parts = self.parts
        chances = parts.routes(images, volume).chances
        outputs = [model.answer(images).output for model in (parts.fallback, *parts.personal.values())]
        tables = [{name: float(chance) for name, chance in zip(parts.classes, row)} for row in chances]
        choices = tuple(
            ModelChoice("ensemble", "", max(table.values()), "all models, weighed", table) for table in tables
        )
        return Answer(parts.task.blend(outputs, chances), choices)

    def others(self) -> Sequence[Predictor]:
        return self.parts.others()

    def of_site(self, site: SiteName) -> Predictor:
        return self.parts.of_site(site)


@dataclass(frozen=True)
class RoutedCase:
    """The scores of the two models that may answer for one image, or for one volume routed as a whole."""

    case: str
    top_site: SiteName  # the site with the highest probability
    sure: float  # its probability; −1: the image is an outlier, whatever γ is
    by_global: float  # the headline score of the global model
    by_personal: float  # the headline score of that site's personal model


@dataclass(frozen=True)
class _BothOutputs:
    """The outputs of the two models that may answer for each image of a batch; γ picks one of them."""

    top: list[int]  # by image: the class with the highest probability
    sure: list[float]  # its probability; −1: the image is an outlier
    common: Tensor  # of the global model
    own: Tensor  # of that site's personal model

    @classmethod
    def of(cls, model: SuperModel, batch: Batch) -> _BothOutputs:
        routes = model.routes(batch.images, bool(batch.volume))
        liked = routes.chances.argmax(1)
        common = model.fallback.answer(batch.images).output
        own = common.clone()
        for top in sorted(set(liked.tolist())):
            members = (liked == top).nonzero()[:, 0]
            own[members] = model.personal[model.classes[top]].answer(batch.images[members]).output
        sure = [-1.0 if outlier else float(row.max()) for row, outlier in zip(routes.chances, routes.outliers)]
        return cls(liked.tolist(), sure, common, own)

    def at(self, gamma: float) -> Tensor:
        return torch.stack(
            [own if sure > gamma else common for sure, own, common in zip(self.sure, self.own, self.common)]
        )


def score_both_models(model: SuperModel, batch: Batch, unit: str) -> Iterator[RoutedCase]:
    """Score both models on each case, so that each γ only picks one of the two; cases without a score are left out.

    A case is a slice, or with the `unit` "volume" a volume that is routed as a whole.
    """
    both = _BothOutputs.of(model, batch)
    if batch.volume and model.route == unit == "volume":
        whole = [(batch.volume, 0, both.common.transpose(0, 1), both.own.transpose(0, 1), batch.truth)]
    else:
        whole = [(case, i, both.common[i], both.own[i], batch.truth[i]) for i, case in enumerate(batch.cases)]
    for case, i, shared, personal, truth in whole:
        scores = [headline_score(model.task, output, truth, batch.labels_of(i)) for output in (shared, personal)]
        if scores[0] is not None and scores[1] is not None:
            yield RoutedCase(case, model.classes[both.top[i]], both.sure[i], scores[0], scores[1])


Scores = Annotated[tuple[Annotated[float, Range(0, 2**40)], ...], Items(1000)]  # sums over cases


def impossible_sums(sums: Scores, cases: int) -> str:
    """Why sums of scores over so many cases cannot be true; empty if they can: a score is at most 1."""
    most = cases * (1 + 1e-6)
    return "" if all(total <= most for total in sums) else f"scores of {cases} cases cannot be so large"


Gains = Annotated[tuple[Annotated[float, Range(-(2**40), 2**40)], ...], Items(1000)]  # sums over cases


@message
class Calibration:
    """A site's sums over its validation cases, for every γ of the grid."""

    cases: Count
    scores: Scores
    wholes: Count  # images, or volumes: slices of one volume are alike, so that a volume counts once
    gains: Gains  # over wholes: the score, less that of the global model
    squares: Scores  # of these gains

    def contradiction(self) -> str:
        """Why the sums cannot be true of so many cases; empty if they can: scores and gains are at most 1."""
        if not min(1, self.cases) <= self.wholes <= self.cases:
            return f"{self.cases} cases cannot be of {self.wholes} images or volumes"
        if any(max(abs(gain), square) > self.wholes * (1 + 1e-6) for gain, square in zip(self.gains, self.squares)):
            return f"gains of {self.wholes} cases cannot be so large"
        return impossible_sums(self.scores, self.cases)


NOTHING = Calibration(0, (0.0,) * len(GRID), 0, (0.0,) * len(GRID), (0.0,) * len(GRID))


def calibration(predictor: Predictor, site: Site, unit: str) -> Calibration:
    """The sums of validation scores at this site, for every γ of the grid.

    Volumes trained as slices are judged by the `unit`, "slice" or "volume", however they are routed.
    """
    assert isinstance(predictor, SuperModel)
    rows: list[Tensor] = []  # by case: its score for every γ
    gains: list[Tensor] = []  # by image or volume: the score for every γ, less that of the global model
    for batch in site.data.whole("valid", site.local.batch_size):
        found = [torch.tensor(row, dtype=torch.float64) for row in _scores_by_gamma(predictor, batch, unit)]
        rows += found
        alike = [torch.stack(found).mean(0)] if batch.volume and found else found
        gains += [scores - scores[-1] for scores in alike]
    if not rows:
        return NOTHING
    gained = torch.stack(gains)
    scores, total, squares = (
        tuple(sums.tolist()) for sums in (torch.stack(rows).sum(0), gained.sum(0), gained.square().sum(0))
    )
    return Calibration(len(rows), scores, len(gains), total, squares)


def _scores_by_gamma(model: SuperModel, batch: Batch, unit: str) -> Iterator[list[float]]:
    """For each case its score by every γ of the grid."""
    if batch.volume and (model.route, unit) == ("slice", "volume"):  # slices of one volume by several models
        both = _BothOutputs.of(model, batch)
        volumes = (both.at(gamma).transpose(0, 1) for gamma in GRID)
        marks = [headline_score(model.task, volume, batch.truth, batch.labels_of(0)) for volume in volumes]
        found = [mark for mark in marks if mark is not None]
        yield from [found] if len(found) == len(GRID) else []
        return
    for case in score_both_models(model, batch, unit):
        yield [case.by_personal if case.sure > gamma else case.by_global for gamma in GRID]


def headline_score(task: Task, output: Tensor, truth: Tensor, known: Sequence[str] | None) -> float | None:
    """The headline score of a case, mean over its labels; None if it has none of them."""
    marks = task.score(output, truth, full=False, labels=known)
    values = [mark.value for mark in marks if mark.metric == task.headline]
    return sum(values) / len(values) if values else None


def chosen_confidence(found: Sequence[Calibration], by: str, errors: float = 0.0) -> float | None:
    """The γ with the best validation score, of several the middle one; None: nobody had cases.

    By "sites" the score is the mean over sites, as the headline counts. By "pooled" it is the mean over all cases, and
    no γ comes into question whose mean over sites is below that of γ = 1, the global model for all. So by either rule
    no choice is worse over sites than γ = 1. A γ that gains less over γ = 1 than so many standard `errors` of its gain
    does not come into question either.
    """
    found = [sums for sums in found if sums.cases]
    if not found:
        return None
    scores = _rows(sums.scores for sums in found)
    marks = (scores / _rows([sums.cases] for sums in found)).mean(0)
    if by == "pooled":
        marks = scores.sum(0).masked_fill(marks < marks[-1] - 1e-9, -math.inf)
    marks = marks.masked_fill(_uncertain(found, errors), -math.inf)
    best = [gamma for gamma, mark in zip(GRID, marks.tolist()) if mark >= marks.max().item() - 1e-9]
    return best[(len(best) - 1) // 2]


def _uncertain(found: Sequence[Calibration], errors: float) -> Tensor:
    """For every γ of the grid: does it gain less over the global model than so many standard errors of its gain?

    The gain is the mean over sites. Its error comes from the spread of cases inside sites, which all sites share, so
    that a site with one case is uncertain too. Where every site has a single case, the spread is that of all cases.
    """
    counts = _rows([sums.wholes] for sums in found)
    gains, squares = _rows(sums.gains for sums in found), _rows(sums.squares for sums in found)
    means, n, sites = gains / counts, counts.sum().item(), len(found)
    if n > sites:
        spread = (squares - counts * means.square()).sum(0) / (n - sites)
    else:
        spread = (squares.sum(0) - gains.sum(0).square() / n) / max(1, n - 1)
    error = (spread.clamp_min(0.0) * (1 / counts).sum()).sqrt() / sites
    doubtful = means.mean(0) < errors * error - 1e-9
    doubtful[-1] = False  # γ = 1 is the global model itself
    return doubtful


def _rows(sums: Iterable[Sequence[float]]) -> Tensor:
    return torch.tensor([list(row) for row in sums], dtype=torch.float64)
