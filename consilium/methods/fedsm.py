"""FedSM: a super model of one global model, a personal model per site, and a selector that routes each image."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium import tree
from consilium.errors import StudyError
from consilium.fields import fill
from consilium.learning.discriminant import Discriminant, FeatureSums, RoutingSums
from consilium.learning.fit import Job, fit
from consilium.method import Best, Method, OptimizerState, Phase, message
from consilium.methods.apfl import APFL, apfl_round
from consilium.methods.discriminant_selector import DiscriminantSelector
from consilium.methods.fedavg_finetune import FedAvgFinetune
from consilium.methods.finetuned import ADAPT, finetuned
from consilium.methods.per_fedavg import PerFedAvg, meta_adapted, meta_round
from consilium.methods.pfedme import PFedMe, moreau_round
from consilium.methods.routing import GRID, ROUTES, SuperModel, calibration, chosen_confidence
from consilium.methods.selector import TRAININGS, NetworkSelector, Selector, check_fields, check_sites, weak_pull
from consilium.methods.shares import WithShares
from consilium.site import Local, OneModel, Predictor, Roster, Round, Site, SiteCard, Task, WithOthers
from consilium.weights import SiteName, Weights, mean

PARTNERS: dict[str, type[Method]] = {
    "finetune": FedAvgFinetune,
    "apfl": APFL,
    "perfedavg": PerFedAvg,
    "pfedme": PFedMe,
}  # table 6: personal models by another method; their fields go into `personal_fields`
SELECTOR_FIELDS = ("selector", "selector_state", "discriminant", "router")  # of the server: they are kept together


@dataclass(frozen=True)
class FedSM(WithShares, Method):
    """A global model, a personal model per site (SoftPull), and a selector that routes each image (Algorithms 1, 2)."""

    pull: float = 0.7  # λ in (0, 1]: how much of its own model a site keeps; 1/K is uniform averaging, 1 local training
    confidence: float | str = "tuned"  # γ in [0, 1]: at or below it, an image goes to the global model
    selector_training: str = "synchronised"  # networks; also "moments", "paper" (it fails). "discriminant": closed form
    selector_lr: float = 1e-3  # η_s, of a network
    outlier_quantile: float = 0.999  # of validation distances: who is beyond it at every site is unlike all; 1: nobody
    score_selector: bool = False  # with the discriminant: score the super model on the way too, for curves
    route: str = "volume"  # volumes trained as slices: one model for all slices of a volume, or "slice" by slice
    best: str = "each"  # every model keeps its own best round on validation; "joint": one round for all
    personal: str = "softpull"  # "finetune", "apfl", "perfedavg", "pfedme": personal models by another method
    personal_fields: Mapping[str, Any] = field(default_factory=dict)  # the fields of that other method

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "super"
    differences: ClassVar[tuple[str, ...]] = (
        "The selector takes one synchronised Adam step per round, on the gradient averaged over all sites' cases: a "
        "site holds a single class, and stepping on every batch, as Algorithm 1 is written, drives it to a constant. "
        "Or it is no network but a linear discriminant on the global model's features, made once of sums.",
        "γ is chosen on the sites' validation cases; the paper does not say how its γ was tuned for the main tables.",
        "The paper does not say which optimiser state survives a round; here the study does, for all methods alike.",
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
        discriminant: Discriminant | None = None  # the selector in closed form, once there is one
        router: Weights | None = None  # the model whose features it is of, if not the global one

    @message
    class Release:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights | None
        confidence: float
        home: SiteName  # the site that uses it; empty for a hospital outside
        discriminant: Discriminant | None = None
        router: Weights | None = None  # the model whose features the discriminant is of, if not the global one

    @message
    class Downlink:
        global_: Weights | None
        personal: Weights | None  # the site's own
        selector: Weights | None
        selector_state: OptimizerState | None  # with selector_training = "moments"
        shared: Weights | None
        trial: FedSM.Release | None  # in the calibrate phase: the super model to try thresholds on
        discriminant: Discriminant | None = None  # in the routing phase: to be tried on validation cases

    @message
    class Uplink:
        global_: Weights | None
        personal: Weights | None
        selector: Weights | None  # its mean gradient over the site's training cases; trained, unless synchronised
        selector_state: OptimizerState | None
        shared: Weights | None
        scores: tuple[float, ...]  # in the calibrate phase: the sum of validation scores for every γ of the grid
        cases: int  # and how many cases that is
        loss: float  # of the personal model where it is trained here, else of the global one
        selector_loss: float
        steps: int
        features: FeatureSums | None = None  # once, after training: number, mean, scatter of its cases' features
        routing: RoutingSums | None = None  # once: how sure it was of validation cases, and how far they were, summed

    @message
    class Memory(Method.Memory):
        own: Weights | None  # APFL's v
        mix: float  # APFL's α

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.pull <= 1:
            raise StudyError(f"[method] pull = {self.pull}: λ must be in (0, 1].")
        if isinstance(self.confidence, str) and self.confidence != "tuned":
            raise StudyError(f"[method] confidence = {self.confidence!r}: γ is a number in [0, 1], or 'tuned'.")
        if not isinstance(self.confidence, str) and not 0 <= self.confidence <= 1:
            raise StudyError(f"[method] confidence = {self.confidence}: γ must be in [0, 1], or 'tuned'.")
        if not 0.5 <= self.outlier_quantile <= 1:
            raise StudyError(f"[method] outlier_quantile = {self.outlier_quantile}: it must be in [0.5, 1].")
        if self.score_selector and self.selector_training != "discriminant":
            raise StudyError("[method] score_selector is for selector_training = 'discriminant'; others are scored.")
        check_fields(
            selector_training=(self.selector_training, ("discriminant", *TRAININGS)),
            route=(self.route, ROUTES),
            best=(self.best, ("each", "joint")),
            personal=(self.personal, ("softpull", *PARTNERS)),
        )
        if not self.selector_lr > 0:
            raise StudyError(f"[method] selector_lr = {self.selector_lr}: it must be positive.")
        _ = self.partner  # refuses wrong personal_fields

    @property
    def partner(self) -> Any:
        """The method that makes the personal models, if it is not SoftPull."""
        if self.personal == "softpull":
            if self.personal_fields:
                raise StudyError("[method] personal_fields go with another `personal` than softpull.")
            return None
        if "shares" in self.personal_fields:
            raise StudyError("[method] personal_fields: 'shares' is FedSM's own here; write it in [method].")
        try:
            return fill(PARTNERS[self.personal], self.personal_fields, "method")
        except StudyError as error:
            said = str(error).removeprefix("[method] ")
            raise StudyError(f"[method] personal_fields of {self.personal}: {said}") from None

    @property
    def selector(self) -> Selector:
        """The part that learns to route."""
        if self.selector_training == "discriminant":
            return DiscriminantSelector(self.outlier_quantile, self.route, self.score_selector)
        return NetworkSelector(self.selector_training, self.selector_lr)

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        check_sites(roster, local, "FedSM")
        self.selector.check(task)
        return weak_pull(self.pull, roster) if self.personal == "softpull" else []

    def phases(self, rounds: int) -> list[Phase]:
        adapt = [ADAPT] if self.personal in ("finetune", "perfedavg") else []
        last = [*self.selector.phases, *(["calibrate"] if self.confidence == "tuned" else [])]
        # the first phase after training starts from the best models, the others from what it made of them
        after = [Phase(name, 1, counts=False, from_best=not adapt and i == 0) for i, name in enumerate(last)]
        return [Phase("train", rounds), *adapt, *after]

    def remember(self, site: Site) -> Memory:
        apfl = self.personal == "apfl"
        return self.Memory(site.task.initial() if apfl else None, self.partner.mix if apfl else 0.0)

    def start(self, task: Task, roster: Roster) -> Server:
        gamma = 0.0 if isinstance(self.confidence, str) else float(self.confidence)
        model = task.initial()
        nothing = {"selector_state": None, "shared": model if self.personal in ("perfedavg", "pfedme") else None}
        n = {name: card.n for name, card in roster.items()}
        fields = {**nothing, **self.selector.start(task, roster), "confidence": gamma, "n": n}
        return self.Server(global_=model, personal=dict.fromkeys(roster, model), **fields)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        if round.phase == "calibrate":
            return self._downlink(trial=self.release(server, site))
        if round.phase == "adapt":
            return self._downlink(global_=server.global_, shared=server.shared)
        selector = self.selector
        sent = {"global_": server.global_, **selector.send(server, round.phase)}
        if round.phase in selector.phases:
            return self._downlink(**sent)
        own = server.personal[site.name] if self.personal == "softpull" else None
        return self._downlink(**sent, personal=own, shared=server.shared)

    def _downlink(self, **sent: Any) -> Downlink:
        nothing: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(self.Downlink))
        return self.Downlink(**{**nothing, **sent})

    # ------------------------------------------------------------------------------------ at the site

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        if got.trial is not None:
            scores, cases = calibration(self.deploy(site.task, memory, got.trial), site)
            return self._uplink(scores=scores, cases=cases), memory
        assert got.global_ is not None
        if round.phase == "adapt":
            return self._uplink(personal=self._adapted(site, got, round)), memory
        selector = self.selector
        if round.phase in selector.phases:
            return self._uplink(**selector.reply(site, got, {}, round)), memory
        jobs = selector.jobs(site, got)
        if self.personal != "apfl":
            jobs["global"] = Job(got.global_)
        if got.personal is not None:
            jobs["personal"] = Job(got.personal)
        done = fit(site, jobs, round, memory.states)
        states = done.states
        sent = selector.reply(site, got, done, round)
        if first := done.get("personal") or done.get("global"):
            sent |= {"loss": first.loss, "steps": first.steps}
        own, mix = memory.own, memory.mix
        if "global" in done:
            sent["global_"] = done["global"].weights
        if "personal" in done:
            sent["personal"] = done["personal"].weights
        if self.personal == "apfl":
            assert own is not None
            turn = apfl_round(site, got.global_, own, mix, self.partner.adaptive, round, memory.states)
            sent |= {"global_": turn.shared, "personal": turn.personal, "loss": turn.loss, "steps": turn.steps}
            own, mix, states = turn.own, turn.mix, {**states, **turn.states}
        if self.personal == "perfedavg" and got.shared is not None:
            sent["shared"], _, _, more = meta_round(site, got.shared, self.partner, round, memory.states, "shared")
            states |= more
        if self.personal == "pfedme" and got.shared is not None:
            sent["shared"], sent["personal"], _, _ = moreau_round(site, got.shared, self.partner, round)
        return self._uplink(**sent), self.Memory(own, mix, states=states)

    def _adapted(self, site: Site, got: Downlink, round: Round) -> Weights:
        """In the adapt phase: the site's own version of the best common model; the super model needs everyone's."""
        assert got.global_ is not None
        if self.personal == "perfedavg":
            assert got.shared is not None
            return meta_adapted(site, got.shared, self.partner.inner_lr, self.partner.adapt_steps, round)
        return finetuned(site, got.global_, self.partner.finetune_epochs, self.partner.finetune_lr, round).weights

    def _uplink(self, **sent: Any) -> Uplink:
        nothing: dict[str, Any] = {
            "global_": None, "personal": None, "selector": None, "selector_state": None, "shared": None,
            "features": None, "routing": None, "scores": (), "cases": 0, "loss": 0.0, "selector_loss": 0.0, "steps": 0,
        }  # fmt: skip
        return self.Uplink(**{**nothing, **sent})

    # ------------------------------------------------------------------------------------ at the server

    def started_from(self, server: Server, site: SiteCard, sent: Downlink) -> Mapping[str, Weights]:
        parts = dict(tree.split(sent).weights)
        if self.selector_training == "synchronised":  # its gradient comes back, which is a change by itself
            parts.pop("selector", None)
        return parts

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        if round.phase == "calibrate":
            gamma = chosen_confidence([(r.scores, r.cases) for _, r in sorted(replies.items())])
            return self._with(server, confidence=server.confidence if gamma is None else gamma)
        if round.phase in self.selector.phases:
            return self._with(server, **self.selector.merge(server, replies, round))
        personal: dict[SiteName, Any] = {k: r.personal for k, r in replies.items() if r.personal is not None}
        if round.phase == "adapt":
            return self._with(server, personal={**server.personal, **personal})
        global_ = self.average({name: r.global_ for name, r in replies.items()}, server.n)  # type: ignore[misc]
        shared = server.shared
        if shared is not None:
            average = mean({k: r.shared for k, r in replies.items()}, dict.fromkeys(replies, 1.0))  # type: ignore[misc]
            beta = self.partner.server_mix if self.personal == "pfedme" else 1.0
            shared = shared * (1 - beta) + average * beta
        if self.personal == "softpull":
            personal = pulled(personal, self.pull)
        elif self.personal in ("finetune", "perfedavg"):  # until they are adapted
            personal = dict.fromkeys(server.personal, global_ if shared is None else shared)
        changed = self.selector.merge(server, replies, round)
        return self._with(server, global_=global_, personal={**server.personal, **personal}, shared=shared, **changed)

    def _with(self, server: Server, **changed: Any) -> Server:
        return self.Server(**{**vars(server), **changed})

    def release(self, server: Server, site: SiteCard | None) -> Release:
        home = site.name if site else ""
        return self.Release(
            server.global_,
            server.personal,
            server.selector,
            server.confidence,
            home,
            server.discriminant,
            server.router,
        )

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        router = self.selector.router(task, released)
        if router is None:  # the models alone: nobody knows yet which one suits an image
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

        # a selector that routes as well a round later is surer of itself, and γ is about how sure it is
        newer = better("super:routed", ties_to_later=True)
        common = better("global:pooled")
        server = self._with(
            old,
            global_=new.global_ if common else old.global_,
            shared=new.shared if common else old.shared,
            personal={k: w if better(f"personal/{k}") else old.personal[k] for k, w in new.personal.items()},
            **{name: getattr(new if newer else old, name) for name in SELECTOR_FIELDS},
        )
        return Best(server, valid, now.merged)

    def _jointly(self, best: Best, now: Best) -> Best:
        """One round for all models: the best super model's; where it is not scored yet, the best personal models'."""
        key = next((key for key in ("super", "personal") if key in now.valid), "")
        return best if key in best.valid and best.valid[key].value >= now.valid[key].value else now

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        if round.phase == "calibrate":
            return self._uplink(scores=(0.0,) * len(GRID))
        model = task.shape()
        if round.phase == "adapt":
            return self._uplink(personal=model)
        selector = self.selector.blank(task, roster, round)
        if round.phase in self.selector.phases:
            return self._uplink(**selector)
        sent: dict[str, Any] = {"global_": model, **selector}
        if self.personal in ("softpull", "apfl", "pfedme"):
            sent["personal"] = model
        if self.personal in ("perfedavg", "pfedme"):
            sent["shared"] = model
        return self._uplink(**sent)


def pulled(personal: Mapping[SiteName, Weights], pull: float) -> dict[SiteName, Weights]:
    """SoftPull, equation 11: w_k ← λ w_k + (1 − λ)/(K − 1) Σ_{j≠k} w_j; one site alone stays as it is.

    >>> pulled({k: Weights({"w": torch.tensor(x)}) for k, x in zip("abc", (1.0, 2.0, 6.0))}, 0.7)["a"]["w"].item()
    1.899999976158142
    """
    if len(personal) == 1:
        return dict(personal)
    other = (1 - pull) / (len(personal) - 1)
    names = sorted(personal)
    result: dict[SiteName, dict[str, Tensor]] = {name: {} for name in names}
    for key in personal[names[0]]:  # tensor by tensor: every model is read once and held once
        tensors = [personal[name][key] for name in names]
        total = torch.stack(tensors).sum(0) if tensors[0].is_floating_point() else None
        for name, own in zip(names, tensors):
            result[name][key] = own if total is None else own * (pull - other) + total * other
    return {name: Weights.over(tensors) for name, tensors in result.items()}
