"""FedProx: FedAvg with a proximal term that penalises the distance from the shared model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.method import GlobalModel
from consilium.methods.shares import WithShares
from consilium.site import Round, Site
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class FedProx(WithShares, GlobalModel):
    """FedAvg with a proximal term: the loss of a site gains (μ/2) ‖w − w_g‖²; μ = 0 is FedAvg."""

    mu: float = 0.01  # μ, the strength of the pull to the shared model

    paper: ClassVar[str] = "Li et al., Federated optimization in heterogeneous networks (MLSys 2020)"
    private: ClassVar[bool] = True
    differences: ClassVar[tuple[str, ...]] = (
        "The original lets slow sites do part of their work; here every site does all of it or is away.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise StudyError(f"[method] mu = {self.mu}: it cannot be negative; 0 is FedAvg.")

    def train(self, site: Site, memory: Any, got: Any, round: Round) -> tuple[Any, Any]:
        fits = fit(site, {"global": proximal_job(site, got.global_, self.mu)}, round, memory.states)
        done = fits["global"]
        return self.Uplink(done.weights, done.loss, done.steps), self.Memory(states=fits.states)

    def merge(self, server: Any, replies: Mapping[SiteName, Any], round: Round) -> Any:
        models = {name: reply.global_ for name, reply in replies.items()}
        return self.Server(self.average(models, server.n, server.global_), server.n)


def proximal_job(site: Site, anchor: Weights, mu: float, mean: bool = False) -> Job:
    """Train from the anchor with (μ/2) ‖w − anchor‖² added to the loss: a sum of squares, or μ times their `mean`."""
    fixed = {name: tensor.to(site.device) for name, tensor in anchor.items()}

    def penalty(parameters: Mapping[str, Tensor]) -> Tensor:
        squares = [(tensor - fixed[name]).square().sum() for name, tensor in parameters.items()]
        factor = mu / sum(tensor.numel() for tensor in parameters.values()) if mean else mu / 2
        return factor * torch.stack(squares).sum()

    return Job(anchor, penalty=penalty if mu else None)
