"""Methods that train the selector after the models: in extra rounds, or in closed form from two exchanges."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.learning.discriminant import FeatureSums
from consilium.learning.fit import Job, fit
from consilium.learning.regression import STRENGTHS, LossForecast, Regression, chosen_strength, regression
from consilium.local_training import Local
from consilium.method import Best, CasesOf, Method, OptimizerState, Phase, message
from consilium.methods.regression_selector import (
    CLOSED,
    LOSSES,
    STRENGTH,
    blank_sums,
    loss_sums,
    scores_by_strength,
)
from consilium.methods.routers import GLOBAL
from consilium.methods.routing import ROUTES, Scores, impossible_sums
from consilium.methods.selector import (
    TRAININGS,
    Models,
    blank_state,
    check_sites,
    merged_selector,
    selector_reply,
    starting_parts,
)
from consilium.methods.shares import WithShares
from consilium.methods.softpull import pulled, weak_pull
from consilium.predictor import OneModel, Predictor, WithOthers
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.tasks.features import feature_count
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class LateSelector(WithShares, Method):
    """Phase "models": w_g by averaging, w_{p,k} by SoftPull. Phase "selector", from the best models: only w_s.

    In closed form there are two exchanges instead of that phase: "losses", and "strength" on validation cases.
    """

    pull: float = 0.7  # λ in (0, 1]
    selector_rounds: int = 0  # ΔR, taken from the end of the study's rounds; 0: a third of them, as in the paper
    selector_training: str = "synchronised"  # or "moments" (as published), "paper" (as printed): see FedSM
    # FedSM-extra also has "regression": closed form, predicts each model's loss, from two exchanges after training
    selector_lr: float = 1e-3  # η_s
    route: str = "slice"  # volumes trained as slices: the selector decides slice by slice, or once for a "volume"

    trainings: ClassVar[tuple[str, ...]] = TRAININGS

    @message
    class Server:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights | None  # K + 1 classes, the global model first; None: in closed form
        routes: bool  # the selector's phase has begun
        selector_state: OptimizerState | None
        holders: tuple[SiteName, ...]  # sites that have confirmed the models
        n: Mapping[SiteName, int]
        regression: Regression | None = None  # the selector in closed form

    @message
    class Downlink:
        global_: Weights | None
        personal: Weights | None
        models: Models | None  # sent once, to sites that have not confirmed them
        selector: Weights | None
        selector_state: OptimizerState | None  # with selector_training = "moments"
        regression: Regression | None = None  # in the strength phase

    @message
    class Uplink:
        global_: Weights | None
        personal: Weights | None
        selector: Weights | None  # its mean gradient if synchronised, else its trained weights
        selector_state: OptimizerState | None
        holds: bool  # the site has the models
        loss: Loss
        steps: Count
        sums: FeatureSums | None = None  # once: sums of its training images' features and the models' losses on them
        scores: Scores = ()  # once: the sum of validation scores for every strength of the ridge
        cases: Count = 0  # the number of these cases

        def contradiction(self) -> str:
            """Why the sums of scores cannot be true of so many cases; empty if they can."""
            return impossible_sums(self.scores, self.cases)

    @message
    class Memory(Method.Memory):
        models: Models | None
        targets: Mapping[str, int]  # the selector's target by training case; empty for the ensemble

    @message
    class Release:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights | None
        home: SiteName
        regression: Regression | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pull <= 1:
            raise StudyError(f"[method] pull = {self.pull}: λ must be in (0, 1].")
        if self.selector_rounds < 0:
            raise StudyError(f"[method] selector_rounds = {self.selector_rounds}: it cannot be negative.")
        if not self.selector_lr > 0:
            raise StudyError(f"[method] selector_lr = {self.selector_lr}: it must be positive.")
        check_choices(self, "method", selector_training=self.trainings, route=ROUTES)
        if self.closed and self.selector_rounds:
            raise StudyError(f"[method] selector_rounds = {self.selector_rounds}: a regression needs no rounds.")

    @property
    def closed(self) -> bool:
        """Whether the selector has a closed form."""
        return self.selector_training == CLOSED

    def targets(self, site: Site, models: Models) -> dict[str, int]:
        """The selector's target for every training case; empty if the method has none."""
        return {}

    @abstractmethod
    def selector_loss(self, site: Site, memory: Any, output: Tensor, batch: Batch) -> Tensor:
        """The selector's loss on a batch."""

    @abstractmethod
    def predictor(self, task: Task, released: Any) -> Predictor:
        """The predictor for a release with a selector."""

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_sites(roster, local, "a super model")
        if self.closed:
            feature_count(task)
        return weak_pull(self.pull, roster)

    def phases(self, rounds: int) -> list[Phase]:
        if self.closed:
            after = [Phase(LOSSES, 1, counts=False, from_best=True), Phase(STRENGTH, 1, counts=False)]
            return [Phase("models", rounds), *after]
        extra = self.selector_rounds or max(1, rounds // 3)
        if extra >= rounds:
            raise StudyError(f"[method] selector_rounds = {extra} leaves no round of {rounds} for the models.")
        return [Phase("models", rounds - extra), Phase("selector", extra, from_best=True)]

    def remember(self, site: Site) -> Memory:
        return self.Memory(None, {})

    def start(self, task: Task, roster: Roster) -> Server:
        model = task.initial()
        n = {name: card.n for name, card in roster.items()}
        selector = None if self.closed else task.initial("selector", labels=[GLOBAL, *roster])
        return self.Server(model, dict.fromkeys(roster, model), selector, False, None, (), n)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        if round.phase == "models":
            return self.Downlink(server.global_, server.personal[site.name], None, None, None)
        models = Models(server.global_, server.personal) if site.name not in server.holders else None
        if self.closed:
            return self.Downlink(None, None, models, None, None, server.regression)
        state = server.selector_state if self.selector_training == "moments" else None
        return self.Downlink(None, None, models, server.selector, state)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        if round.phase == "models":
            return self._train_models(site, memory, got, round)
        if got.models is not None:
            memory = self.Memory(got.models, {} if self.closed else self.targets(site, got.models))
        assert memory.models is not None
        if self.closed:
            return self._for_regression(site, memory.models, got.regression, round), memory
        labels = [GLOBAL, *site.roster]
        assert got.selector is not None

        def loss(output: Any, batch: Batch) -> Tensor:
            return self.selector_loss(site, memory, output, batch)

        training, lr = self.selector_training, self.selector_lr
        job = Job(got.selector, kind="selector", labels=labels, loss=loss, step=training == "paper", lr=lr)
        done = fit(site, {"selector": job}, round)["selector"]
        selector, state = selector_reply(training, done, got.selector, got.selector_state, lr)
        return self.Uplink(None, None, selector, state, True, done.loss, done.steps), memory

    def _for_regression(self, site: Site, models: Models, found: Regression | None, round: Round) -> Uplink:
        if round.phase == LOSSES:
            return self._with_models(sums=loss_sums(site, models))
        assert found is not None
        scores, cases = scores_by_strength(site, models, LossForecast(found), self.route == "volume")
        return self._with_models(scores=scores, cases=cases)

    def _with_models(self, **sent: Any) -> Uplink:
        """The reply of a site that has the models and trained nothing."""
        return self.Uplink(None, None, None, None, True, 0.0, 0, **sent)

    def _train_models(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        assert got.global_ is not None
        assert got.personal is not None
        done = fit(site, {"global": Job(got.global_), "personal": Job(got.personal)}, round, memory.states)
        own = done["personal"]
        uplink = self.Uplink(done["global"].weights, own.weights, None, None, False, own.loss, own.steps)
        return uplink, self.Memory(None, {}, states=done.states)

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        return starting_parts(sent, self.selector_training)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        if round.phase == "models":
            personal = pulled({k: r.personal for k, r in replies.items()}, self.pull)  # type: ignore[misc]
            models: dict[SiteName, Any] = {name: reply.global_ for name, reply in replies.items()}
            global_ = self.average(models, server.n, server.global_)
            return replace(server, global_=global_, personal={**server.personal, **personal})
        holders = tuple(sorted({*server.holders, *(name for name, reply in replies.items() if reply.holds)}))
        if self.closed:
            return replace(server, regression=self._regression(server, replies, round), routes=True, holders=holders)
        assert server.selector is not None
        sent = {name: (reply.selector, reply.selector_state) for name, reply in replies.items()}
        selector, state = merged_selector(
            self.selector_training, server.selector, server.selector_state, sent, server.n, self.selector_lr
        )
        return replace(server, selector=selector, routes=True, selector_state=state, holders=holders)

    def _regression(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Regression | None:
        if round.phase == LOSSES:
            sums = [replies[name].sums for name in sorted(replies)]
            return regression([part for part in sums if part is not None], 1 + len(server.personal))
        strength = chosen_strength([(replies[name].scores, replies[name].cases) for name in sorted(replies)])
        found = server.regression
        return found if found is None or strength is None else replace(found, strength=strength)

    def release(self, server: Server, site: SiteCard | None) -> Release:
        selector = server.selector if server.routes else None
        home = site.name if site else ""
        return self.Release(server.global_, server.personal, selector, home, server.regression)

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        if released.selector is not None or released.regression is not None:
            return self.predictor(task, released)
        own = released.personal.get(released.home)
        others = [] if own is None else [OneModel(task, own, "personal", released.home)]
        return WithOthers(OneModel(task, released.global_, "global"), others)

    def keep(self, best: Best, now: Best) -> Best:
        """Keep each model's own best round in phase "models", and the best super model in phase "selector"."""
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
        return Best(replace(best.server, **changed), valid, now.merged)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        if round.phase == "models":
            model = task.shape()
            return self.Uplink(model, model, None, None, False, 0.0, 0)
        if self.closed:
            return self._blank_regression(task, roster, round)
        selector = task.shape("selector", labels=[GLOBAL, *roster])
        return self.Uplink(None, None, selector, blank_state(self.selector_training, selector), True, 0.0, 0)

    def _blank_regression(self, task: Task, roster: Roster, round: Round) -> Uplink:
        if round.phase == STRENGTH:
            return self._with_models(scores=(0.0,) * len(STRENGTHS), cases=CasesOf("valid"))
        return self._with_models(sums=blank_sums(task, roster))
