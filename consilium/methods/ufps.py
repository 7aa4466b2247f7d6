"""UFPS: one global model from sites that annotate different organs, on labels of teachers that may be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.learning.main_teacher import refined
from consilium.learning.noisy_labels import left_out, reverse_cross_entropy, reverse_factor
from consilium.learning.pseudo_labels import with_truth
from consilium.learning.sharp_steps import STRATEGIES, Climb, Climbed, Loss, Masks, sharp_fit
from consilium.learning.sharpness import blank_mask, disputed, top
from consilium.learning.uncertainty import SCHEDULERS, Scheduler, trust, uncertainty
from consilium.method import LossOfBatch, Maybe, message
from consilium.methods.fedasam import check_ascent
from consilium.methods.pseudo_labelled import DIFFERENCES, PAPER, TEACHER, PseudoLabelled, Teach, own_score
from consilium.methods.selector import check_fields
from consilium.networks.parts import decoder_names
from consilium.site import Batch, Local, Roster, Round, Site, SiteCard, Task
from consilium.weights import SiteName, mean

GMT = ("intersection", "global", "pretrained")
PARTS = ("decoder", "encoder", "whole", "none")
STARTS = ("warmup", "ws_end", "arce_from", "ua_from", "gmt_from", "sharp_from")


@dataclass(frozen=True)
class UFPS(PseudoLabelled):
    """One global model from sites that annotate different organs: teachers' labels, doubted, and flat minima.

    A start is a share of the rounds below 1, or from 1 up the number of the round; the defaults are the paper's shares.
    """

    scheduler: str = "tail-shift"  # WS, loss weights by uncertainty; "base-decrement", "round-trip", "none"
    arce: float = 0.01  # of the adaptive reverse cross entropy; 0: none
    arce_growth: float = 20.0  # of its exponent: the larger, the later it counts; 0: a fixed factor
    parts: str = "decoder"  # UA, averaged by trust; "encoder", "whole", "none"
    gmt: str = "intersection"  # GMT, the main teacher from gmt_from on; "global"; "pretrained": the teachers alone
    sharpness: str = "susam"  # how sites step from sharp_from on; "none", or another way of table S8
    warmup: float = 0.02  # WS starts
    ws_end: float = 0.4  # WS ends
    arce_from: float = 0.4  # aRCE starts
    ua_from: float = 0.6  # UA starts
    gmt_from: float = 0.6  # GMT starts
    sharp_from: float = 0.6  # sUSAM starts
    tail: float = 0.7  # 𝒯, the quantile of uncertainty above which cases are the tail
    base: float = 1.0  # α of base decrement
    blend: float = 0.7  # β of the round trip
    width: float = 0.28  # ρ of the round trip
    tau_mean: float = 0.0  # τ_μ of UA; 0: the mean of the sites' μ
    tau_variance: float = 0.0  # τ_σ of UA; 0: the mean of the sites' σ
    agreement: float = 0.8  # v: the share of the global model's foreground that the teachers must share
    gmt_guard: bool = True  # an organ the global model lags behind in is labelled by its teachers
    gmt_start: str = "round"  # "match": from gmt_from on, once the global model scores as the teachers do at every site
    rho: float = 0.7  # ρ, how far the ascent goes
    eta: float = 0.001  # η
    keep_share: float = 0.4  # T_L, the share of parameters that are perturbed
    explore_share: float = 0.1  # T_G, at most so many more where the sites' masks differ
    momentum: float = 0.9  # α_mo, of the gradients behind the mask a site sends
    mask_every: int = 5  # r_fre: rounds between two updates of the masks

    paper: ClassVar[str] = PAPER
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "Voxels on which the main teacher and the teachers disagree are left out of the loss; the paper does not say.",
        "Unless gmt_guard = false, teachers go on labelling an organ of which the global model finds too little.",
        "Temperatures of UA follow the sites' own values: the printed ones belong to another entropy.",
        "Momentum is of gradients' magnitudes; masks, the explored part included, are kept until the next update.",
        "The round trip of the third scheduler comes back; β, ρ and the amplitude are those of the published code.",
    )
    hears_doubt: ClassVar[bool] = True

    @message
    class Server(PseudoLabelled.Server):
        trusted: tuple[str, ...] = ()  # tensors that are averaged by trust
        disputed: Tensor | None = None  # M_G
        matched: tuple[SiteName, ...] = ()  # sites where the global model scores as well as the teacher

    @message
    class Downlink(PseudoLabelled.Downlink):
        disputed: Tensor | None = None
        gmt: bool = False  # the global model is the main teacher

    @message
    class Uplink(PseudoLabelled.Uplink):
        uncertainty_mean: float | None = None  # μ, of the site's uncertainty bank
        uncertainty_variance: float | None = None  # σ
        mask: Tensor | None = None  # M_{L,mo}: one bit per parameter
        matches: bool = False  # with gmt_start = "match": here the global model scores as the site's teacher does

    @message
    class Memory(PseudoLabelled.Memory):
        bank: Tensor | None = None  # the uncertainty of every case every time it was seen
        momentum: Tensor | None = None  # G_mo
        chosen: Tensor | None = None  # M_L, as of the last update

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(
            scheduler=(self.scheduler, (*SCHEDULERS, "none")),
            parts=(self.parts, PARTS),
            gmt=(self.gmt, GMT),
            gmt_start=(self.gmt_start, ("round", "match")),
            sharpness=(self.sharpness, (*STRATEGIES, "none")),
        )
        check_ascent(self.rho, self.eta)
        for name in (*STARTS, "arce", "arce_growth", "tau_mean", "tau_variance", "base"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StudyError(f"[method] {name} = {getattr(self, name)}: it must be a number from 0 up.")
        for name in STARTS:
            if getattr(self, name) > 1 and getattr(self, name) != int(getattr(self, name)):
                raise StudyError(
                    f"[method] {name} = {getattr(self, name)}: give a share of the rounds below 1, or a round's number."
                )
        for name in ("tail", "blend", "agreement", "keep_share", "explore_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise StudyError(f"[method] {name} = {getattr(self, name)}: it must be in [0, 1].")
        if not 0 <= self.momentum < 1:
            raise StudyError(f"[method] momentum = {self.momentum}: it must be in [0, 1).")
        if not self.width > 0:
            raise StudyError(f"[method] width = {self.width}: it must be positive.")
        if self.mask_every < 1:
            raise StudyError(f"[method] mask_every = {self.mask_every}: it must be at least 1.")

    def check(self, task: Task, roster: Roster, local: Local) -> list[str]:
        warnings = super().check(task, roster, local)
        if self.sharpness != "none" and local.precision == "float16":
            raise StudyError("[local] precision = 'float16' cannot be scaled over two steps; use 'bfloat16'.")
        self._trusted(task)  # refuses a network without a known decoder
        return warnings

    # ------------------------------------------------------------------------------------ what is on in a round

    def _on(self, start: str, round: Round) -> bool:
        return round.phase != TEACHER and round.step >= _begin(getattr(self, start), round.total)

    def _weighs(self, round: Round) -> bool:
        return self.scheduler != "none" and self._on("warmup", round) and not self._on("ws_end", round)

    def _trusts(self, round: Round) -> bool:
        return self.parts != "none" and self._on("ua_from", round)

    def _climbs(self, round: Round) -> bool:
        return self.sharpness != "none" and self._on("sharp_from", round)

    def _masks(self, round: Round) -> bool:
        """The round is one in which masks are made and sent."""
        late = round.step - _begin(self.sharp_from, round.total)
        return self.sharpness == "susam" and self._climbs(round) and late % self.mask_every == 0

    def _main_teacher(self, server: Any, round: Round) -> bool:
        everywhere = self.gmt_start == "round" or len(server.matched) == len(server.n)
        return self.gmt != "pretrained" and self._on("gmt_from", round) and everywhere

    # ------------------------------------------------------------------------------------ the verbs

    def start(self, task: Task, roster: Roster) -> Any:
        return replace(super().start(task, roster), trusted=self._trusted(task))

    def _trusted(self, task: Task) -> tuple[str, ...]:
        if self.parts == "none":
            return ()
        names = tuple(task.shape())
        if self.parts == "whole":
            return names
        with torch.device("meta"):
            decoder = decoder_names(task.network())
        return tuple(name for name in names if (name in decoder) == (self.parts == "decoder"))

    def sent(self, server: Any, site: SiteCard, round: Round) -> dict[str, Any]:
        more = {"disputed": server.disputed, "gmt": self._main_teacher(server, round)}
        return {**super().sent(server, site, round), **more}

    def learn(self, site: Site, memory: Any, got: Any, teach: Teach, round: Round) -> tuple[Any, Any]:
        bank = torch.empty(0) if memory.bank is None else memory.bank
        seen: list[Tensor] = []
        ready = self._ready(site, got, teach, round, bank, seen)
        done: Any
        if self._climbs(round):
            done = self._climbed(site, memory, got, ready, round)
            memory = replace(memory, chosen=done.chosen, momentum=done.momentum, states=done.states)
        else:
            job = Job(got.global_, loss=lambda output, batch: ready(batch)(output))
            fits = fit(site, {"global": job}, round, memory.states)
            done, memory = fits["global"], replace(memory, states=fits.states)
        bank = torch.cat([bank, *seen])
        uplink = self.reply(done.weights, done.loss, done.steps)
        if self._trusts(round):
            variance = float(bank.double().var(correction=0))
            uplink = replace(uplink, uncertainty_mean=float(bank.mean()), uncertainty_variance=variance)
        if self._masks(round):
            uplink = replace(uplink, mask=top(memory.momentum, self.keep_share).cpu())
        if self.gmt_start == "match" and self.gmt != "pretrained" and not got.gmt:
            score = own_score(site, lambda images: site.task.infer(got.global_, images))
            uplink = replace(uplink, matches=score is None or score >= memory.school.valid)
        return uplink, replace(memory, bank=bank)

    def _climbed(self, site: Site, memory: Any, got: Any, ready: Callable[[Batch], Loss], round: Round) -> Climbed:
        climb = Climb(self.sharpness, self.rho, self.eta, self.keep_share, self.explore_share, self.momentum)
        late = round.step - _begin(self.sharp_from, round.total)
        drawn = round.index - late % self.mask_every
        masks = Masks(late % self.mask_every == 0, drawn, memory.chosen, got.disputed, memory.momentum)
        return sharp_fit(site, got.global_, round, climb, ready, masks, memory.states)

    def _ready(
        self, site: Site, got: Any, teach: Teach, round: Round, bank: Tensor, seen: list[Tensor]
    ) -> Callable[[Batch], Loss]:
        """A batch's loss, its labels made once; the cases' uncertainty goes to `seen`."""
        task = site.task
        own = torch.tensor([False, *(label in site.card.labels for label in task.labels)], device=site.device)
        scheduler = Scheduler(self.scheduler, self.tail, self.base, self.blend, self.width)
        progress = min(1.0, (round.step + 1) / max(1, _begin(self.ws_end, round.total)))
        growing = reverse_factor(round.step, round.total, self.arce_growth)
        factor = self.arce * growing if self._on("arce_from", round) else 0.0

        def ready(batch: Batch) -> Loss:
            target, said = teach(batch)
            scores = uncertainty(said.entropy, said.everything, len(own))
            seen.append(scores.cpu())
            weights = scheduler.weights(scores, bank.to(scores.device), progress) if self._weighs(round) else None
            ignored = None
            complete = target.labels is None
            if got.gmt and complete:
                decided = task.infer(got.global_, batch.images).argmax(1).to(said.others)
                drawn = own & ~batch.bare[:, None]
                labels, doubtful = refined(
                    said, decided, drawn, self.agreement, self.gmt == "intersection", self.gmt_guard
                )
                target = replace(target, truth=with_truth(labels, batch.truth))
                ignored = doubtful & (batch.truth == 0)

            def loss(output: Any) -> Tensor:
                if ignored is not None:
                    output = left_out(output, ignored)
                value = task.loss(output, target, weights=weights)
                return value + factor * reverse_cross_entropy(output, target.truth) if factor and complete else value

            return loss

        return ready

    def trained_loss(self, site: Site, server: Any, memory: Any | None, round: Round) -> LossOfBatch:
        """With the uncertainty weights, aRCE and the main teacher of the round."""
        teach = self._teach_of(site, server)
        if teach is None:
            return super().trained_loss(site, server, memory, round)
        bank = torch.empty(0) if memory is None or memory.bank is None else memory.bank
        return self._ready(site, self.send(server, site.card, round), teach, round, bank, seen=[])

    def averaged(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        models = {name: reply.global_ for name, reply in replies.items()}
        global_ = self.average(models, server.n)
        if self._trusts(round):
            shares = trust(
                {name: reply.uncertainty_mean for name, reply in replies.items()},
                {name: reply.uncertainty_variance for name, reply in replies.items()},
                self.shares_of(server.n),
                self.tau_mean,
                self.tau_variance,
            )
            chosen = set(server.trusted)
            parts = {name: model.split(chosen.__contains__)[0] for name, model in models.items()}
            by_trust = mean(parts, shares)
            global_ = type(global_).over({k: by_trust[k] if k in chosen else t for k, t in global_.items()})
        masks = {name: reply.mask for name, reply in sorted(replies.items()) if reply.mask is not None}
        return replace(
            server,
            global_=global_,
            disputed=disputed(masks) if masks else server.disputed,
            matched=tuple(sorted({*server.matched, *(name for name, reply in replies.items() if reply.matches)})),
        )

    def blank(self, task: Task, roster: Roster, card: SiteCard, round: Round) -> Any:
        number, mask = 0.0 if self._trusts(round) else None, blank_mask(task) if self._masks(round) else None
        more: dict[str, Any] = {"uncertainty_mean": number, "uncertainty_variance": number, "mask": mask}
        if round.step == 0:  # a site that waits for a teacher has none of it
            more = {name: None if part is None else Maybe(part) for name, part in more.items()}
        return replace(super().blank(task, roster, card, round), **more)


def _begin(start: float, total: int) -> int:
    """The step in which something starts: a share of the rounds below 1, or a round's number from 1 up."""
    return int(start) - 1 if start >= 1 else math.ceil(start * total)
