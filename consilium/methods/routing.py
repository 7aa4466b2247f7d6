"""Algorithm 2 of FedSM: the most probable site's model answers if the selector is sure enough, else the global one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.site import Answer, Choice, OneModel, Predictor, Site, Task
from consilium.weights import SiteName, Weights

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
    ) -> None:
        self.task, self.selector, self.confidence, self.home = task, selector, confidence, home
        self.fallback = OneModel(task, global_, "global")
        self.personal = {name: OneModel(task, weights, "personal", name) for name, weights in personal.items()}

    def chances(self, images: Tensor) -> Tensor:
        """The selector's probabilities, (batch, sites)."""
        return self.task.infer(self.selector, images, "selector", labels=list(self.personal)).softmax(1)

    def answer(self, images: Tensor) -> Answer:
        choices = [self._choice(row) for row in self.chances(images)]
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

    def _choice(self, chances: Tensor) -> Choice:
        sites = list(self.personal)
        top = int(chances.argmax())
        sure = float(chances[top])
        table = {site: float(chance) for site, chance in zip(sites, chances)}
        if sure > self.confidence:
            why = f"most like {sites[top]} ({sure:.3f} > {self.confidence:g})"
            return Choice("personal", sites[top], sure, why, table)
        why = f"not sure of any site (at most {sites[top]} with {sure:.3f} <= {self.confidence:g})"
        return Choice("global", "", sure, why, table)

    def others(self) -> Sequence[Predictor]:
        own = [self.personal[self.home]] if self.home in self.personal else []
        return (self.fallback, *own)

    def of_site(self, site: SiteName) -> Predictor:
        if site not in self.personal:
            raise StudyError(f"there is no site '{site}' in this run; its sites are {', '.join(self.personal)}.")
        return self.personal[site]


def calibration(predictor: Predictor, site: Site) -> tuple[tuple[float, ...], int]:
    """For every γ of the grid the sum of validation scores at this site, and the number of cases."""
    assert isinstance(predictor, SuperModel)
    sums, cases = [0.0] * len(GRID), 0
    for batch in site.data.whole("valid", site.local.batch_size):
        chances = predictor.chances(batch.images)
        common = predictor.fallback.answer(batch.images).output
        for i, row in enumerate(chances):
            own = list(predictor.personal.values())[int(row.argmax())]
            scores = [
                _headline(site.task, output, batch.truth[i])
                for output in (common[i], own.answer(batch.images[i : i + 1]).output[0])
            ]
            if None in scores:
                continue
            sums = [total + scores[float(row.max()) > gamma] for total, gamma in zip(sums, GRID)]  # type: ignore[operator]
            cases += 1
    return tuple(sums), cases


def _headline(task: Task, output: Tensor, truth: Tensor) -> float | None:
    """The deciding score of a case, mean over its labels; None if it has none of them."""
    values = [mark.value for mark in task.score(output, truth, full=False) if mark.metric == task.headline]
    return sum(values) / len(values) if values else None


def chosen_confidence(tallies: Sequence[tuple[Sequence[float], int]]) -> float | None:
    """The γ with the best pooled validation score; of several, the middle one. None: nobody had validation cases."""
    tallies = [(scores, cases) for scores, cases in tallies if cases]
    if not tallies:
        return None
    totals = torch.tensor([scores for scores, _ in tallies], dtype=torch.float64).sum(0)
    best = [gamma for gamma, total in zip(GRID, totals.tolist()) if total >= totals.max().item() - 1e-9]
    return best[(len(best) - 1) // 2]
