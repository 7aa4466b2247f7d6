"""A method is six verbs over five messages; the object holds hyper-parameters only.

The smallest method, federated averaging of one number, whole:

    @dataclass(frozen=True)
    class Average(Method):
        @message
        class Server:
            x: float
        Downlink = Release = Server
        @message
        class Uplink:
            x: float
        def start(self, task, roster): return self.Server(0.0)
        def send(self, server, site, round): return server
        def train(self, site, memory, got, round): return self.Uplink(got.x + site.card.n), memory
        def merge(self, server, replies, round): return self.Server(sum(r.x for r in replies.values()) / len(replies))
        def release(self, server, site): return server
        def deploy(self, task, memory, released): ...
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from consilium import tree
from consilium.site import Batch, Local, OneModel, Predictor, Roster, Round, Site, SiteCard, Task, WithOthers
from consilium.tree import bare, hints_of, message
from consilium.weights import SiteName, Weights

LossOfBatch = Callable[[Batch], Callable[[Any], Tensor]]  # labels are made once per batch, the loss of many outputs

__all__ = [
    "Best",
    "GlobalModel",
    "LossOfBatch",
    "Maybe",
    "Method",
    "OptimizerState",
    "PersonalModel",
    "Phase",
    "Valid",
    "away_as",
    "message",
    "timeline",
]


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds with one protocol."""

    name: str
    rounds: int
    counts: bool = True  # False: not one of the paper's rounds
    from_best: bool = False  # starts from the best server state instead of the last


@dataclass(frozen=True)
class Valid:
    """A validation score, and the round it was taken."""

    value: float
    round: int


@dataclass(frozen=True)
class Best:
    """A server state worth keeping, and the validation scores it was chosen by: "super", "global", "personal/hk" …"""

    server: Any
    valid: Mapping[str, Valid]
    merged: Mapping[SiteName, int] = field(default_factory=dict)  # the sites' memories that go with it, by round


@dataclass(frozen=True)
class Maybe:
    """In `blank`: a part that a site may send or leave out."""

    like: Any
    once: bool = False  # it is left out unless the order says `wanted`; else it is sent as a rule


@message
class OptimizerState:
    """What an optimiser keeps between rounds, by parameter name."""

    step: int
    slots: Mapping[str, Weights]  # for Adam: exp_avg, exp_avg_sq


@dataclass(frozen=True)
class Method(ABC):
    """Six verbs, functions of their arguments. See the module's example."""

    Server: ClassVar[type]
    Downlink: ClassVar[type]
    Uplink: ClassVar[type]
    Release: ClassVar[type]

    paper: ClassVar[str]
    headline: ClassVar[str]  # the model the method is about: "global", "personal", "super", "local", "pooled"
    deployable: ClassVar[bool] = True  # False: simulation only
    pooled: ClassVar[bool] = False  # True: trains on one virtual site that holds all cases
    unlabelled: ClassVar[bool] = False  # True: also learns from cases without a mask, by labels it makes itself
    optimizer_state: ClassVar[str] = ""  # "fresh": the method fixes [local] optimizer_state; empty: the study decides
    differences: ClassVar[tuple[str, ...]] = ()  # from the paper, as its page says

    @message
    class Memory:
        """Kept by one site between rounds, never sent. A method that keeps more derives its own from this."""

        states: Mapping[str, OptimizerState] = field(default_factory=dict, kw_only=True)  # of optimisers, if kept

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("train", rounds)]

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        """Refuse a study that cannot work (StudyError); return warnings for one that is only unusual."""
        return []

    def remember(self, site: Site) -> Any:
        """A site's first memory."""
        return self.Memory()

    def remembers(self, local: Local) -> bool:
        """Whether a site keeps anything between rounds."""
        names = {f.name for f in dataclasses.fields(self.Memory)}
        return bool(names - ({"states"} if local.optimizer_state == "fresh" else set()))

    @abstractmethod
    def start(self, task: Task, roster: Roster) -> Any: ...

    @abstractmethod
    def send(self, server: Any, site: SiteCard, round: Round) -> Any | None:
        """What this site gets this round; None: it sits the round out."""

    @abstractmethod
    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        """The site's work: an uplink, and its new memory."""

    @abstractmethod
    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        """The server's work, for any non-empty subset of the sites."""

    @abstractmethod
    def release(self, server: Any, site: SiteCard | None) -> Any:
        """What a site gets to use; None: a hospital outside the federation."""

    @abstractmethod
    def deploy(self, task: Task, memory: Any | None, released: Any) -> Predictor: ...

    def keep(self, best: Best, now: Best) -> Best:
        """After every scored round: the state to keep. Here: the higher validation site mean of the headline model."""
        old, new = best.valid.get(self.headline), now.valid.get(self.headline)
        return best if old and new and old.value >= new.value else now

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        """What the sites minimise in a round, for analyses of a finished run: from a batch to a loss of the output.

        Here: the task's own loss on the annotation of the batch. `memory` is None where the site's is not at hand.
        """
        return lambda batch: partial(site.task.loss, batch=batch)

    def started_from(self, server: Any, site: SiteCard, sent: Any) -> Mapping[str, Weights]:
        """What the parts of a site's uplink were before it trained, by path: an update is measured from there.

        Here: what was sent under the same name. A part without a start is itself a change, such as a gradient.
        """
        return tree.split(sent).weights

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Any:
        """The expected uplink on the meta device: names, shapes, types, which fields are None.

        Here: every `Weights` field has the shape of the model, every number is zero, messages inside likewise. What
        may be None, and the keys of a mapping or the length of a tuple, only the method itself can say.
        """
        return _blank(self.Uplink, task)


def _blank(kind: Any, task: Task) -> Any:
    simple: dict[Any, Callable[[], Any]] = {Weights: task.shape, float: float, int: int, str: str, bool: bool}
    kind = bare(kind)
    if kind in simple:
        return simple[kind]()
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"an uplink with {kind}: the method must say in blank() what is expected of it")
    hints = hints_of(kind)  # type: ignore[arg-type]
    return kind(**{f.name: _blank(hints[f.name], task) for f in dataclasses.fields(kind)})  # type: ignore[operator]


class GlobalModel(Method):
    """One shared model goes down, comes back trained, and is merged; `train` and `merge` are the method's own."""

    headline: ClassVar[str] = "global"

    @message
    class Server:
        global_: Weights
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        global_: Weights

    @message
    class Uplink:
        global_: Weights
        loss: float  # mean training loss of the round
        steps: int

    @message
    class Release:
        global_: Weights

    def start(self, task: Task, roster: Roster) -> Server:
        return self.Server(task.initial(), {name: card.n for name, card in roster.items()})

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink | None:
        return self.Downlink(server.global_)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.global_)

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        return OneModel(task, released.global_, "global")


class PersonalModel(Method):
    """One shared model goes down; every site makes one of its own, keeps it as `Memory.personal` and uses it."""

    headline: ClassVar[str] = "personal"
    when: ClassVar[str] = "trained"  # the site's own model; or "adapted", after the paper's rounds

    @message
    class Downlink:
        global_: Weights

    @message
    class Release:
        global_: Weights
        home: SiteName

    def send(self, server: Any, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_)

    def release(self, server: Any, site: SiteCard | None) -> Release:
        return self.Release(server.global_, site.name if site else "")

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        common = OneModel(task, released.global_, "global")
        if memory is None or not released.home:
            return common
        # before there is one of its own the shared model stands in, and its scores say so
        own, when = (released.global_, "merged") if memory.personal is None else (memory.personal, self.when)
        return WithOthers(OneModel(task, own, "personal", released.home, when), (common,))


def timeline(method: Method, rounds: int, score_every: int = 0) -> list[tuple[Phase, Round]]:
    """Every round of a run, with its phase; scores are taken every so many rounds, and after the last of a phase."""
    line: list[tuple[Phase, Round]] = []
    aside = 0  # rounds so far that are not the paper's; the latest stretch of them counts on from the paper's
    for phase in method.phases(rounds):
        if phase.counts:
            aside = sum(not other.counts for other, _ in line)
        for step in range(phase.rounds):
            last = step + 1 == phase.rounds
            scored = phase.counts and score_every > 0 and (last or (step + 1) % score_every == 0)
            line.append((phase, Round(len(line), phase.name, step, phase.rounds, aside, scored)))
    return line


def away_as(phase: Phase, round: Round, rounds: int) -> int | str:
    """How `[study] away` names a round: by its number, or as "teacher:1" where that is the number of another round."""
    return round.number if phase.counts or round.number > rounds else f"{phase.name}:{round.number}"
