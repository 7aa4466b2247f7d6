"""HeurFedAMP: models attract each other if the angle between them is small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.methods.attentive import Attentive


@dataclass(frozen=True)
class HeurFedAMP(Attentive):
    """Models with a small angle attract each other: ξ_ij ∝ exp(σ cos(w_i, w_j)) for j ≠ i; ξ_ii is constant."""

    sigma: float = 25.0  # σ: how strongly the most similar models are preferred
    self_share: float = 0.0  # ξ_ii, of the site's own model; 0 takes 1/N

    paper: ClassVar[str] = "Huang et al., Personalized cross-silo federated learning on non-IID data (AAAI 2021)"
    private: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (
        "Local training starts from u_i; the paper leaves the start of the inner solver open.",
        "The paper gives neither ξ_ii nor σ for its experiments; choose them on validation.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.sigma < math.inf and 0 <= self.self_share < 1):
            raise StudyError("[method] sigma must be a number from 0 up, self_share in [0, 1).")

    def attention(self, products: Tensor) -> Tensor:
        length = products.diagonal().sqrt().clamp_min(1e-30)
        own = self.self_share or 1 / len(products)
        likeness = self.sigma * products / (length[:, None] * length[None])
        shares = torch.softmax(likeness.fill_diagonal_(-math.inf), 1) * (1 - own)
        return shares + own * torch.eye(len(products), dtype=shares.dtype)
