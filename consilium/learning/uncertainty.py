"""The teachers' uncertainty of a case (UFPS, Eq. 6), and loss weights (Eq. 8, Note S8) and shares (Eq. 7) from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consilium.weights import SiteName, normalised

SCHEDULERS = ("tail-shift", "base-decrement", "round-trip")


def uncertainty(entropy: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Eq. 6, U_j per case: the entropy (batch, *spatial) averaged over each class's voxels, then over all N_c classes.

    `labels` (batch, *spatial) are the merged teachers' before ground truth. The + 1 keeps a class without voxels at 0.
    """
    flat, where = entropy.flatten(1), labels.flatten(1)
    total = torch.zeros(len(flat), device=flat.device)
    for c in range(classes):
        chosen = (where == c).float()
        total += (flat * chosen).sum(1) / (chosen.sum(1) + 1)
    return total / classes


@dataclass(frozen=True)
class Scheduler:
    """w(U_j): the loss weight of a case during the schedule, relative to the uncertainty bank before the round."""

    kind: str  # of SCHEDULERS
    tail: float = 0.7  # 𝒯: cases above this quantile are the tail
    base: float = 1.0  # α of base decrement, the base at its end
    blend: float = 0.7  # β of the round trip: the part that is not Gaussian
    width: float = 0.28  # ρ of the round trip: width of its Gaussian, and by 1/(√(2π) ρ) its height

    def weights(self, scores: Tensor, bank: Tensor, progress: float) -> Tensor:
        """Weights (cases,) for these `scores`, never negative, 1 if the bank is empty; `progress` is r / R."""
        if not len(bank):
            return torch.ones_like(scores)
        low, high, mean = bank.min(), bank.max(), bank.mean()
        spread = high - low

        def norm(values: Tensor) -> Tensor:
            return (values - mean) / spread if spread > 0 else torch.zeros_like(values)

        edge = torch.quantile(bank.float(), self.tail)  # U_𝒯
        place = norm(scores)
        if self.kind == "tail-shift":
            weights = 2 - torch.exp(place - progress * (scores > edge))
        elif self.kind == "base-decrement":
            weights = 2 - ((self.base - math.e) * progress + math.e) ** place
        elif not spread > 0:
            weights = torch.ones_like(scores)  # all uncertainties are equal
        else:
            # the centre moves from the most certain case to the threshold and back; as printed, it does not return
            centre = norm(low) + (norm(edge) - norm(low)) * (1 - abs(2 * progress - 1))
            bell = torch.exp(-((place - centre) ** 2) / (2 * self.width**2)) / (math.sqrt(2 * math.pi) * self.width)
            weights = (1 - self.blend) * bell + self.blend * (2 - torch.exp(place))
        return weights.clamp_min(0)


def trust(
    means: Mapping[SiteName, float],
    variances: Mapping[SiteName, float],
    n: Mapping[SiteName, float],
    tau_mean: float = 0.0,
    tau_variance: float = 0.0,
) -> dict[SiteName, float]:
    """Eq. 7: the mean of softmax(−μ/τ_μ), softmax(−σ/τ_σ) and n_k/n over the sites that answered; it sums to one.

    A temperature of 0 means the mean of the sites' own values, so only their ratios matter.
    """
    calm, even = _cold(means, tau_mean), _cold(variances, tau_variance)
    size = normalised({name: n[name] for name in means})
    return {name: (calm[name] + even[name] + size[name]) / 3 for name in means}


def _cold(values: Mapping[SiteName, float], tau: float) -> dict[SiteName, float]:
    tau = tau or math.fsum(values.values()) / len(values)
    least = min(values.values())
    return normalised({name: math.exp(-(value - least) / tau) if tau else 1.0 for name, value in values.items()})
