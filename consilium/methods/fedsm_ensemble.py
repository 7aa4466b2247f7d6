"""FedSM's ensemble (section 3.1.1): all models predict, and the selector weights them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from consilium.batch import Batch
from consilium.methods.late_selector import LateSelector
from consilium.methods.routers import GLOBAL, NetworkRouter
from consilium.methods.routing import EnsembleModel
from consilium.methods.selector import outputs_of
from consilium.predictor import Predictor
from consilium.site import Site
from consilium.task import Task


@dataclass(frozen=True)
class FedSMEnsemble(LateSelector):
    """Section 3.1.1: h = Σ ŷ_k h_k over all K + 1 models, the selector trained on L(h, y)."""

    paper: ClassVar[str] = "Xu et al., Closing the generalization gap of cross-silo federated segmentation (CVPR 2022)"
    headline: ClassVar[str] = "ensemble"
    prediction: ClassVar[str] = "one per site, and one of the global model"
    differences: ClassVar[tuple[str, ...]] = (
        "Probabilities are averaged, not logits; the paper does not say which.",
        "By default the selector takes one synchronised Adam step per round, as in FedSM.",
    )

    def selector_loss(self, site: Site, memory: Any, output: Tensor, batch: Batch) -> Tensor:
        outputs = [part.to(output.device) for part in outputs_of(memory.models, site.task, batch.images)]
        return site.task.loss(site.task.blend(outputs, output.float().softmax(1)), batch)

    def predictor(self, task: Task, released: Any) -> Predictor:
        router = NetworkRouter(task, released.selector, [GLOBAL, *released.personal])
        return EnsembleModel(task, released.global_, released.personal, router, released.home, self.route)
