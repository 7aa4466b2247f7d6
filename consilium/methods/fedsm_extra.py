"""FedSM-extra and the ensemble of section 3.1.1: the selector is trained in extra rounds, once the models are fixed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium import tree
from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.method import Best, Method, OptimizerState, Phase, message
from consilium.methods.fedsm import pulled
from consilium.methods.routing import GLOBAL, ROUTES, EnsembleModel, NetworkRouter, SuperModel
from consilium.methods.selector import (
    TRAININGS,
    blank_state,
    check_fields,
    check_sites,
    merged_selector,
    selector_reply,
    weak_pull,
)
from consilium.methods.shares import WithShares
from consilium.site import Batch, Local, OneModel, Predictor, Roster, Round, Site, SiteCard, Task, WithOthers
from consilium.weights import SiteName, Weights


@message
class Models:
    """The K + 1 models the selector chooses from."""

    global_: Weights
    personal: Mapping[SiteName, Weights]


@dataclass(frozen=True)
class LateSelector(WithShares, Method):
    """Phase "models": w_g by averaging, w_{p,k} by SoftPull. Phase "selector", from the best models: only w_s."""

    pull: float = 0.7  # λ in (0, 1]
    selector_rounds: int = 0  # ΔR, taken from the end of the study's rounds; 0: a third of them, as in the paper
    selector_training: str = "synchronised"  # "moments" (as published), "paper" (as printed): see FedSM
    selector_lr: float = 1e-3  # η_s
    route: str = "volume"  # volumes trained as slices: the selector decides for all slices of a volume, or per "slice"

    @message
    class Server:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights  # K + 1 classes, the global model first
        routes: bool  # the selector's phase has begun
        selector_state: OptimizerState | None
        holders: tuple[SiteName, ...]  # sites that have confirmed the models
        n: Mapping[SiteName, int]

    @message
    class Downlink:
        global_: Weights | None
        personal: Weights | None
        models: Models | None  # sent once, to whoever has not confirmed them
        selector: Weights | None
        selector_state: OptimizerState | None  # with selector_training = "moments"

    @message
    class Uplink:
        global_: Weights | None
        personal: Weights | None
        selector: Weights | None  # its mean gradient over the site's training cases; trained, unless synchronised
        selector_state: OptimizerState | None
        holds: bool  # the site has the models
        loss: float
        steps: int

    @message
    class Memory(Method.Memory):
        models: Models | None
        targets: Mapping[str, int]  # the selector's right answer by training case; empty for the ensemble

    @message
    class Release:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights | None
        home: SiteName

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pull <= 1:
            raise StudyError(f"[method] pull = {self.pull}: λ must be in (0, 1].")
        if self.selector_rounds < 0:
            raise StudyError(f"[method] selector_rounds = {self.selector_rounds}: it cannot be negative.")
        if not self.selector_lr > 0:
            raise StudyError(f"[method] selector_lr = {self.selector_lr}: it must be positive.")
        check_fields(
            selector_training=(self.selector_training, TRAININGS),
            route=(self.route, ROUTES),
        )

    def targets(self, site: Site, models: Models) -> dict[str, int]:
        """What the selector should answer for every training case, if the method teaches it that."""
        return {}

    @abstractmethod
    def selector_loss(self, site: Site, memory: Any, output: Tensor, batch: Batch) -> Tensor:
        """What the selector is taught on a batch."""

    @abstractmethod
    def predictor(self, task: Task, released: Any) -> Predictor:
        """What a release with a selector becomes."""

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_sites(roster, local, "a super model")
        return weak_pull(self.pull, roster)

    def phases(self, rounds: int) -> list[Phase]:
        extra = self.selector_rounds or max(1, rounds // 3)
        if extra >= rounds:
            raise StudyError(f"[method] selector_rounds = {extra} leaves no round of {rounds} for the models.")
        return [Phase("models", rounds - extra), Phase("selector", extra, from_best=True)]

    def remember(self, site: Site) -> Memory:
        return self.Memory(None, {})

    def start(self, task: Task, roster: Roster) -> Server:
        model = task.initial()
        n = {name: card.n for name, card in roster.items()}
        selector = task.initial("selector", labels=[GLOBAL, *roster])
        return self.Server(model, dict.fromkeys(roster, model), selector, False, None, (), n)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        if round.phase == "models":
            return self.Downlink(server.global_, server.personal[site.name], None, None, None)
        models = Models(server.global_, server.personal) if site.name not in server.holders else None
        state = server.selector_state if self.selector_training == "moments" else None
        return self.Downlink(None, None, models, server.selector, state)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        if round.phase == "models":
            return self._train_models(site, memory, got, round)
        if got.models is not None:
            memory = self.Memory(got.models, self.targets(site, got.models))
        assert memory.models is not None
        labels = [GLOBAL, *site.roster]
        assert got.selector is not None

        def loss(output: Any, batch: Batch) -> Tensor:
            return self.selector_loss(site, memory, output, batch)

        training, lr = self.selector_training, self.selector_lr
        job = Job(got.selector, kind="selector", labels=labels, loss=loss, step=training == "paper", lr=lr)
        done = fit(site, {"selector": job}, round)["selector"]
        selector, state = selector_reply(training, done, got.selector, got.selector_state, lr)
        return self.Uplink(None, None, selector, state, True, done.loss, done.steps), memory

    def _train_models(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        assert got.global_ is not None
        assert got.personal is not None
        done = fit(site, {"global": Job(got.global_), "personal": Job(got.personal)}, round, memory.states)
        own = done["personal"]
        uplink = self.Uplink(done["global"].weights, own.weights, None, None, False, own.loss, own.steps)
        return uplink, self.Memory(None, {}, states=done.states)

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        parts = dict(tree.split(sent).weights)
        if self.selector_training == "synchronised":  # its gradient comes back, which is a change by itself
            parts.pop("selector", None)
        return parts

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        if round.phase == "models":
            personal = pulled({k: r.personal for k, r in replies.items()}, self.pull)  # type: ignore[misc]
            global_ = self.average({k: r.global_ for k, r in replies.items()}, server.n)  # type: ignore[misc]
            return self._with(server, global_=global_, personal={**server.personal, **personal})
        holders = tuple(sorted({*server.holders, *(name for name, reply in replies.items() if reply.holds)}))
        sent = {name: (reply.selector, reply.selector_state) for name, reply in replies.items()}
        selector, state = merged_selector(
            self.selector_training, server.selector, server.selector_state, sent, server.n, self.selector_lr
        )
        return self._with(server, selector=selector, routes=True, selector_state=state, holders=holders)

    def _with(self, server: Server, **changed: Any) -> Server:
        return self.Server(**{**vars(server), **changed})

    def release(self, server: Server, site: SiteCard | None) -> Release:
        selector = server.selector if server.routes else None
        return self.Release(server.global_, server.personal, selector, site.name if site else "")

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        if released.selector is not None:
            return self.predictor(task, released)
        own = released.personal.get(released.home)
        others = [] if own is None else [OneModel(task, own, "personal", released.home)]
        return WithOthers(OneModel(task, released.global_, "global"), others)

    def keep(self, best: Best, now: Best) -> Best:
        """Phase "models": each model its own best round. Phase "selector": the best super model."""
        if now.server.routes:
            return super().keep(best, now)
        valid = dict(best.valid)
        changed: dict[str, Any] = {"personal": dict(best.server.personal)}
        for key, mark in now.valid.items():
            if key in valid and mark.value <= valid[key].value:
                continue
            valid[key] = mark
            kind, _, site = key.partition("/")
            if key == "global:pooled":
                changed["global_"] = now.server.global_
            elif kind == "personal" and site:
                changed["personal"][site] = now.server.personal[site]
        for site, weights in now.server.personal.items():
            if f"personal/{site}" not in valid:  # without validation cases: the latest
                changed["personal"][site] = weights
        return Best(self._with(best.server, **changed), valid, now.merged)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        if round.phase == "models":
            model = task.shape()
            return self.Uplink(model, model, None, None, False, 0.0, 0)
        selector = task.shape("selector", labels=[GLOBAL, *roster])
        return self.Uplink(None, None, selector, blank_state(self.selector_training, selector), True, 0.0, 0)


def outputs_of(models: Models, task: Task, images: Tensor) -> list[Tensor]:
    """The logits of the global model and of every personal one, in the selector's class order."""
    return [task.infer(weights, images) for weights in (models.global_, *models.personal.values())]


@dataclass(frozen=True)
class FedSMExtra(LateSelector):
    """Algorithms 3 and 4: the selector learns which of the K + 1 models has the least loss on a case; no threshold."""

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "super"
    differences: ClassVar[tuple[str, ...]] = (
        "Equation 1 as printed needs the selector's own output; the target here is the model with the least loss "
        "against the label, the only reading that can be computed.",
        "By default the selector takes one synchronised Adam step per round, as in FedSM.",
    )

    def targets(self, site: Site, models: Models) -> dict[str, int]:
        found: dict[str, int] = {}
        for batch in site.data.whole("train", site.local.batch_size):
            outputs = outputs_of(models, site.task, batch.images)
            for i, case in enumerate(batch.cases):
                losses = [float(site.task.loss(output[i : i + 1], batch.only(i))) for output in outputs]
                found[case] = losses.index(min(losses))  # the first of equals: the global model
        return found

    def selector_loss(self, site: Site, memory: Any, output: Tensor, batch: Batch) -> Tensor:
        target = torch.tensor([memory.targets[case] for case in batch.cases], device=output.device)
        return torch.nn.functional.cross_entropy(output.float(), target)

    def predictor(self, task: Task, released: Any) -> Predictor:
        router = NetworkRouter(task, released.selector, [GLOBAL, *released.personal])
        return SuperModel(task, released.global_, released.personal, router, 0.0, released.home, self.route)


@dataclass(frozen=True)
class FedSMEnsemble(LateSelector):
    """Section 3.1.1: h = Σ ŷ_k h_k over all K + 1 models, the selector trained on L(h, y)."""

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "ensemble"
    differences: ClassVar[tuple[str, ...]] = (
        "Probabilities are averaged, not logits; the paper does not say which.",
        "By default the selector takes one synchronised Adam step per round, as in FedSM.",
    )

    def selector_loss(self, site: Site, memory: Any, output: Tensor, batch: Batch) -> Tensor:
        outputs = [part.to(output.device) for part in outputs_of(memory.models, site.task, batch.images)]
        return site.task.loss(site.task.blend(outputs, output.float().softmax(1)), batch)

    def predictor(self, task: Task, released: Any) -> Predictor:
        router = NetworkRouter(task, released.selector, [GLOBAL, *released.personal])
        return EnsembleModel(task, released.global_, released.personal, router, released.home, self.route)
