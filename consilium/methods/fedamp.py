"""FedAMP: models attract each other if the distance between them is small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.methods.attentive import Attentive


@dataclass(frozen=True)
class FedAMP(Attentive):
    """Close models attract each other: ξ_ij = (α/σ) exp(−‖w_i − w_j‖²/σ); ξ_ii is the rest."""

    sigma: float = 1.0  # σ: the squared distance at which models stop attracting each other
    step: float = 1.0  # α in units of σ/N, in (0, 1]: at 1 equal models are averaged evenly

    paper: ClassVar[str] = "Huang et al., Personalized cross-silo federated learning on non-IID data (AAAI 2021)"
    private: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (
        "A published version builds the proximal term from constants, so that it has no gradient and the method is "
        "local training; here the term is part of the loss.",
        "Local training starts from u_i; the paper leaves the start of the inner solver open.",
        "α is the same in all rounds, and λ/α is one field, strength: the paper's proofs let α fall.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.sigma < math.inf and 0 < self.step <= 1):
            raise StudyError("[method] sigma must be positive, step in (0, 1].")

    def attention(self, products: Tensor) -> Tensor:
        square = products.diagonal()
        distance = (square[:, None] + square[None] - 2 * products).clamp_min(0)
        shares = self.step / len(products) * torch.exp(-distance / self.sigma)  # α A'(d²), A(x) = 1 − exp(−x/σ)
        shares.fill_diagonal_(0)
        return shares + torch.diag(1 - shares.sum(1))
