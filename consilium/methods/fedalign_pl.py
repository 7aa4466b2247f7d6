"""FedAlign*: FedAvg* with a loss that aligns the Lipschitz constants of an encoder block and its slimmed copy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.errors import StudyError
from consilium.learning.fit import Job, fit
from consilium.learning.sharpness import moved
from consilium.learning.stage_outputs import check_stages, stage_outputs
from consilium.local_training import Local
from consilium.methods.pseudo_labelled import DIFFERENCES, LabelBatch, PseudoLabelled, model_of
from consilium.networks.parts import LAYERS, NORMALISATIONS, encoder_stages
from consilium.site import Round, Site
from consilium.task import Task

ITERATIONS = 10  # of the power method, as in the authors' code


@dataclass(frozen=True)
class FedAlignPL(PseudoLabelled):
    """FedAlign for sites that annotate different organs: aligns Lipschitz constants of a block and its slimmed copy."""

    mu: float = 0.45  # μ, the size of the alignment relative to the loss; 0 is fedavg-pl
    width: float = 0.25  # the share of channels in the slimmed block

    paper: ClassVar[str] = (
        "Mendieta et al., Local learning matters: data heterogeneity in federated learning (CVPR 2022), "
        "as UFPS (Patterns 2024) uses it"
    )
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "The slimmed block is the lowest level of the U-Net, and its input the level above; UFPS does not say.",
        "Running statistics of normalisation are those of the whole block; FedAlign recomputes them after training.",
        "Group normalisation over all channels also counts the channels that are left out, as zeros.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu < math.inf:
            raise StudyError(f"[method] mu = {self.mu}: it must be a number from 0 up; 0 is fedavg-pl.")
        if not 0 < self.width <= 1:
            raise StudyError(f"[method] width = {self.width}: it must be in (0, 1].")

    def refuse(self, task: Task, local: Local) -> None:
        with torch.device("meta"):
            check_stages(task.network(), "FedAlign*")

    def learn(
        self, site: Site, memory: PseudoLabelled.Memory, got: PseudoLabelled.Downlink, teach: LabelBatch, round: Round
    ) -> tuple[PseudoLabelled.Uplink, PseudoLabelled.Memory]:
        def objective(network: nn.Module, batch: Batch) -> Tensor:
            labelled = teach(batch).batch
            if not self.mu:
                return site.task.loss(network(batch.images), labelled)
            *_, block = stages = encoder_stages(network)
            with stage_outputs(stages[-2:]) as outputs:
                loss = site.task.loss(network(batch.images), labelled)
            above, whole = (output.detach() for output in outputs)
            with slimmed(block, self.width), moved(block, {}):  # the second pass does not update statistics
                slim = block(above)
            gap = alignment(above, whole, slim[:, : kept(slim.shape[1], self.width)])
            return loss + self.mu * (loss.detach() / gap.detach().clamp_min(1e-12)) * gap

        fits = fit(site, {"global": Job(model_of(got), objective=objective)}, round, memory.states)
        done = fits["global"]
        return self.reply(done.weights, done.loss, done.steps), replace(memory, states=fits.states)


def kept(channels: int, width: float) -> int:
    """The number of channels that a slimmed layer keeps, at least one."""
    return max(1, math.ceil(width * channels))


@contextmanager
def slimmed(block: nn.Module, width: float) -> Iterator[None]:
    """Inside the context each convolution and normalisation of a block outputs its first channels; the rest are zeros.

    The kept channels equal those of a narrower network, because activations map zero to zero.
    """

    def cut(_: nn.Module, __: object, output: Tensor) -> Tensor:
        mask = torch.zeros(output.shape[1], dtype=output.dtype, device=output.device)
        mask[: kept(len(mask), width)] = 1
        return output * mask.view(-1, *[1] * (output.dim() - 2))

    layers = [module for module in block.modules() if isinstance(module, (*LAYERS, *NORMALISATIONS))]
    hooks = [layer.register_forward_hook(cut) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def alignment(above: Tensor, whole: Tensor, slim: Tensor) -> Tensor:
    """The mean over cases of (σ(T_slim) − σ(T_whole))², σ the largest singular value of a transmitting matrix."""
    return nn.functional.mse_loss(top_singular(transmitting(above, slim)), top_singular(transmitting(above, whole)))


def transmitting(above: Tensor, below: Tensor) -> Tensor:
    """F_above F_belowᵀ / voxels, (batch, channels above, channels below).

    Both are feature maps (batch, channels, *spatial); the one above is averaged to the size of the one below.
    """
    pool = nn.functional.adaptive_avg_pool2d if below.dim() == 4 else nn.functional.adaptive_avg_pool3d
    size: tuple[int, ...] = tuple(below.shape[2:])
    one, two = pool(above.float(), size).flatten(2), below.float().flatten(2)  # type: ignore[arg-type]
    return one @ two.transpose(1, 2) / two.shape[2]


def top_singular(matrices: Tensor) -> Tensor:
    """The largest singular value of every matrix (batch, rows, columns) by power iterations on M Mᵀ; (batch,)."""
    square = matrices @ matrices.transpose(1, 2)
    vector = torch.ones(*square.shape[:2], 1, dtype=square.dtype, device=square.device)
    for _ in range(ITERATIONS):
        vector = square @ vector
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-12)
    largest = vector.transpose(1, 2) @ square @ vector
    return largest.flatten().clamp_min(1e-12).sqrt()
