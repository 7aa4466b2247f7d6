"""FedSM-extra: the selector learns which model has the least loss, once the models are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from consilium.batch import Batch
from consilium.methods.late_selector import LateSelector
from consilium.methods.regression_selector import CLOSED
from consilium.methods.routers import GLOBAL, NetworkRouter, RegressionRouter, Router
from consilium.methods.routing import SuperModel
from consilium.methods.selector import (
    TRAININGS,
    Models,
    outputs_of,
)
from consilium.predictor import Predictor
from consilium.site import Site
from consilium.task import Task


@dataclass(frozen=True)
class FedSMExtra(LateSelector):
    """Algorithms 3 and 4: the selector learns which of the K + 1 models has the least loss on a case; no threshold."""

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "super"
    differences: ClassVar[tuple[str, ...]] = (
        "Equation 1 as printed needs the selector's own output; the target here is the model with the least loss "
        "against the label, the only reading that can be computed.",
        "By default the selector takes one synchronised Adam step per round, as in FedSM.",
        'With selector_training = "regression" there are no selector rounds: the models\' losses are regressed on the '
        "features of the global model's encoder, in closed form.",
    )
    trainings: ClassVar[tuple[str, ...]] = (*TRAININGS, CLOSED)

    def targets(self, site: Site, models: Models) -> dict[str, int]:
        found: dict[str, int] = {}
        for batch in site.data.whole("train", site.local.batch_size):
            outputs = outputs_of(models, site.task, batch.images)
            for i, case in enumerate(batch.cases):
                losses = [float(site.task.loss(output[i : i + 1], batch.only(i))) for output in outputs]
                found[case] = losses.index(min(losses))  # ties go to the first, the global model
        return found

    def selector_loss(self, site: Site, memory: Any, output: Tensor, batch: Batch) -> Tensor:
        target = torch.tensor([memory.targets[case] for case in batch.cases], device=output.device)
        return torch.nn.functional.cross_entropy(output.float(), target)

    def predictor(self, task: Task, released: Any) -> Predictor:
        classes = [GLOBAL, *released.personal]
        router: Router = (
            NetworkRouter(task, released.selector, classes)
            if released.regression is None
            else RegressionRouter(task, released.global_, released.regression, classes)
        )
        return SuperModel(task, released.global_, released.personal, router, 0.0, released.home, self.route)
