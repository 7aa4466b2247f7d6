"""CPS*: FedAvg* with two networks that make labels for each other. Both are averaged, the first is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from consilium.batch import Batch
from consilium.fields import check_from_zero
from consilium.learning.fit import Job, fit
from consilium.method import LossOfBatch, Maybe, message
from consilium.methods.pseudo_labelled import DIFFERENCES, Fields, LabelBatch, PseudoLabelled, model_of, models_of
from consilium.methods.teachers import TEACHER
from consilium.networks.plain_unet import Supervised
from consilium.site import Round, Site
from consilium.task import Task
from consilium.weights import SiteName, Weights


@dataclass(frozen=True)
class CPSPL(PseudoLabelled):
    """Cross pseudo supervision for sites that annotate different organs: two networks make labels for each other."""

    weight: float = 1.5  # of the cross entropy with the other network's labels; 0: the first is fedavg-pl

    paper: ClassVar[str] = (
        "Chen et al., Semi-supervised semantic segmentation with cross pseudo supervision (CVPR 2021), "
        "as UFPS (Patterns 2024) uses it"
    )
    differences: ClassVar[tuple[str, ...]] = (
        *DIFFERENCES,
        "Both networks are sent and averaged, and the first is used; UFPS does not say.",
        "Both networks make labels in evaluation mode, before either steps on the batch; all voxels have equal weight.",
    )

    @message
    class Server(PseudoLabelled.Server):
        second: Weights | None = None

    @message
    class Downlink(PseudoLabelled.Downlink):
        second: Weights | None = None

    @message
    class Uplink(PseudoLabelled.Uplink):
        second: Weights | None = None  # the second network; the first is `global`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_from_zero(self, "method", "weight")

    def first(self, task: Task) -> Fields:
        return {"second": task.initial(draw=1)}

    def also_sent(self, server: Server, round: Round) -> Fields:
        return {"second": server.second}

    def learn(
        self, site: Site, memory: PseudoLabelled.Memory, got: Downlink, teach: LabelBatch, round: Round
    ) -> tuple[Uplink, PseudoLabelled.Memory]:
        assert got.second is not None
        decided: dict[str, Tensor] = {}

        def job(weights: Weights, name: str, other: str) -> Job:
            def label_batch(network: nn.Module, batch: Batch) -> None:
                decided[name] = labels_of(network, batch.images)

            def loss(output: Any, batch: Batch) -> Tensor:
                value = site.task.loss(output, teach(batch).batch)
                return value + self.weight * cross_entropy(output, decided[other]) if self.weight else value

            return Job(weights, loss=loss, before_step=label_batch if self.weight else None)

        jobs = {"global": job(model_of(got), "global", "second"), "second": job(got.second, "second", "global")}
        fits = fit(site, jobs, round, memory.states)
        done = fits["global"]
        uplink = self.Uplink(done.weights, None, done.loss, done.steps, fits["second"].weights)
        return uplink, replace(memory, states=fits.states)

    def taught_loss(
        self, site: Site, server: Server, memory: Any | None, teach: LabelBatch, round: Round
    ) -> LossOfBatch:
        """Of the first network, with the labels of the second."""

        def ready(batch: Batch) -> Any:
            labelled = teach(batch).batch
            assert server.second is not None
            other = site.task.infer(server.second, batch.images).argmax(1).to(batch.images.device)
            return lambda out: site.task.loss(out, labelled) + self.weight * cross_entropy(out, other)

        return ready

    def averaged(self, server: Server, replies: Mapping[SiteName, Uplink], round: Round) -> Server:
        assert server.second is not None
        seconds = {name: reply.second for name, reply in replies.items() if reply.second is not None}
        global_ = self.average(models_of(replies), server.n, server.global_)
        second = self.average(seconds, server.n, server.second) if seconds else server.second
        return replace(server, global_=global_, second=second)

    def expected(self, task: Task, round: Round) -> Fields:
        if round.phase == TEACHER:
            return {}
        return {"second": Maybe(task.shape()) if round.step == 0 else task.shape()}  # a site that waits sends none


@torch.no_grad()
def labels_of(network: nn.Module, images: Tensor) -> Tensor:
    """The labels that a network predicts, (batch, *spatial); its running statistics do not change."""
    was, _ = network.training, network.eval()
    try:
        labels: Tensor = network(images).argmax(1)
        return labels
    finally:
        network.train(was)


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """Cross entropy with hard labels, mean over voxels; inner heads of the network count as in the loss."""
    if isinstance(output, Supervised):
        parts = [weight * cross_entropy(logits, labels) for weight, logits in output.asides]
        return sum(parts, cross_entropy(output.main, labels))
    return nn.functional.cross_entropy(output.float(), labels.long())
