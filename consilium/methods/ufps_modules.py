"""UFPS's own four modules, each a table of a study below [method]. The fifth, `teachers`, is in methods/teachers.py.

A start is a share of the rounds below 1, or from 1 up the number of the round; the defaults are the paper's shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from consilium.errors import StudyError
from consilium.fields import check_below_one, check_choices, check_from_zero
from consilium.learning.noisy_labels import reverse_factor
from consilium.learning.sharp_steps import STRATEGIES, Climb
from consilium.learning.uncertainty import SCHEDULERS, Scheduler
from consilium.methods.fedasam import check_ascent
from consilium.methods.teachers import TEACHER
from consilium.site import Round

MAIN_TEACHERS = ("intersection", "global", "pretrained")
PARTS = ("decoder", "encoder", "whole", "none")


@dataclass(frozen=True)
class LabelNoise:
    """`[method.noise]`, aRCE: the reverse cross entropy against wrong labels (Eq. 9)."""

    arce: float = 0.01  # factor of the adaptive reverse cross entropy; 0: none
    growth: float = 20.0  # of its exponent: the larger, the later it counts; 0: a fixed factor
    start: float = 0.4  # aRCE starts

    def __post_init__(self) -> None:
        check_from_zero(self, "method.noise", "arce", "growth")
        _check_starts(self, "method.noise", ("start",))

    def factor(self, round: Round) -> float:
        """The factor of the reverse cross entropy in a round."""
        return self.arce * reverse_factor(round.step, round.total, self.growth) if begun(self.start, round) else 0.0


@dataclass(frozen=True)
class TeacherUncertainty:
    """`[method.uncertainty]`: WS weights cases (Eq. 8, Note S8), UA averages models (Eq. 7), both by uncertainty."""

    scheduler: str = "tail-shift"  # WS, loss weights by uncertainty; "base-decrement", "round-trip", "none"
    weigh_from: float = 0.02  # WS starts
    weigh_until: float = 0.4  # WS ends
    tail: float = 0.7  # 𝒯, the quantile of uncertainty above which cases are the tail
    base: float = 1.0  # α of base decrement
    blend: float = 0.7  # β of the round trip
    width: float = 0.28  # ρ of the round trip
    parts: str = "decoder"  # UA, averaged by trust; "encoder", "whole", "none"
    trust_from: float = 0.6  # UA starts
    tau_mean: float = 0.0  # τ_μ of UA; 0: the mean of the sites' μ
    tau_variance: float = 0.0  # τ_σ of UA; 0: the mean of the sites' σ

    def __post_init__(self) -> None:
        section = "method.uncertainty"
        check_choices(self, section, scheduler=(*SCHEDULERS, "none"), parts=PARTS)
        check_from_zero(self, section, "tau_mean", "tau_variance", "base")
        _check_starts(self, section, ("weigh_from", "weigh_until", "trust_from"))
        _check_shares(self, section, ("tail", "blend"))
        if not self.width > 0:
            raise StudyError(f"[{section}] width = {self.width}: it must be positive.")

    def weighs(self, round: Round) -> bool:
        return self.scheduler != "none" and begun(self.weigh_from, round) and not begun(self.weigh_until, round)

    def trusts(self, round: Round) -> bool:
        return self.parts != "none" and begun(self.trust_from, round)

    def schedule(self, kind: str = "") -> Scheduler:
        """The weights of cases; of another `kind` with the same fields."""
        return Scheduler(kind or self.scheduler, self.tail, self.base, self.blend, self.width)

    def progress(self, round: Round) -> float:
        """r / R of the schedule: 1 in its last round."""
        return min(1.0, (round.step + 1) / max(1, first_step(self.weigh_until, round.total)))


@dataclass(frozen=True)
class MainTeacher:
    """`[method.main_teacher]`, GMT: the global model labels, refined by the teachers (Eq. 5)."""

    labels: str = "intersection"  # where both agree; "global": the global model's; "pretrained": GMT is off
    start: float = 0.6  # GMT starts
    when: str = "round"  # "match": not before the global model scores as well as the teacher at every site
    agreement: float = 0.8  # v: the share of the global model's foreground on which the teachers must agree
    guard: bool = True  # teachers label an organ that the global model has not learned yet; not in the paper

    def __post_init__(self) -> None:
        section = "method.main_teacher"
        check_choices(self, section, labels=MAIN_TEACHERS, when=("round", "match"))
        _check_starts(self, section, ("start",))
        _check_shares(self, section, ("agreement",))

    @property
    def used(self) -> bool:
        """Whether the global model becomes a teacher at some time."""
        return self.labels != "pretrained"

    def labels_now(self, round: Round, matched: bool) -> bool:
        """Whether it labels in this round; `matched`: it has scored as well as the teacher at every site."""
        return self.used and begun(self.start, round) and (self.when == "round" or matched)


@dataclass(frozen=True)
class SharpSteps:
    """`[method.sharpness]`, sUSAM: sharpness-aware steps (Eqs. 10 to 14)."""

    strategy: str = "susam"  # the kind of step from `start` on; "none", or another row of table S8
    start: float = 0.6  # sUSAM starts
    rho: float = 0.7  # ρ, how far the ascent goes
    eta: float = 0.001  # η
    keep_share: float = 0.4  # T_L, the share of parameters that are perturbed
    explore_share: float = 0.1  # T_G, at most this share more, where the sites' masks differ
    momentum: float = 0.9  # α_mo, of the gradients that the sent mask is made of
    mask_every: int = 5  # r_fre: rounds between two updates of the masks

    def __post_init__(self) -> None:
        section = "method.sharpness"
        check_choices(self, section, strategy=(*STRATEGIES, "none"))
        check_ascent(self.rho, self.eta, section)
        _check_starts(self, section, ("start",))
        _check_shares(self, section, ("keep_share", "explore_share"))
        check_below_one(self, section, "momentum")
        if self.mask_every < 1:
            raise StudyError(f"[{section}] mask_every = {self.mask_every}: it must be at least 1.")

    def climbs(self, round: Round) -> bool:
        return self.strategy != "none" and begun(self.start, round)

    def masks(self, round: Round) -> bool:
        """Whether masks are made and sent in this round."""
        return self.strategy == "susam" and self.climbs(round) and self.late(round) % self.mask_every == 0

    def late(self, round: Round) -> int:
        """The number of rounds since it started."""
        return round.step - first_step(self.start, round.total)

    def climb(self) -> Climb:
        return Climb(self.strategy, self.rho, self.eta, self.keep_share, self.explore_share, self.momentum)


def first_step(start: float, total: int) -> int:
    """The step in which a module starts: below 1 a share of the rounds, else the number of a round."""
    return int(start) - 1 if start >= 1 else math.ceil(start * total)


def begun(start: float, round: Round) -> bool:
    """Whether a module has started in a round; none has while teachers are trained."""
    return round.phase != TEACHER and round.step >= first_step(start, round.total)


def _check_starts(module: Any, section: str, names: tuple[str, ...]) -> None:
    check_from_zero(module, section, *names)
    for name in names:
        start = getattr(module, name)
        if start > 1 and start != int(start):
            raise StudyError(f"[{section}] {name} = {start}: give a share of the rounds below 1, or a round's number.")


def _check_shares(module: Any, section: str, names: Iterable[str]) -> None:
    for name in names:
        if not 0 <= getattr(module, name) <= 1:
            raise StudyError(f"[{section}] {name} = {getattr(module, name)}: it must be in [0, 1].")
