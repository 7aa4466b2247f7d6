"""FedSM: a super model of one global model, a personal model per site, and a selector that routes each image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from consilium.errors import StudyError
from consilium.fields import check_choices
from consilium.learning.discriminant import Discriminant, FeatureSums, RoutingSums
from consilium.learning.fit import fit
from consilium.local_training import Local
from consilium.method import Best, CasesOf, Method, OptimizerState, Phase, message
from consilium.methods.discriminant_selector import DiscriminantSelector
from consilium.methods.finetuned import ADAPT
from consilium.methods.personaliser import PERSONALISERS, Personaliser, personaliser
from consilium.methods.routing import NOTHING, ROUTES, Calibration, SuperModel, calibration, chosen_confidence
from consilium.methods.selector import TRAININGS, NetworkSelector, Selector, check_sites, starting_parts
from consilium.methods.shares import WithShares
from consilium.predictor import OneModel, Predictor, WithOthers
from consilium.site import Count, Loss, Roster, Round, Site, SiteCard
from consilium.task import Task
from consilium.weights import SiteName, Weights

SELECTOR_FIELDS = ("selector", "selector_state", "discriminant", "router")  # of the server: from the same round


@dataclass(frozen=True)
class FedSM(WithShares, Method):
    """A global model, a personal model per site (SoftPull), and a selector that routes each image (Algorithms 1, 2)."""

    pull: float = 0.7  # λ in (0, 1]: how much of its own model a site keeps; 1/K is uniform averaging, 1 local training
    confidence: float | str = "tuned"  # γ in [0, 1]: at or below it, an image goes to the global model
    tuned_by: str = "sites"  # γ is chosen by the best mean over "sites", or over "pooled" cases as version 0.1 did
    needed_gain: float = 1.0  # in standard errors: what γ must gain over the global model on validation, or it is 1
    selector_training: str = "discriminant"  # closed form; of a network: "synchronised", "moments", "paper" (fails)
    selector_lr: float = 1e-3  # η_s, of a network
    outlier_quantile: float = 0.999  # of validation distances: an image beyond it at all sites is an outlier; 1: none
    score_selector: bool = False  # with the discriminant: score the super model during training too
    route: str = "slice"  # volumes trained as slices: slice by slice, or one model for all slices of a "volume"
    best: str = "each"  # every model keeps its own best round on validation; "joint": one round for all
    personal: str = "softpull"  # "finetune", "apfl", "perfedavg", "pfedme": personal models by another method
    personal_fields: Mapping[str, Any] = field(default_factory=dict)  # the fields of that other method

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "super"
    differences: ClassVar[tuple[str, ...]] = (
        "The selector is a linear discriminant on the global model's features, in closed form. The paper trains a "
        "network; selector_training = 'synchronised' does, with one Adam step per round on the gradient averaged over "
        "all sites' cases. A site holds a single class, so steps on every batch, as in Algorithm 1, drive it to a "
        "constant.",
        "γ is chosen on the sites' validation cases, and is 1 unless its gain there exceeds its standard error. The "
        "paper does not say how its γ was tuned for the main tables.",
        "The paper does not say whether optimiser state is kept between rounds; here the study decides.",
    )

    @message
    class Server:
        global_: Weights  # w_g
        personal: Mapping[SiteName, Weights]  # w_{p,k}
        selector: Weights | None  # w_s, if it is a network
        selector_state: OptimizerState | None
        shared: Weights | None  # the common model of Per-FedAvg or pFedMe, if personal models come from them
        confidence: float  # γ
        n: Mapping[SiteName, int]  # training cases; the sites' order is the selector's class order
        discriminant: Discriminant | None = None  # the selector in closed form, after its phases
        router: Weights | None = None  # the model that computes its features, if not the global one

    @message
    class Release:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights | None
        confidence: float
        home: SiteName  # the site that uses it; empty for a hospital outside
        discriminant: Discriminant | None = None
        router: Weights | None = None  # the model that computes its features, if not the global one

    @message
    class Downlink:
        global_: Weights | None
        personal: Weights | None  # the site's own
        selector: Weights | None
        selector_state: OptimizerState | None  # with selector_training = "moments"
        shared: Weights | None
        trial: FedSM.Release | None  # in the calibrate phase: the super model to try thresholds on
        discriminant: Discriminant | None = None  # in the routing phase: to test on validation cases

    @message
    class Uplink:
        global_: Weights | None
        personal: Weights | None
        selector: Weights | None  # its mean gradient if synchronised, else its trained weights
        selector_state: OptimizerState | None
        shared: Weights | None
        loss: Loss  # of the personal model where it is trained here, else of the global one
        selector_loss: Loss
        steps: Count
        features: FeatureSums | None = None  # once, after training: number, mean, scatter of its cases' features
        routing: RoutingSums | None = None  # once: sums of log losses and distances of validation cases
        calibration: Calibration | None = None  # once: for every γ of a grid, sums of scores of validation cases

    @message
    class Memory(Method.Memory):
        own: Weights | None  # APFL's v
        mix: float  # APFL's α

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pull <= 1:
            raise StudyError(f"[method] pull = {self.pull}: λ must be in (0, 1].")
        if self.confidence != "tuned" and (isinstance(self.confidence, str) or not 0 <= self.confidence <= 1):
            raise StudyError(f"[method] confidence = {self.confidence!r}: γ must be a number in [0, 1], or 'tuned'.")
        if not 0 <= self.needed_gain <= 100:
            raise StudyError(f"[method] needed_gain = {self.needed_gain}: it must be in [0, 100] standard errors.")
        if not 0.5 <= self.outlier_quantile <= 1:
            raise StudyError(f"[method] outlier_quantile = {self.outlier_quantile}: it must be in [0.5, 1].")
        if self.score_selector and self.selector_training != "discriminant":
            raise StudyError("[method] score_selector is for selector_training = 'discriminant'; others are scored.")
        check_choices(
            self,
            "method",
            selector_training=("discriminant", *TRAININGS),
            tuned_by=("sites", "pooled"),
            route=ROUTES,
            best=("each", "joint"),
            personal=PERSONALISERS,
        )
        if not self.selector_lr > 0:
            raise StudyError(f"[method] selector_lr = {self.selector_lr}: it must be positive.")
        _ = self.personaliser  # rejects wrong personal_fields

    @property
    def personaliser(self) -> Personaliser:
        """The part that makes the personal models."""
        return personaliser(self.personal, self.pull, self.personal_fields)

    @property
    def selector(self) -> Selector:
        """The part that learns to route."""
        if self.selector_training == "discriminant":
            return DiscriminantSelector(self.outlier_quantile, self.route, self.score_selector)
        return NetworkSelector(self.selector_training, self.selector_lr)

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_sites(roster, local, "FedSM")
        self.selector.check(task)
        return self.personaliser.check(roster)

    def not_private(self) -> str:
        if self.personal != "softpull":
            return f"personal = '{self.personal}' takes steps of its own that no noise is added to"
        return "score_selector sends sums in the rounds too" if self.score_selector else ""

    def passes(self, rounds: int, epochs: int) -> int:
        return rounds

    def noised_statistics(self) -> int:
        return int(self.selector_training == "discriminant")

    def phases(self, rounds: int) -> list[Phase]:
        adapt = [ADAPT] if self.personaliser.adapts else []
        last = [*self.selector.phases, *(["calibrate"] if self.confidence == "tuned" else [])]
        # the first phase after training starts from the best models, the others from its result
        after = [Phase(name, 1, counts=False, from_best=not adapt and i == 0) for i, name in enumerate(last)]
        return [Phase("train", rounds), *adapt, *after]

    def remember(self, site: Site) -> Memory:
        return self.Memory(*self.personaliser.remember(site.task))

    def start(self, task: Task, roster: Roster) -> Server:
        gamma = 0.0 if isinstance(self.confidence, str) else float(self.confidence)
        model = task.initial()
        n = {name: card.n for name, card in roster.items()}
        parts = {"selector_state": None, **self.personaliser.start(model), **self.selector.start(task, roster)}
        return self.Server(global_=model, personal=dict.fromkeys(roster, model), confidence=gamma, n=n, **parts)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        if round.phase == "calibrate":
            return self._downlink(trial=self.release(server, site))
        if round.phase == "adapt":
            return self._downlink(global_=server.global_, shared=server.shared)
        selector = self.selector
        sent = {"global_": server.global_, **selector.send(server, round.phase)}
        if round.phase in selector.phases:
            return self._downlink(**sent)
        return self._downlink(**sent, **self.personaliser.send(server, site))

    def _downlink(self, **sent: Any) -> Downlink:
        nothing: dict[str, Any] = dict.fromkeys(f.name for f in fields(self.Downlink))
        return self.Downlink(**{**nothing, **sent})

    # ------------------------------------------------------------------------------------ at the site

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        if got.trial is not None:
            unit = self.route if self.tuned_by == "pooled" else site.task.decides  # 0.1 judged as it routed
            found = calibration(self.deploy(site.task, memory, got.trial), site, unit)
            return self._uplink(calibration=found), memory
        selector, personaliser = self.selector, self.personaliser
        if round.phase == "adapt":
            return self._uplink(personal=personaliser.adapt(site, got, round)), memory
        if round.phase in selector.phases:
            return self._uplink(**selector.reply(site, got, {}, round)), memory
        done = fit(site, {**selector.jobs(site, got), **personaliser.jobs(got)}, round, memory.states)
        own = personaliser.train(site, memory, got, done, round)
        kept = self.Memory(own.own, own.mix, states={**done.states, **own.states})
        return self._uplink(**selector.reply(site, got, done, round), **own.sent), kept

    def _uplink(self, **sent: Any) -> Uplink:
        nothing: dict[str, Any] = {
            "global_": None, "personal": None, "selector": None, "selector_state": None, "shared": None,
            "features": None, "routing": None, "calibration": None, "loss": 0.0, "selector_loss": 0.0, "steps": 0,
        }  # fmt: skip
        return self.Uplink(**{**nothing, **sent})

    # ------------------------------------------------------------------------------------ at the server

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        return starting_parts(sent, self.selector_training)

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        if round.phase == "calibrate":
            found: list[Any] = [reply.calibration for _, reply in sorted(replies.items())]
            gamma = chosen_confidence(found, self.tuned_by, self.needed_gain)
            return replace(server, confidence=server.confidence if gamma is None else gamma)
        if round.phase in self.selector.phases:
            return replace(server, **self.selector.merge(server, replies, round))
        if round.phase == "adapt":
            adapted: dict[SiteName, Any] = {name: reply.personal for name, reply in replies.items()}
            return replace(server, personal={**server.personal, **adapted})
        models: dict[SiteName, Any] = {name: reply.global_ for name, reply in replies.items()}
        global_ = self.average(models, server.n, server.global_)
        personal = self.personaliser.merge(server, replies, global_)
        return replace(server, global_=global_, **personal, **self.selector.merge(server, replies, round))

    def release(self, server: Server, site: SiteCard | None) -> Release:
        home = site.name if site else ""
        selector = (server.selector, server.confidence, home, server.discriminant, server.router)
        return self.Release(server.global_, server.personal, *selector)

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        router = self.selector.router(task, released)
        if router is None:  # there is no selector yet: the models alone
            own = [released.home] if released.home in released.personal else []
            others = [OneModel(task, released.personal[name], "personal", name) for name in own]
            return WithOthers(OneModel(task, released.global_, "global"), others)
        parts = (released.global_, released.personal, router, released.confidence, released.home)
        return SuperModel(task, *parts, route=self.route)

    def keep(self, best: Best, now: Best) -> Best:
        """Each model keeps its own best round: w_g by pooled validation, w_{p,k} by its site's, w_s by routing."""
        if self.best == "joint":
            return self._jointly(best, now)
        old, new = best.server, now.server
        deciding = {"global:pooled", "super:routed", *(f"personal/{name}" for name in new.personal)}
        valid = {key: value for key, value in best.valid.items() if key in deciding}

        def better(key: str, ties_to_later: bool = False) -> bool:
            if key not in now.valid:
                return key not in valid  # a site without validation cases keeps its latest model
            gain = now.valid[key].value - valid[key].value if key in valid else 1.0
            if gain > 0 or (ties_to_later and gain == 0):
                valid[key] = now.valid[key]
                return True
            return False

        # a later selector that routes equally well is more certain, and γ is a threshold on certainty
        newer = better("super:routed", ties_to_later=True)
        common = better("global:pooled")
        server = replace(
            old,
            global_=new.global_ if common else old.global_,
            shared=new.shared if common else old.shared,
            personal={k: w if better(f"personal/{k}") else old.personal[k] for k, w in new.personal.items()},
            **{name: getattr(new if newer else old, name) for name in SELECTOR_FIELDS},
        )
        return Best(server, valid, now.merged)

    def _jointly(self, best: Best, now: Best) -> Best:
        """One round for all models: the best of the super model, or of the personal models while it has no scores."""
        key = next((key for key in ("super", "personal") if key in now.valid), "")
        return best if key in best.valid and best.valid[key].value >= now.valid[key].value else now

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        if round.phase == "calibrate":
            cases = CasesOf("valid")
            return self._uplink(calibration=replace(NOTHING, cases=cases, wholes=cases))
        model = task.shape()
        if round.phase == "adapt":
            return self._uplink(personal=model)
        selector = self.selector.blank(task, roster, round)
        if round.phase in self.selector.phases:
            return self._uplink(**selector)
        return self._uplink(global_=model, **selector, **self.personaliser.blank(model))
