"""FedSM: a super model of one global model, a personal model per site, and a selector that routes each image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.fit import Fit, Job, OptimizerState, fit
from consilium.learning.server_step import adam_step
from consilium.method import Best, Method, Phase, message
from consilium.methods.routing import SuperModel, calibration, chosen_confidence
from consilium.site import Batch, Local, Predictor, Roster, Round, Site, SiteCard, Task
from consilium.weights import SiteName, Weights, mean


@dataclass(frozen=True)
class FedSM(Method):
    """Algorithms 1 and 2: w_g and w_s are averaged by cases, personal models are pulled softly towards each other."""

    pull: float = 0.7  # λ in (0, 1]: how much of its own model a site keeps; 1/K is uniform averaging, 1 local training
    confidence: float | str = "tuned"  # γ in [0, 1]: at or below it, an image goes to the global model
    selector_lr: float = 1e-3  # η_s
    optimizer_state: str = "kept"  # of the global and the personal model, at the site; or "fresh" every round
    best: str = "each"  # every model keeps its own best round on validation; "joint": one round for all

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "super"
    differences: ClassVar[tuple[str, ...]] = (
        "The selector takes one synchronised Adam step per round, on the gradient averaged over all sites' cases: a "
        "site holds a single class, and stepping on every batch, as Algorithm 1 is written, drives it to a constant.",
        "γ is chosen on the sites' validation cases; the paper does not say how its γ was tuned for the main tables.",
        "The paper does not say which optimiser state survives a round; here both segmentation models keep theirs.",
    )

    @message
    class Server:
        global_: Weights  # w_g
        personal: Mapping[SiteName, Weights]  # w_{p,k}
        selector: Weights  # w_s
        selector_state: OptimizerState | None
        confidence: float  # γ
        n: Mapping[SiteName, int]  # training cases; the sites' order is the selector's class order

    @message
    class Release:
        global_: Weights
        personal: Mapping[SiteName, Weights]
        selector: Weights
        confidence: float
        home: SiteName  # the site that uses it; empty for a hospital outside

    @message
    class Downlink:
        global_: Weights | None
        personal: Weights | None  # the site's own
        selector: Weights | None
        trial: FedSM.Release | None  # in the calibrate phase: the super model to try thresholds on

    @message
    class Uplink:
        global_: Weights | None
        personal: Weights | None
        selector_gradient: Weights | None  # mean over the site's training cases
        scores: tuple[float, ...]  # in the calibrate phase: the sum of validation scores for every γ of the grid
        cases: int  # and how many cases that is
        loss: float
        steps: int

    @message
    class Memory:
        global_state: OptimizerState | None
        personal_state: OptimizerState | None

    def __post_init__(self) -> None:
        if not 0 < self.pull <= 1:
            raise StudyError(f"[method] pull = {self.pull}: λ must be in (0, 1].")
        if isinstance(self.confidence, str) and self.confidence != "tuned":
            raise StudyError(f"[method] confidence = {self.confidence!r}: γ is a number in [0, 1], or 'tuned'.")
        if not isinstance(self.confidence, str) and not 0 <= self.confidence <= 1:
            raise StudyError(f"[method] confidence = {self.confidence}: γ must be in [0, 1], or 'tuned'.")
        if self.optimizer_state not in ("kept", "fresh"):
            raise StudyError(f"[method] optimizer_state = {self.optimizer_state!r}: it must be one of kept, fresh.")
        if self.best not in ("each", "joint"):
            raise StudyError(f"[method] best = {self.best!r}: it must be one of each, joint.")
        if not self.selector_lr > 0:
            raise StudyError(f"[method] selector_lr = {self.selector_lr}: it must be positive.")

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        if len(roster) < 2:
            raise StudyError("FedSM needs at least two sites; with one, use 'local'.")
        if self.pull < 1 / len(roster):
            return [
                f"pull = {self.pull} is below 1/K = {1 / len(roster):.3f}: the other sites then weigh more in a "
                "personal model than its own site."
            ]
        return []

    def phases(self, rounds: int) -> list[Phase]:
        calibrate = [Phase("calibrate", 1, counts=False, from_best=True)] if self.confidence == "tuned" else []
        return [Phase("train", rounds), *calibrate]

    def remember(self, site: Site) -> Memory:
        return self.Memory(None, None)

    def start(self, task: Task, roster: Roster) -> Server:
        gamma = 0.0 if isinstance(self.confidence, str) else float(self.confidence)
        model, selector = task.initial(), task.initial("selector", labels=list(roster))
        n = {name: card.n for name, card in roster.items()}
        return self.Server(model, dict.fromkeys(roster, model), selector, None, gamma, n)

    def send(self, server: Server, site: SiteCard, round: Round) -> Downlink:
        if round.phase == "calibrate":
            return self.Downlink(None, None, None, self.release(server, site))
        return self.Downlink(server.global_, server.personal[site.name], server.selector, None)

    def train(self, site: Site, memory: Memory, got: Downlink, round: Round) -> tuple[Uplink, Memory]:
        if got.trial is not None:
            scores, cases = calibration(self.deploy(site.task, memory, got.trial), site)
            return self.Uplink(None, None, None, scores, cases, 0.0, 0), memory
        assert got.global_ is not None and got.personal is not None and got.selector is not None
        kept = self.optimizer_state == "kept"
        jobs = {
            "global": Job(got.global_, state=memory.global_state if kept else None),
            "personal": Job(got.personal, state=memory.personal_state if kept else None),
            "selector": selector_job(got.selector, site),
        }
        done = fit(site, jobs, round)
        uplink = self.Uplink(
            done["global"].weights, done["personal"].weights, done["selector"].gradient, (), 0,
            done["personal"].loss, done["personal"].steps,
        )  # fmt: skip
        return uplink, self.Memory(_state(done["global"], kept), _state(done["personal"], kept))

    def merge(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        if round.phase == "calibrate":
            gamma = chosen_confidence([(r.scores, r.cases) for _, r in sorted(replies.items())])
            return self._with(server, confidence=server.confidence if gamma is None else gamma)
        gradient = mean({name: r.selector_gradient for name, r in replies.items()}, server.n)  # type: ignore[misc]
        selector, state = adam_step(server.selector, gradient, server.selector_state, self.selector_lr)
        return self._with(
            server,
            global_=mean({name: r.global_ for name, r in replies.items()}, server.n),  # type: ignore[misc]
            personal={**server.personal, **pulled({k: r.personal for k, r in replies.items()}, self.pull)},  # type: ignore[misc]
            selector=selector,
            selector_state=state,
        )

    def _with(self, server: Server, **changed: Any) -> Server:
        return self.Server(**{**vars(server), **changed})

    def release(self, server: Server, site: SiteCard | None) -> Release:
        home = site.name if site else ""
        return self.Release(server.global_, server.personal, server.selector, server.confidence, home)

    def deploy(self, task: Task, memory: Memory | None, released: Release) -> Predictor:
        return SuperModel(
            task, released.global_, released.personal, released.selector, released.confidence, released.home
        )

    def keep(self, best: Best, now: Best) -> Best:
        """Each model keeps its own best round: w_g by pooled validation, w_{p,k} by its site's, w_s by routing."""
        if self.best == "joint":
            return super().keep(best, now)
        old, new = best.server, now.server
        deciding = {"global:pooled", "super:routed", *(f"personal/{name}" for name in new.personal)}
        valid = {key: value for key, value in best.valid.items() if key in deciding}

        def better(key: str, ties_to_later: bool = False) -> bool:
            if key not in now.valid:
                return False
            gain = now.valid[key].value - valid[key].value if key in valid else 1.0
            if gain > 0 or (ties_to_later and gain == 0):
                valid[key] = now.valid[key]
                return True
            return False

        # a selector that routes as well a round later is surer of itself, and γ is about how sure it is
        newer = better("super:routed", ties_to_later=True)
        server = self._with(
            old,
            global_=new.global_ if better("global:pooled") else old.global_,
            personal={k: w if better(f"personal/{k}") else old.personal[k] for k, w in new.personal.items()},
            selector=new.selector if newer else old.selector,
            selector_state=new.selector_state if newer else old.selector_state,
        )
        return Best(server, valid, now.merged)

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Uplink:
        if round.phase == "calibrate":
            return self.Uplink(None, None, None, (), 0, 0.0, 0)
        model, selector = task.shape(), task.shape("selector", labels=list(roster))
        return self.Uplink(model, model, selector, (), 0, 0.0, 0)


def selector_job(selector: Weights, site: Site) -> Job:
    """Equation 2: the right answer for every image of a site is the site itself."""
    sites = list(site.roster)
    own = sites.index(site.card.name)

    def loss(output: Any, batch: Batch) -> Tensor:
        target = torch.full((len(batch.cases),), own, device=output.device)
        return torch.nn.functional.cross_entropy(output.float(), target)

    return Job(selector, kind="selector", labels=sites, loss=loss, step=False)


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


def _state(done: Fit, kept: bool) -> OptimizerState | None:
    return done.state if kept else None
