"""Models for prediction: their outputs, and which model gave them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from consilium.errors import StudyError
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class ModelChoice:
    """Which model answered for one image, and why."""

    model: str  # "global", "personal", "local", "pooled"
    of: SiteName = ""
    confidence: float | None = None  # the selector's largest probability
    why: str = "the only model"
    chances: Mapping[str, float] = field(default_factory=dict)  # the selector's probabilities by site

    @property
    def key(self) -> str:
        return f"{self.model}/{self.of}" if self.of else self.model


@dataclass(frozen=True)
class Answer:
    output: Tensor  # logits, (batch, channels, *spatial) or (batch, classes)
    choices: tuple[ModelChoice, ...]  # one per image


def most_common(choices: Sequence[ModelChoice]) -> ModelChoice:
    """The most frequent choice over the slices of a volume."""
    return max(choices, key=lambda choice: sum(other.key == choice.key for other in choices))


class Predictor(ABC):
    """A model for prediction. `model`, `of` and `when` name it in every score."""

    model: str
    of: SiteName
    when: str  # "merged", "trained", "adapted"

    @property
    def passes(self) -> int:
        """Forward passes of the task's network per case, without the selector's."""
        return 1

    @abstractmethod
    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        """Logits for a batch of images; `volume`: they are the slices of one volume."""

    def others(self) -> Sequence[Predictor]:
        """Further models to score, for instance the parts of a super model."""
        return ()

    def elsewhere(self) -> Sequence[Predictor]:
        """Models of other sites, which are scored here once at the end."""
        return ()

    def of_site(self, site: SiteName) -> Predictor:
        """The model of one hospital, for `predict --site`."""
        for predictor in (self, *self.others(), *self.elsewhere()):
            if predictor.of == site:
                return predictor
        raise StudyError(f"this run holds no model of its own for site '{site}'; leave out --site.")


class OneModel(Predictor):
    """A single network with fixed weights."""

    def __init__(
        self,
        task: Task,
        weights: Weights,
        model: str = "global",
        of: SiteName = "",
        when: str = "merged",
        plain: bool = True,  # False: not the study's own network, or its output is changed afterwards
    ) -> None:
        self.task, self.weights, self.plain = task, weights, plain
        self.model, self.of, self.when = model, of, when

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        choice = ModelChoice(self.model, self.of)
        return Answer(self.task.infer(self.weights, images), (choice,) * len(images))


class WithOthers(Predictor):
    """A predictor, and further models to score beside it."""

    def __init__(self, first: Predictor, others: Sequence[Predictor] = (), elsewhere: Sequence[Predictor] = ()) -> None:
        self.first, self._others, self._elsewhere = first, others, elsewhere
        self.model, self.of, self.when = first.model, first.of, first.when

    @property
    def passes(self) -> int:
        return self.first.passes

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        return self.first.answer(images, volume)

    def others(self) -> Sequence[Predictor]:
        return self._others

    def elsewhere(self) -> Sequence[Predictor]:
        return self._elsewhere
