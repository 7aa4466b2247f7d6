"""How FedSM makes its personal models: by SoftPull (the paper), or by one of the four other methods of its table 6.

A personaliser is a part of FedSM. Each verb returns the fields that the part adds to FedSM's own message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from consilium.errors import StudyError
from consilium.fields import fill
from consilium.learning.fit import Fit, Job
from consilium.method import Method, OptimizerState
from consilium.methods.apfl import APFL, apfl_round
from consilium.methods.fedavg_finetune import FedAvgFinetune
from consilium.methods.finetuned import finetuned
from consilium.methods.per_fedavg import PerFedAvg, meta_adapted, meta_round
from consilium.methods.pfedme import PFedMe, moreau_round
from consilium.methods.softpull import pulled, weak_pull
from consilium.site import Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights, mean

if TYPE_CHECKING:
    from consilium.methods.fedsm import FedSM

Fields = dict[str, Any]  # of one of FedSM's messages


@dataclass(frozen=True)
class PersonalRound:
    """The result of a site's round for its personal model."""

    sent: Fields  # of the uplink
    states: Mapping[str, OptimizerState]  # of optimisers beside those of `jobs`
    own: Weights | None = None  # APFL's v
    mix: float = 0.0  # APFL's α


class Personaliser(ABC):
    """How the K personal models are trained and merged."""

    adapts: bool = False  # personal models are made in a phase "adapt", once the common model is trained

    def check(self, roster: Roster) -> list[str]:
        """Return warnings about this federation."""
        return []

    def remember(self, task: Task) -> tuple[Weights | None, float]:
        """Return APFL's v and α, as a site starts with them."""
        return None, 0.0

    def start(self, model: Weights) -> Fields:
        """Return fields of the server's first state; `model` is the initial one."""
        return {"shared": None}

    def send(self, server: FedSM.Server, site: SiteCard) -> Fields:
        """Return fields of the downlink, beside the global model and the selector."""
        return {"shared": server.shared}

    def jobs(self, got: FedSM.Downlink) -> dict[str, Job]:
        """Return what is trained on the same batches as the selector."""
        assert got.global_ is not None
        return {"global": Job(got.global_)}

    def train(
        self, site: Site, memory: FedSM.Memory, got: FedSM.Downlink, done: Mapping[str, Fit], round: Round
    ) -> PersonalRound:
        """Train what `jobs` did not cover; `done` holds the finished jobs."""
        return PersonalRound(_trained(done["global"]), {})

    def adapt(self, site: Site, got: FedSM.Downlink, round: Round) -> Weights:
        """Return the site's version of the best common model (phase "adapt")."""
        raise NotImplementedError  # only where `adapts`

    @abstractmethod
    def merge(self, server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], global_: Weights) -> Fields:
        """Return fields of the server's new state; `global_` is the new global model."""

    @abstractmethod
    def blank(self, model: Weights) -> Fields:
        """Return the personal fields of an expected uplink; `model` has the shapes."""


@dataclass(frozen=True)
class SoftPull(Personaliser):
    """Each site trains its own model; the server moves each towards the mean of the others (equation 11)."""

    pull: float  # λ

    def check(self, roster: Roster) -> list[str]:
        return weak_pull(self.pull, roster)

    def send(self, server: FedSM.Server, site: SiteCard) -> Fields:
        return {"personal": server.personal[site.name]}

    def jobs(self, got: FedSM.Downlink) -> dict[str, Job]:
        assert got.global_ is not None
        assert got.personal is not None
        return {"global": Job(got.global_), "personal": Job(got.personal)}

    def train(
        self, site: Site, memory: FedSM.Memory, got: FedSM.Downlink, done: Mapping[str, Fit], round: Round
    ) -> PersonalRound:
        own = done["personal"]
        sent = {"global_": done["global"].weights, "personal": own.weights, "loss": own.loss, "steps": own.steps}
        return PersonalRound(sent, {})

    def merge(self, server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], global_: Weights) -> Fields:
        return {"personal": {**server.personal, **pulled(_personal(replies), self.pull)}}

    def blank(self, model: Weights) -> Fields:
        return {"personal": model}


@dataclass(frozen=True)
class ByFinetuning(Personaliser):
    """w_k: some epochs from the best global model, at the end."""

    how: FedAvgFinetune = field(default_factory=FedAvgFinetune)
    adapts = True

    def adapt(self, site: Site, got: FedSM.Downlink, round: Round) -> Weights:
        assert got.global_ is not None
        return finetuned(site, got.global_, self.how.finetune_epochs, self.how.finetune_lr, round).weights

    def merge(self, server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], global_: Weights) -> Fields:
        return {"personal": dict.fromkeys(server.personal, global_)}  # until they are adapted

    def blank(self, model: Weights) -> Fields:
        return {}


@dataclass(frozen=True)
class ByMixing(Personaliser):
    """w_k: APFL's mixture of the global model and one that stays at the site."""

    how: APFL = field(default_factory=APFL)

    def remember(self, task: Task) -> tuple[Weights | None, float]:
        return task.initial(), self.how.mix

    def jobs(self, got: FedSM.Downlink) -> dict[str, Job]:
        return {}  # the round of APFL trains the global model too

    def train(
        self, site: Site, memory: FedSM.Memory, got: FedSM.Downlink, done: Mapping[str, Fit], round: Round
    ) -> PersonalRound:
        assert got.global_ is not None
        assert memory.own is not None
        turn = apfl_round(site, got.global_, memory.own, memory.mix, self.how.adaptive, round, memory.states)
        sent = {"global_": turn.shared, "personal": turn.personal, "loss": turn.loss, "steps": turn.steps}
        return PersonalRound(sent, turn.states, turn.own, turn.mix)

    def merge(self, server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], global_: Weights) -> Fields:
        return {"personal": {**server.personal, **_personal(replies)}}

    def blank(self, model: Weights) -> Fields:
        return {"personal": model}


@dataclass(frozen=True)
class ByMetaLearning(Personaliser):
    """w_k: one step of Per-FedAvg from a second common model that is trained for it."""

    how: PerFedAvg = field(default_factory=PerFedAvg)
    adapts = True

    def start(self, model: Weights) -> Fields:
        return {"shared": model}

    def train(
        self, site: Site, memory: FedSM.Memory, got: FedSM.Downlink, done: Mapping[str, Fit], round: Round
    ) -> PersonalRound:
        assert got.shared is not None
        shared, _, _, states = meta_round(site, got.shared, self.how, round, memory.states, "shared")
        return PersonalRound({**_trained(done["global"]), "shared": shared}, states)

    def adapt(self, site: Site, got: FedSM.Downlink, round: Round) -> Weights:
        assert got.shared is not None
        return meta_adapted(site, got.shared, self.how.inner_lr, self.how.adapt_steps, round)

    def merge(self, server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], global_: Weights) -> Fields:
        shared = _shared(server, replies, 1.0)
        return {"shared": shared, "personal": dict.fromkeys(server.personal, shared)}  # until they are adapted

    def blank(self, model: Weights) -> Fields:
        return {"shared": model}


@dataclass(frozen=True)
class ByMoreauEnvelope(Personaliser):
    """w_k: pFedMe's θ, near a second common model."""

    how: PFedMe = field(default_factory=PFedMe)

    def start(self, model: Weights) -> Fields:
        return {"shared": model}

    def train(
        self, site: Site, memory: FedSM.Memory, got: FedSM.Downlink, done: Mapping[str, Fit], round: Round
    ) -> PersonalRound:
        assert got.shared is not None
        shared, personal, _, _ = moreau_round(site, got.shared, self.how, round)
        return PersonalRound({**_trained(done["global"]), "shared": shared, "personal": personal}, {})

    def merge(self, server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], global_: Weights) -> Fields:
        personal = {**server.personal, **_personal(replies)}
        return {"shared": _shared(server, replies, self.how.server_mix), "personal": personal}

    def blank(self, model: Weights) -> Fields:
        return {"personal": model, "shared": model}


PARTNERS: dict[str, tuple[type[Method], type[Any]]] = {
    "finetune": (FedAvgFinetune, ByFinetuning),
    "apfl": (APFL, ByMixing),
    "perfedavg": (PerFedAvg, ByMetaLearning),
    "pfedme": (PFedMe, ByMoreauEnvelope),
}  # the method whose fields a study sets, and the part that uses it
PERSONALISERS = ("softpull", *PARTNERS)


def personaliser(name: str, pull: float, fields: Mapping[str, Any]) -> Personaliser:
    """Return the part that a study's `personal`, `pull` and `personal_fields` describe.

    Raises StudyError for fields that the other method does not have.
    """
    if name == "softpull":
        if fields:
            raise StudyError("[method] personal_fields are not for personal = 'softpull'; remove them.")
        return SoftPull(pull)
    if "shares" in fields:
        raise StudyError("[method] personal_fields: 'shares' is FedSM's own here; write it in [method].")
    method, part = PARTNERS[name]
    try:
        made: Personaliser = part(fill(method, fields, "method"))
    except StudyError as error:
        reason = str(error).removeprefix("[method] ")
        raise StudyError(f"[method] personal_fields of {name}: {reason}") from None
    return made


def _trained(global_: Fit) -> Fields:
    """The fields of an uplink in which only the global model was trained by a job."""
    return {"global_": global_.weights, "loss": global_.loss, "steps": global_.steps}


def _personal(replies: Mapping[SiteName, FedSM.Uplink]) -> dict[SiteName, Weights]:
    return {name: reply.personal for name, reply in replies.items() if reply.personal is not None}


def _shared(server: FedSM.Server, replies: Mapping[SiteName, FedSM.Uplink], mix: float) -> Weights:
    """The second common model: (1 − β) w + β times the sites' uniform mean."""
    assert server.shared is not None
    sent = {name: reply.shared for name, reply in replies.items() if reply.shared is not None}
    return server.shared * (1 - mix) + mean(sent, dict.fromkeys(sent, 1.0)) * mix
