"""What a method can use at a hospital: its card, the round, and its cases."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch

from consilium.batch import Batch, SiteData
from consilium.errors import StudyError
from consilium.fields import NAME
from consilium.local_training import Local
from consilium.randomness import torch_generator
from consilium.ranges import Items, Range, Text
from consilium.task import Task
from consilium.weights import SiteName, Weights

ROUNDS = 1_000_000  # more than any run has
SLICES = 1 << 16  # more than any volume has
POOLED = "(pooled)"  # the virtual site that holds all cases; no real site can have this name
Count = Annotated[int, Range(0, 2**40)]
RoundIndex = Annotated[int, Range(0, ROUNDS)]
SiteId = Annotated[str, Text(100, rf"{NAME}|\(pooled\)")]
Label = Annotated[str, Text(200)]
Labels = Annotated[tuple[Label, ...], Items(255)]
SiteIds = Annotated[tuple[SiteId, ...], Items(1 << 16)]
Loss = Annotated[float, Range(-1e-3, 1e9)]  # a mean over a round; rounding may give a value just below 0


@dataclass(frozen=True)
class SiteCard:
    """Public facts about a site, exchanged at roll call."""

    name: SiteId
    index: Annotated[int, Range(-1, 2**20)]  # its place in the roster, in site-name order; -1: not a member
    n: Count  # training cases
    labels: Labels  # what it annotates
    unlabelled: Count = 0  # further training cases without a mask; only methods with teachers use them


Roster = Mapping[SiteName, SiteCard]


def pooled_card(cards: Collection[SiteCard], labels: tuple[str, ...], name: SiteName = POOLED) -> SiteCard:
    """The card of the virtual site that holds the cases of all these sites."""
    return SiteCard(name, 0, sum(card.n for card in cards), labels, sum(card.unlabelled for card in cards))


@dataclass(frozen=True)
class Round:
    """A round's position in the run."""

    index: RoundIndex  # counted over all phases, from 0
    phase: Annotated[str, Text(40)]
    step: RoundIndex  # counted within the phase, from 0
    total: RoundIndex  # rounds of this phase
    before: RoundIndex = 0  # earlier rounds that are not the paper's and not counted in `number`
    scored: bool = False  # scores are taken after it

    @property
    def number(self) -> int:
        """The number for users: the paper's rounds are 1, 2, …; other phases continue from there."""
        return self.index + 1 - self.before


@dataclass(frozen=True)
class Spent:
    """An entry of a site's ledger: a result from its patients' data, and the noise on it."""

    what: tuple[str, ...]  # "global", "personal", "features", …; several models of one pass share its draws
    kind: str  # "dp-sgd", "gaussian"; "none": without noise
    noise: float = 0.0  # standard deviation, in units of the largest change by one patient
    rate: float = 1.0  # probability of each patient to be drawn
    steps: int = 1  # draws
    clip: float = 0.0  # bound of a patient's gradient, or of an image's features
    of: str = "training"  # its source: "training", "validation" (and test) cases; "counts": their numbers
    drawn: str = ""  # of a pass: which one it was; a repeated pass has the same draws and the same noise


@dataclass(frozen=True)
class PatientPrivacy:
    """How a site protects its patients while it trains (`[privacy] unit = "patient"`)."""

    clip: float
    noise: float  # of one draw, for all models trained on it together
    statistics: float  # noise of every other statistic
    feature_clip: float
    key: bytes  # known to the site alone: otherwise the noise could be removed
    given: tuple[str, ...] = ()  # digests of what an answer depends on beside the cases: the order and the memory
    spent: list[Spent] = field(default_factory=list, compare=False)  # the cost of one answer so far


@dataclass(frozen=True)
class Site:
    """One hospital, as a method sees it."""

    card: SiteCard
    roster: Roster
    task: Task
    data: SiteData
    local: Local
    device: str
    seed: int
    private: PatientPrivacy | None = None  # DP-SGD

    def batches(self, round: Round) -> Iterator[Batch]:
        """The training cases in this round's order, `epochs` times."""
        for epoch in range(self.local.epochs):
            yield from self.data.batches(self.local.batch_size, epoch, self._seed(round, "batches"))

    def generator(self, round: Round, purpose: str) -> torch.Generator:
        name = self.card.name.strip("()")  # keeps the random numbers of the virtual site's older name
        return torch_generator(self.seed, name, round.index, purpose)

    def _seed(self, round: Round, purpose: str) -> int:
        return self.generator(round, purpose).initial_seed()

    def loss(self, weights: Weights, split: str = "train") -> float:
        """The mean loss of a model on this site's own cases, unaugmented."""
        total, count = 0.0, 0
        for batch in self.data.whole(split, self.local.batch_size):
            output = self.task.infer(weights, batch.images)
            total += float(self.task.loss(output, batch)) * len(batch.cases)
            count += len(batch.cases)
        if not count:
            raise StudyError(f"site '{self.card.name}' has no {split} cases; give it some or leave it out.")
        return total / count
