"""MENU-Net: one encoder per organ, trained by the sites that annotate the organ, and one decoder for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.fields import check_choices, check_from_zero
from consilium.learning.exclusion import exclusion_loss
from consilium.learning.gradients import GradientNetwork, Stepper, Tally, seeded_batches
from consilium.method import LossOfBatch, Method, OptimizerState, message
from consilium.methods.fedavg_foreground import STUDY
from consilium.methods.shares import WithShares
from consilium.networks.menu_net import MenuNet
from consilium.predictor import OneModel, Predictor
from consilium.ranges import Items
from consilium.site import Count, Label, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName, Weights, mean

ENCODER_SHARES = ("annotating", "half")


@dataclass(frozen=True)
class MENUNet(WithShares, Method):
    """One encoder per organ, averaged over the sites that annotate it, and one decoder on all features together."""

    exclusion: float = 1.0  # weight of the exclusion loss; 0: the marginal loss alone
    encoder_shares: str = "annotating"  # which sites count in an organ's encoder; "half": the others too, half as much

    paper: ClassVar[str] = (
        f"Xu et al., Federated multi-organ segmentation with inconsistent labels (TMI 2023), as in {STUDY}, figure 2 E"
    )
    headline: ClassVar[str] = "global"
    prediction: ClassVar[str] = "one, with an encoder per organ"
    differences: ClassVar[tuple[str, ...]] = (
        "An organ's encoder is averaged over the sites that annotate it, as UFPS describes it; the published code "
        "counts the others half: encoder_shares = 'half'.",
        "There is no auxiliary decoder (in the original it trains the encoders again): UFPS does not describe it.",
        "A site trains once per organ it annotates, on its whole annotation; that pass changes the decoder and that "
        "organ's encoder.",
    )

    @message
    class Server:
        global_: Weights  # the whole network
        encoders: Mapping[str, tuple[str, ...]]  # by label, the names of its encoder's tensors
        labels: Mapping[SiteName, tuple[str, ...]]
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        global_: Weights

    @message
    class Uplink:
        decoder: Weights  # with the head
        encoders: Annotated[Mapping[Label, Weights], Items(255)]  # of the organs that the site annotates
        loss: Loss
        steps: Count

    @message
    class Release:
        global_: Weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, "method", encoder_shares=ENCODER_SHARES)
        check_from_zero(self, "method", "exclusion")

    def check(self, task: Task, roster: Roster, local: Any) -> list[str]:
        if not isinstance(task, Segmentation) or task.overlapping:
            raise StudyError("menu-net needs masks whose labels exclude each other; this task is of another kind.")
        if task.unannotated != "unknown":
            raise StudyError(f"[task] unannotated = '{task.unannotated}': menu-net has its own loss; take it away.")
        if local.batchnorm != "average":
            raise StudyError("[local] batchnorm: menu-net needs 'average'.")
        menu(task).shape()
        return []

    def start(self, task: Task, roster: Roster) -> Server:
        n, labels = ({name: getattr(card, key) for name, card in roster.items()} for key in ("n", "labels"))
        return self.Server(menu(task).initial(), encoder_names(menu(task)), labels, n)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        return self.Downlink(server.global_)

    def train(self, site: Site, memory: Any, got: Downlink, round: Round) -> tuple[Uplink, Any]:
        place = replace(site, task=menu(site.task))
        names = encoder_names(place.task)
        inside = {name for found in names.values() for name in found}
        weights = got.global_
        states: dict[str, OptimizerState] = {}
        tally = Tally()
        for organ in site.card.labels:  # one pass each, as AbdomenCT-1K is passed twice in UFPS
            fixed = inside - set(names[organ])
            network = GradientNetwork(place, weights, learned=lambda name, fixed=fixed: name not in fixed)  # type: ignore[misc]
            stepper = Stepper(place, network.parameters, round, memory.states, organ)
            for batch in seeded_batches(place, round):
                gradient, loss = network.gradient(batch, partial(self.site_loss, site, batch))
                stepper.step(gradient)
                tally.add(loss, batch)
            weights = network.weights()
            states |= stepper.states
        decoder = weights.split(lambda name: name not in inside)[0]
        encoders = {organ: weights.split(set(names[organ]).__contains__)[0] for organ in site.card.labels}
        return self.Uplink(decoder, encoders, tally.loss, tally.steps), self.Memory(states=states)

    def site_loss(self, site: Site, batch: Batch, output: Tensor) -> Tensor:
        """The marginal loss (the task's own for labels that a site does not annotate) and the exclusion loss."""
        loss = site.task.loss(output, batch)
        if self.exclusion:
            loss = loss + self.exclusion * exclusion_loss(output, batch, site.task.labels, site.card.labels)
        return loss

    def also_averages(self) -> str:
        return "encoders by half shares; set [method] encoder_shares = 'annotating' with it" if self._halves else ""

    @property
    def _halves(self) -> bool:
        return self.encoder_shares == "half"

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        inside = {name for found in server.encoders.values() for name in found}
        before = server.global_.split(lambda name: name not in inside)[0]
        parts = dict(self.average({name: reply.decoder for name, reply in replies.items()}, server.n, before))
        for organ, names in server.encoders.items():
            came = {name: reply.encoders[organ] for name, reply in replies.items() if organ in reply.encoders}
            held = server.global_.split(set(names).__contains__)[0]
            if self._halves:
                # a site that does not annotate the organ would return the encoder unchanged
                rest = len(replies) - len(came)
                counts = {**dict.fromkeys(came, 1.0), **({"": rest / 2} if rest else {})}
                parts |= mean({**came, **({"": held} if rest else {})}, counts)
            else:
                parts |= self.average(came, server.n, held) if came else held
        ordered = Weights.over({name: parts[name] for name in server.global_})
        return self.Server(ordered, server.encoders, server.labels, server.n)

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        inside = {name for found in server.encoders.values() for name in found}
        decoder = sent.global_.split(lambda name: name not in inside)[0]
        mine = {o: sent.global_.split(set(server.encoders[o]).__contains__)[0] for o in site.labels}
        return {"decoder": decoder, **{f"encoders/{organ}": part for organ, part in mine.items()}}

    def release(self, server: Server, site: SiteCard | None) -> Release:
        return self.Release(server.global_)

    def deploy(self, task: Task, memory: Any | None, released: Release) -> Predictor:
        return OneModel(menu(task), released.global_, "global", plain=False)

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        return lambda batch: partial(self.site_loss, site, batch)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        shape, names = menu(task).shape(), encoder_names(menu(task))
        inside = {name for found in names.values() for name in found}
        encoders = {organ: shape.split(set(names[organ]).__contains__)[0] for organ in card.labels}
        return self.Uplink(shape.split(lambda name: name not in inside)[0], encoders, 0.0, 0)


@lru_cache(maxsize=64)
def menu(task: Task) -> Task:
    """The task with an encoder per label."""
    given: Any = task
    made: Task = replace(given, model=MenuNet(given.model, len(task.labels)))
    return made


@lru_cache(maxsize=64)
def encoder_names(task: Task) -> Mapping[str, tuple[str, ...]]:
    """By label, the names of its encoder's tensors."""
    with torch.device("meta"):
        network: Any = task.network()
    return {
        label: tuple(f"encoders.{i}.{name}" for name in network.encoders[i].state_dict())
        for i, label in enumerate(task.labels)
    }
