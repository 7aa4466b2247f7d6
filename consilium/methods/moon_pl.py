"""MOON*: FedAvg* with a contrastive loss: features near the global model's, away from the site's last model's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.learning.stage_outputs import check_stages, pooled_bottleneck
from consilium.local_training import Local
from consilium.method import message
from consilium.methods.pseudo_labelled import DIFFERENCES, LabelBatch, PseudoLabelled, model_of
from consilium.site import Round, Site
from consilium.task import Task
from consilium.weights import Weights


@dataclass(frozen=True)
class MOONPL(PseudoLabelled):
    """MOON for sites that annotate different organs: a contrastive loss on features beside the teachers' labels."""

    mu: float = 1.0  # μ, the weight of the contrast; 0 is fedavg-pl
    temperature: float = 0.5  # τ, of its similarities

    paper: ClassVar[str] = (
        "Li et al., Model-contrastive federated learning (CVPR 2021), as UFPS (Patterns 2024) uses it"
    )
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "Features are the means over voxels of the lowest level; there is no projection head. UFPS does not say.",
        "One earlier model is the negative, as MOON's default; the first round of a site has none.",
    )

    @message
    class Memory(PseudoLabelled.Memory):
        previous: Weights | None = None  # the model as this site trained it last

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise StudyError(f"[method] mu = {self.mu}: it must be a number from 0 up; 0 is fedavg-pl.")
        if not 0 < self.temperature < math.inf:
            raise StudyError(f"[method] temperature = {self.temperature}: it must be positive.")

    def refuse(self, task: Task, local: Local) -> None:
        with torch.device("meta"):
            check_stages(task.network(), "MOON*")

    def learn(
        self, site: Site, memory: Memory, got: PseudoLabelled.Downlink, teach: LabelBatch, round: Round
    ) -> tuple[PseudoLabelled.Uplink, Memory]:
        model, before = model_of(got), memory.previous
        frozen = [] if before is None or not self.mu else [_frozen(site, model), _frozen(site, before)]

        def objective(network: nn.Module, batch: Batch) -> Tensor:
            labelled = teach(batch).batch
            if not frozen:
                return site.task.loss(network(batch.images), labelled)
            answer, now = pooled_bottleneck(network, batch.images)
            with torch.no_grad():
                near, far = (pooled_bottleneck(other, batch.images)[1] for other in frozen)
            return site.task.loss(answer, labelled) + self.mu * contrast(now, near, far, self.temperature)

        fits = fit(site, {"global": Job(model, objective=objective)}, round, memory.states)
        done = fits["global"]
        return (
            self.reply(done.weights, done.loss, done.steps),
            replace(memory, states=fits.states, previous=done.weights),
        )


def contrast(now: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """−log(e^{cos(z, z_near)/τ} / (e^{cos(z, z_near)/τ} + e^{cos(z, z_far)/τ})), the mean over cases.

    z are features (batch, features) of the trained model; z_near and z_far are those to approach and to avoid.
    """
    like = torch.stack([torch.cosine_similarity(now.float(), other.float(), dim=1) for other in (near, far)], dim=1)
    return nn.functional.cross_entropy(like / temperature, torch.zeros(len(like), dtype=torch.long, device=like.device))


def _frozen(site: Site, weights: Weights) -> nn.Module:
    """A separate network with these weights in evaluation mode; every batch uses two."""
    network = site.task.network().to(site.device)
    network.load_state_dict(dict(weights))
    return network.eval().requires_grad_(False)
