"""A method is six functions over five messages; the object holds hyper-parameters only.

A complete example, federated averaging of one number:

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
from consilium.batch import Batch
from consilium.local_training import Local
from consilium.message_parsing import bare, hints_of
from consilium.predictor import OneModel, Predictor, WithOthers
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.tree import message
from consilium.weights import SiteName, Weights

LossOfBatch = Callable[[Batch], Callable[[Any], Tensor]]  # labels are made once per batch, the loss of many outputs

__all__ = [
    "Best",
    "CasesOf",
    "GlobalModel",
    "LossOfBatch",
    "Maybe",
    "Method",
    "OptimizerState",
    "PersonalModel",
    "Phase",
    "Valid",
    "message",
]


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with one protocol."""

    name: str
    rounds: int
    counts: bool = True  # False: not one of the paper's rounds
    from_best: bool = False  # starts from the best server state instead of the last


@dataclass(frozen=True)
class Valid:
    """A validation score and its round."""

    value: float
    round: int


@dataclass(frozen=True)
class Best:
    """A server state to keep, and the validation scores that chose it: "super", "global", "personal/hk" …"""

    server: Any
    valid: Mapping[str, Valid]
    merged: Mapping[SiteName, int] = field(default_factory=dict)  # the sites' memories that go with it, by round


@dataclass(frozen=True)
class Maybe:
    """In `blank`: a part that a site may send or leave out."""

    like: Any
    once: bool = False  # True: sent only if the order says `wanted`; False: usually sent


class CasesOf(int):
    """In `blank`: a number of cases of one split, from 0 to as many as the site declared at roll call."""

    split: str  # train, valid, test

    def __new__(cls, split: str) -> CasesOf:
        made = super().__new__(cls, 0)
        made.split = split
        return made


@message
class OptimizerState:
    """What an optimiser keeps between rounds, by parameter name."""

    step: Count
    slots: Mapping[str, Weights]  # for Adam: exp_avg, exp_avg_sq


@dataclass(frozen=True)
class Method(ABC):
    """Six functions without side effects: `start send train merge release deploy`. See the module's example."""

    Server: ClassVar[type]
    Downlink: ClassVar[type]
    Uplink: ClassVar[type]
    Release: ClassVar[type]

    paper: ClassVar[str]
    headline: ClassVar[str]  # the model the method is about: "global", "personal", "super", "local", "pooled"
    deployable: ClassVar[bool] = True  # False: simulation only
    alone: ClassVar[bool] = False  # True: a site's model has seen the cases of this site only
    pooled: ClassVar[bool] = False  # True: trains on one virtual site that holds all cases
    unlabelled: ClassVar[bool] = False  # True: also learns from cases without a mask, by labels it makes itself
    private: ClassVar[bool] = False  # True: the site uses its training cases in `fit` only, so DP-SGD covers them
    optimizer_state: ClassVar[str] = ""  # "fresh": the method fixes [local] optimizer_state; empty: the study decides
    steady: ClassVar[bool] = True  # False: it turns honest updates itself, so the firewall does not judge directions
    prediction: ClassVar[str] = "one"  # forward passes per case, as the headline's predictor counts them in `passes`
    differences: ClassVar[tuple[str, ...]] = ()  # from the paper, as its page says

    @message
    class Memory:
        """A site's state between rounds, never sent. A method that keeps more derives its own from this."""

        states: Mapping[str, OptimizerState] = field(default_factory=dict, kw_only=True)  # of optimisers, if kept

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("train", rounds)]

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        """Reject a study that cannot work (StudyError); return warnings for an unusual one."""
        return []

    def remember(self, site: Site) -> Any:
        """A site's first memory."""
        return self.Memory()

    def remembers(self, local: Local) -> bool:
        """Whether a site keeps anything between rounds."""
        names = {f.name for f in dataclasses.fields(self.Memory)}
        return bool(names - ({"states"} if local.optimizer_state == "fresh" else set()))

    def not_private(self) -> str:
        """Why DP-SGD would not protect patients in this method, as a clause; empty if it does."""
        return "" if self.private else "its sites take steps of their own that no noise is added to"

    def passes(self, rounds: int, epochs: int) -> int:
        """The greatest number of passes of a site over its training cases, each of `epochs` epochs."""
        return sum(phase.rounds for phase in self.phases(rounds))

    def noised_statistics(self) -> int:
        """The number of separately noised statistics that a site sends over a whole run."""
        return 0

    @abstractmethod
    def start(self, task: Task, roster: Roster) -> Any: ...

    @abstractmethod
    def send(self, server: Any, site: SiteCard, round: Round) -> Any | None:
        """The downlink of this site in this round; None: the site does not take part."""

    @abstractmethod
    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        """Train at the site; returns the uplink and the new memory."""

    @abstractmethod
    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        """Merge the replies of any non-empty subset of the sites; returns the server's new state."""

    @abstractmethod
    def release(self, server: Any, site: SiteCard | None) -> Any:
        """The models for a site; `site` None: for a hospital outside the federation."""

    @abstractmethod
    def deploy(self, task: Task, memory: Any | None, released: Any) -> Predictor: ...

    def keep(self, best: Best, now: Best) -> Best:
        """The state to keep after a scored round; by default the higher validation site mean of the headline model."""
        old, new = best.valid.get(self.headline), now.valid.get(self.headline)
        return best if old and new and old.value >= new.value else now

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        """The loss that a site minimises in a round, for analyses: from a batch to a loss of the output.

        By default the task's loss on the annotation of the batch. `memory` is None if the site's is not available.
        """
        return lambda batch: partial(site.task.loss, batch=batch)

    def started_from(self, server: Any, site: SiteCard, sent: Any) -> Mapping[str, Weights]:
        """The starting weights of each part of a site's uplink, by path; updates are measured from them.

        By default the weights sent under the same name. A part without a start is itself a change, such as a gradient.
        """
        return tree.split(sent).weights

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Any:
        """The expected uplink on the meta device: names, shapes, types, which fields are None.

        By default every `Weights` field has the shape of the model and every number is zero, also in nested messages. A
        method overrides this if fields may be None, or for mappings and tuples.
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
    """Sites get one shared model, train it and send it back; a method defines `train` and `merge`."""

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
        loss: Loss  # mean training loss of the round
        steps: Count

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
    """Sites get one shared model; each makes its own model from it, keeps it as `Memory.personal` and uses it."""

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
        # before a site has its own model it uses the shared one, and the scores say so
        own, when = (released.global_, "merged") if memory.personal is None else (memory.personal, self.when)
        return WithOthers(OneModel(task, own, "personal", released.home, when), (common,))
