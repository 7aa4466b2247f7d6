"""`[privacy]`, and its first unit: a site's updates are clipped, and noise is added before they leave.

The noise is added at the site, so it protects against everyone, the server included. What a site sends in one round
changes by at most twice the clip when all its training cases are exchanged for others; with noise of `noise` clips per
value the rounds together are one Gaussian mechanism of mean 2 √rounds / noise (μ-GDP, Dong, Roth & Su 2022), whose
exact ε for a δ is known (Balle & Wang 2018). docs/privacy.md says what this covers and what not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import get_type_hints

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.fields import check_choices, check_from_zero
from consilium.local_training import Local
from consilium.method import Method
from consilium.privacy.accounting import ACCOUNTANTS, Use, composed, epsilon, noise_for, require_opacus
from consilium.privacy.keyed import normal
from consilium.privacy.sampling import sampling
from consilium.site import Round
from consilium.tree import Packet
from consilium.weights import Weights

__all__ = ["Noise", "NotFinite", "Privacy", "epsilon", "is_finite", "normal", "refuse_not_finite"]
_COVERED = (Weights, Weights | None, Tensor)  # parts of a reply that noise can be added to
_PUBLIC = ("steps", "loss")  # steps follow from the number of cases, which is public; the loss is left out


UNITS = ("site", "patient")


@dataclass(frozen=True)
class Privacy:
    """`[privacy]`: noise on everything a site learned from its cases."""

    clip: float = 0.0  # site: the longest update that leaves, all its parts together; patient: their longest gradient
    noise: float = 0.0  # standard deviation per value, in clips; 0: no noise, no clipping
    delta: float = 1e-5  # δ at which ε is told
    unit: str = "site"  # who is protected: all cases of a site at once, by noise on updates; "patient": DP-SGD
    epsilon: float = 0.0  # patient: every site takes the noise that keeps the whole run within this ε, instead of noise
    accountant: str = "rdp"  # patient: what counts ε; "prv" is tighter and slower
    statistics: float = 8.0  # patient: noise of every other statistic that leaves, in the most one patient can change
    feature_clip: float = 1.0  # patient: the longest features of an image, where their sums leave

    def __post_init__(self) -> None:
        check_choices(self, "privacy", unit=UNITS, accountant=ACCOUNTANTS)
        if not (0 <= self.noise < math.inf and 0 <= self.clip < math.inf):
            raise StudyError("[privacy] clip and noise must be numbers from 0 up.")
        check_from_zero(self, "privacy", "epsilon", "statistics", "feature_clip")
        if self.epsilon and self.unit != "patient":
            raise StudyError(
                "[privacy] epsilon is a target for unit = 'patient'; with unit = 'site' give clip and noise."
            )
        if self.epsilon and self.noise:
            raise StudyError("[privacy] epsilon and noise both decide how much noise there is; give one of them.")
        if (self.on or self.unit == "patient") != (self.clip > 0):
            raise StudyError("[privacy] clip and noise go together: set both, or neither.")
        if self.unit == "patient" and not self.on:
            raise StudyError("[privacy] unit = 'patient' needs a target epsilon, or noise; give one of them.")
        if self.unit == "patient" and not (self.statistics and self.feature_clip):
            raise StudyError("[privacy] statistics and feature_clip must be above 0: sums would leave without noise.")
        if not 0 < self.delta < 1:
            raise StudyError(f"[privacy] delta = {self.delta}: it must be in (0, 1).")

    @property
    def on(self) -> bool:
        return self.noise > 0 or self.epsilon > 0

    @property
    def by_update(self) -> bool:
        """Whether noise is added to the update of a whole site."""
        return self.on and self.unit == "site"

    @property
    def by_patient(self) -> bool:
        """Whether sites train by DP-SGD."""
        return self.on and self.unit == "patient"

    # ------------------------------------------------------------------------------------ how much is spent

    def told(self, rounds: int, delta: float | None = None) -> float:
        """The ε of a site that answers in all rounds, of its updates as a whole (unit = "site")."""
        return composed([self.update] * rounds, delta or self.delta) if self.by_update else math.inf

    @property
    def update(self) -> Use:
        """One update of a whole site: exchanging its cases moves it by two clips at most."""
        return Use(self.noise / 2)

    def uses(self, noise: float, cases: int, local: Local, passes: int, statistics: int = 0) -> list[Use]:
        """What a site with so many training cases spends on some passes over them (unit = "patient")."""
        rate, steps = sampling(cases, local)
        return [Use(noise, rate, steps * passes), *([Use(self.statistics)] * statistics)]

    def noise_at(self, cases: int, local: Local, passes: int, statistics: int = 0) -> float:
        """The noise of every draw at a site with so many training cases: the study's, or what its target ε needs."""
        if not self.epsilon:
            return self.noise
        return _noise(self, cases, local, passes, statistics)

    def epsilon_at(self, cases: int, local: Local, passes: int, statistics: int = 0) -> float:
        """The ε of such a site after all passes."""
        noise = self.noise_at(cases, local, passes, statistics)
        return composed(self.uses(noise, cases, local, passes, statistics), self.delta, self.accountant)

    # ------------------------------------------------------------------------------------ what cannot be private

    def check(self, name: str, method: Method, local: Local) -> None:
        """Refuse what would let something of the training cases out without noise."""
        if self.by_update:
            self._check_updates(name, method, local)
        if self.by_patient:
            require_opacus()
            if why := method.not_private():
                raise StudyError(
                    f"[privacy] unit = 'patient': '{name}' cannot be trained so, because {why}; docs/differential-"
                    "privacy.md lists the methods that can, fedavg is one."
                )
            if local.precision == "float16":
                raise StudyError(
                    "[local] precision = 'float16' scales losses, and patients' gradients are clipped at their own "
                    "length; use 'float32' or 'bfloat16' with [privacy]."
                )

    def _check_updates(self, name: str, method: Method, local: Local) -> None:
        if method.headline != "global":
            raise StudyError(
                f"[privacy] noise: with '{name}' sites use models of their own that no noise was added to, and their "
                "scores would tell of them; use a method with one shared model, such as fedavg, or unit = 'patient'."
            )
        hints = get_type_hints(method.Uplink)
        for field in dataclasses.fields(method.Uplink):
            if hints[field.name] not in _COVERED and field.name not in _PUBLIC:
                raise StudyError(f"[privacy] noise: '{name}' also sends '{field.name}', which noise does not cover.")
        if local.batchnorm != "average":
            raise StudyError(
                f"[privacy] noise: [local] batchnorm = '{local.batchnorm}' keeps normalisation without noise, and "
                "scores would tell of it; use 'average'."
            )


@lru_cache(maxsize=256)
def _noise(privacy: Privacy, cases: int, local: Local, passes: int, statistics: int) -> float:
    return noise_for(
        privacy.epsilon,
        privacy.delta,
        lambda noise: privacy.uses(noise, cases, local, passes, statistics),
        privacy.accountant,
    )


@dataclass(frozen=True)
class Noise:
    """Clips and covers the updates of one site; `secret` is known to it alone, or the noise could be taken off."""

    privacy: Privacy
    secret: bytes

    def over(self, reply: Packet, order: Packet, run: str, round: Round) -> Packet:
        """The reply with its update clipped and noise added to every value.

        The noise is drawn from the secret, the round, the order and the update itself: an order that is repeated gets
        the same answer, so that repeating it tells nothing new, and no noise is ever used for two different updates.
        """
        if not self.privacy.by_update:
            return reply
        before = {path: order.tensors[path] for path in reply.tensors if path in order.tensors}
        moved = {p: m for p, tensor in reply.tensors.items() if (m := _moved(p, tensor, before)) is not None}
        length = math.sqrt(math.fsum((change * change).sum().item() for change in moved.values()))
        if not math.isfinite(length):  # or no clip would be small enough
            raise NotFinite("the length of an update is not finite, so it cannot be clipped")
        shrink = min(1.0, self.privacy.clip / length) if length else 1.0
        seed = "|".join(
            [run, str(round.index), Weights.over(before).digest, Weights.over(moved).digest, repr(self.privacy)]
        )
        key = hmac.new(self.secret, seed.encode(), hashlib.sha256).digest()
        tensors = dict(before)  # counters go back as they came
        for path, change in moved.items():
            noise = self.privacy.noise * self.privacy.clip * normal(key + path.encode(), change.numel())
            covered = change * shrink + noise.view(change.shape)
            start = before[path].double() if path in before else 0.0
            tensors[path] = (covered + start).to(reply.tensors[path].dtype)
        return Packet(reply.header, {path: tensors[path] for path in reply.tensors})


class NotFinite(Exception):
    """A message that came in or was to leave holds values that are not finite."""


def refuse_not_finite(packet: Packet, what: str) -> None:
    """`NotFinite` where a tensor holds NaN or infinity: a length taken of it would be no length."""
    if not all(map(is_finite, packet.blocks())):
        path = next(path for path, tensor in packet.tensors.items() if not is_finite(tensor))
        raise NotFinite(f"'{path}' of {what} holds values that are not finite")


def is_finite(tensor: Tensor) -> bool:
    """A finite sum shows that all values are; only an overflow needs the slower look."""
    return not tensor.is_floating_point() or math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def _moved(path: str, tensor: Tensor, before: Mapping[str, Tensor]) -> Tensor | None:
    if path in before and (before[path].shape, before[path].dtype) != (tensor.shape, tensor.dtype):
        raise StudyError(f"[privacy] noise: '{path}' leaves in another shape or type than it came in.")
    if tensor.is_floating_point():
        return tensor.double() - before[path].double() if path in before else tensor.double()
    if path not in before:
        raise StudyError(f"[privacy] noise: '{path}' is made of whole numbers, which noise does not cover.")
    return None
