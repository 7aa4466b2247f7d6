"""Differential privacy of a site's training cases: its updates are clipped, and noise is added before they leave.

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
from typing import get_type_hints

import numpy as np
import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.method import Method
from consilium.site import Local, Round
from consilium.tree import Packet
from consilium.weights import Weights

_COVERED = (Weights, Weights | None, Tensor)  # parts of a reply that noise can be added to
_PUBLIC = ("steps", "loss")  # steps follow from the number of cases, which is public; the loss is left out


@dataclass(frozen=True)
class Privacy:
    """`[privacy]`: noise on everything a site learned from its cases."""

    clip: float = 0.0  # the longest update that leaves a site, all its parts together
    noise: float = 0.0  # standard deviation per value, in clips; 0: no noise, no clipping
    delta: float = 1e-5  # δ at which ε is told

    def __post_init__(self) -> None:
        if not (0 <= self.noise < math.inf and 0 <= self.clip < math.inf):
            raise StudyError("[privacy] clip and noise must be numbers from 0 up.")
        if (self.noise > 0) != (self.clip > 0):
            raise StudyError("[privacy] clip and noise go together: without either there is no privacy to speak of.")
        if not 0 < self.delta < 1:
            raise StudyError(f"[privacy] delta = {self.delta}: it must be in (0, 1).")

    @property
    def on(self) -> bool:
        return self.noise > 0

    def epsilon(self, rounds: int, delta: float | None = None) -> float:
        """What a site that answers in all rounds has given away at most."""
        return epsilon(2 * math.sqrt(rounds) / self.noise, delta or self.delta) if self.on else math.inf

    def check(self, name: str, method: Method, local: Local) -> None:
        """Refuse what would let something of the training cases out without noise."""
        if not self.on:
            return
        if method.headline != "global":
            raise StudyError(
                f"[privacy] noise: with '{name}' sites use models of their own that no noise was added to, and their "
                "scores would tell of them; use a method with one shared model, such as fedavg."
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


def epsilon(mean: float, delta: float) -> float:
    """The smallest ε of a Gaussian mechanism whose two distributions lie `mean` standard deviations apart, for a δ.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) falls with ε, so halving finds it.
    """
    low, high = 0.0, 1.0
    while _delta(mean, high) > delta:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(mean, middle) > delta else (low, middle)
    return high


def _delta(mean: float, epsilon: float) -> float:
    from scipy.special import log_ndtr, ndtr  # late: few studies need it

    return float(ndtr(mean / 2 - epsilon / mean) - math.exp(epsilon + log_ndtr(-mean / 2 - epsilon / mean)))


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
        if not self.privacy.on:
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
    for path, tensor in packet.tensors.items():
        if not is_finite(tensor):
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


def normal(key: bytes, count: int) -> Tensor:
    """Normal values (float64) that nobody without the key can foresee: SHAKE-256, then Box and Muller."""
    pairs = -(-count // 2)
    bits = np.frombuffer(hashlib.shake_256(key).digest(pairs * 16), dtype="<u8") >> np.uint64(11)
    flat = (bits + 0.5) * 2.0**-53  # inside (0, 1)
    radius, angle = np.sqrt(-2 * np.log(flat[:pairs])), 2 * np.pi * flat[pairs:]
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])
