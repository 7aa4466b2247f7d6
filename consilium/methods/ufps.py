"""UFPS: one global model from sites that annotate different organs, trained on uncertain labels of teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.fit import Fit, Job, fit
from consilium.learning.main_teacher import refined
from consilium.learning.noisy_labels import left_out, reverse_cross_entropy
from consilium.learning.pseudo_labels import with_truth
from consilium.learning.sharp_steps import Climbed, Loss, Masks, sharp_fit
from consilium.learning.sharpness import blank_mask, disputed, top
from consilium.learning.uncertainty import trust, uncertainty
from consilium.local_training import Local
from consilium.method import LossOfBatch, Maybe, message
from consilium.methods.pseudo_labelled import (
    DIFFERENCES,
    PAPER,
    Fields,
    LabelBatch,
    PseudoLabelled,
    model_of,
    models_of,
)
from consilium.methods.teachers import own_score
from consilium.methods.ufps_modules import LabelNoise, MainTeacher, SharpSteps, TeacherUncertainty
from consilium.networks.parts import decoder_names
from consilium.ranges import Range
from consilium.site import Round, Site
from consilium.task import Task
from consilium.weights import SiteName, Weights, mean

Uncertainty = Annotated[float, Range(-1e-3, 100)]  # the mean or the variance of an entropy


@dataclass(frozen=True)
class UFPS(PseudoLabelled):
    """One global model from sites that annotate different organs: uncertain pseudo labels, sharpness-aware steps."""

    noise: LabelNoise = field(default_factory=LabelNoise)
    uncertainty: TeacherUncertainty = field(default_factory=TeacherUncertainty)
    main_teacher: MainTeacher = field(default_factory=MainTeacher)
    sharpness: SharpSteps = field(default_factory=SharpSteps)

    paper: ClassVar[str] = PAPER
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "Voxels on which the main teacher and the teachers disagree are left out of the loss; the paper does not say.",
        "Unless guard = false, teachers keep labelling an organ of which the global model finds too little.",
        "Temperatures of UA follow the sites' own values: the printed ones belong to another entropy.",
        "Momentum uses gradient magnitudes; masks, also their explored part, are kept until the next update.",
        "The third scheduler returns to its start; β, ρ and the amplitude are those of the published code.",
    )
    uses_entropy: ClassVar[bool] = True

    @message
    class Server(PseudoLabelled.Server):
        trusted: tuple[str, ...] = ()  # tensors that are averaged by trust
        disputed: Tensor | None = None  # M_G
        matched: tuple[SiteName, ...] = ()  # sites at which the global model scores as well as the site's teacher

    @message
    class Downlink(PseudoLabelled.Downlink):
        disputed: Tensor | None = None
        gmt: bool = False  # the global model is the main teacher

    @message
    class Uplink(PseudoLabelled.Uplink):
        uncertainty_mean: Uncertainty | None = None  # μ, of the site's uncertainty bank
        uncertainty_variance: Uncertainty | None = None  # σ
        mask: Tensor | None = None  # M_{L,mo}: one bit per parameter
        matches: bool = False  # with main_teacher.when = "match": the global model scores as well as the site's teacher

    @message
    class Memory(PseudoLabelled.Memory):
        bank: Tensor | None = None  # the uncertainty of every case every time it was seen
        momentum: Tensor | None = None  # G_mo
        chosen: Tensor | None = None  # M_L, as of the last update

    def refuse(self, task: Task, local: Local) -> None:
        if self.sharpness.strategy != "none" and local.precision == "float16":
            raise StudyError("[local] precision = 'float16' cannot be scaled over two steps; use 'bfloat16'.")
        self._trusted(task)  # rejects a network without a known decoder

    # ------------------------------------------------------------------------------------ the server's messages

    def first(self, task: Task) -> Fields:
        return {"trusted": self._trusted(task)}

    def _trusted(self, task: Task) -> tuple[str, ...]:
        """The names of the tensors that UA averages by trust."""
        parts, names = self.uncertainty.parts, tuple(task.shape())
        if parts in ("none", "whole"):
            return names if parts == "whole" else ()
        with torch.device("meta"):
            decoder = decoder_names(task.network())
        return tuple(name for name in names if (name in decoder) == (parts == "decoder"))

    def also_sent(self, server: Server, round: Round) -> Fields:
        everywhere = len(server.matched) == len(server.n)
        return {"disputed": server.disputed, "gmt": self.main_teacher.labels_now(round, everywhere)}

    # ------------------------------------------------------------------------------------ at the site

    def learn(
        self, site: Site, memory: Memory, got: Downlink, teach: LabelBatch, round: Round
    ) -> tuple[Uplink, Memory]:
        bank = torch.empty(0) if memory.bank is None else memory.bank
        seen: list[Tensor] = []
        ready = self._ready(site, got, teach, round, bank, seen)
        done, memory = self._trained(site, memory, got, ready, round)
        bank = torch.cat([bank, *seen])
        uplink = self.Uplink(done.weights, None, done.loss, done.steps)
        if self.uncertainty.trusts(round):
            variance = float(bank.double().var(correction=0))
            uplink = replace(uplink, uncertainty_mean=float(bank.mean()), uncertainty_variance=variance)
        if self.sharpness.masks(round):
            assert memory.momentum is not None
            uplink = replace(uplink, mask=top(memory.momentum, self.sharpness.keep_share).cpu())
        if self.main_teacher.used and self.main_teacher.when == "match" and not got.gmt:
            score = own_score(site, lambda images: site.task.infer(model_of(got), images))
            uplink = replace(uplink, matches=score is None or score >= memory.teaching.valid)
        return uplink, replace(memory, bank=bank)

    def _trained(
        self, site: Site, memory: Memory, got: Downlink, ready: Callable[[Batch], Loss], round: Round
    ) -> tuple[Fit | Climbed, Memory]:
        """One local pass of plain or sharpness-aware steps; returns the trained model and the new memory."""
        if not self.sharpness.climbs(round):
            job = Job(model_of(got), loss=lambda output, batch: ready(batch)(output))
            fits = fit(site, {"global": job}, round, memory.states)
            return fits["global"], replace(memory, states=fits.states)
        waited = self.sharpness.late(round) % self.sharpness.mask_every
        masks = Masks(waited == 0, round.index - waited, memory.chosen, got.disputed, memory.momentum)
        done = sharp_fit(site, model_of(got), round, self.sharpness.climb(), ready, masks, memory.states)
        return done, replace(memory, chosen=done.chosen, momentum=done.momentum, states=done.states)

    def _ready(
        self, site: Site, got: Downlink, teach: LabelBatch, round: Round, bank: Tensor, seen: list[Tensor]
    ) -> Callable[[Batch], Loss]:
        """The loss of a batch, whose labels are made once; adds the cases' uncertainty to `seen`."""
        task, main = site.task, self.main_teacher
        own = torch.tensor([False, *(label in site.card.labels for label in task.labels)], device=site.device)
        scheduler, progress = self.uncertainty.schedule(), self.uncertainty.progress(round)
        factor = self.noise.factor(round)

        def ready(batch: Batch) -> Loss:
            target, pseudo = teach(batch)
            scores = uncertainty(pseudo.entropy, pseudo.everything, len(own))
            seen.append(scores.cpu())
            weights = None
            if self.uncertainty.weighs(round):
                weights = scheduler.weights(scores, bank.to(scores.device), progress)
            ignored = None
            complete = target.labels is None
            if got.gmt and complete:
                decided = task.infer(model_of(got), batch.images).argmax(1).to(pseudo.others)
                drawn = own & ~batch.bare[:, None]
                meets = main.labels == "intersection"
                labels, doubtful = refined(pseudo, decided, drawn, main.agreement, meets, main.guard)
                target = replace(target, truth=with_truth(labels, batch.truth))
                ignored = doubtful & (batch.truth == 0)

            def loss(output: Any) -> Tensor:
                if ignored is not None:
                    output = left_out(output, ignored)
                value = task.loss(output, target, weights=weights)
                return value + factor * reverse_cross_entropy(output, target.truth) if factor and complete else value

            return loss

        return ready

    def taught_loss(
        self, site: Site, server: Server, memory: Memory | None, teach: LabelBatch, round: Round
    ) -> LossOfBatch:
        """With the uncertainty weights, aRCE and the main teacher of the round."""
        bank = torch.empty(0) if memory is None or memory.bank is None else memory.bank
        return self._ready(site, self.send(server, site.card, round), teach, round, bank, seen=[])

    # ------------------------------------------------------------------------------------ at the server

    def also_averages(self) -> str:
        if self.uncertainty.parts == "none":
            return ""
        return "by trust, which a liar decides itself; set [method.uncertainty] parts = 'none' with it"

    def averaged(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        models = models_of(replies)
        global_ = self.average(models, server.n, server.global_)
        if self.uncertainty.trusts(round):
            global_ = self._by_trust(server, replies, models, global_)
        masks = {name: reply.mask for name, reply in sorted(replies.items()) if reply.mask is not None}
        return replace(
            server,
            global_=global_,
            disputed=disputed(masks) if masks else server.disputed,
            matched=tuple(sorted({*server.matched, *(name for name, reply in replies.items() if reply.matches)})),
        )

    def _by_trust(
        self, server: Server, replies: Mapping[SiteName, Uplink], models: Mapping[SiteName, Weights], rest: Weights
    ) -> Weights:
        """UA: average the trusted tensors by trust; the `rest` is unchanged."""
        shares = trust(
            {name: reply.uncertainty_mean for name, reply in replies.items() if reply.uncertainty_mean is not None},
            {name: r.uncertainty_variance for name, r in replies.items() if r.uncertainty_variance is not None},
            self.shares_of(server.n),
            self.uncertainty.tau_mean,
            self.uncertainty.tau_variance,
        )
        chosen = set(server.trusted)
        parts = {name: model.split(chosen.__contains__)[0] for name, model in models.items()}
        by_trust = mean(parts, shares)
        return Weights.over({k: by_trust[k] if k in chosen else t for k, t in rest.items()})

    def expected(self, task: Task, round: Round) -> Fields:
        number = 0.0 if self.uncertainty.trusts(round) else None
        mask = blank_mask(task) if self.sharpness.masks(round) else None
        more: Fields = {"uncertainty_mean": number, "uncertainty_variance": number, "mask": mask}
        if round.step == 0:  # a site that waits for a teacher sends none of these
            more = {name: None if part is None else Maybe(part) for name, part in more.items()}
        return more
