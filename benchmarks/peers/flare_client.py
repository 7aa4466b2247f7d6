"""The client of NVIDIA FLARE's simulator: an executor that trains.

FLARE's client API looks for a result twice a second, and a round of this work takes a fraction of one.
"""

from __future__ import annotations

from typing import Any

import torch
from nvflare.apis.executor import Executor
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from work import mark, mark_first_step, network, sites, train


class Trainer(Executor):  # type: ignore[misc]
    """Trains one site's cases on every request."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.data, self.model = data, None

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        number = int(fl_ctx.get_identity_name().rpartition("-")[2]) - 1
        if self.model is None:
            torch.set_num_threads(1)
            self.site, self.model = list(sites(self.data).values())[number], network()
            mark_first_step()
        received = FLModelUtils.from_shareable(shareable)
        own = self.model.state_dict()  # it sends a tensor of one number as a number
        self.model.load_state_dict({key: torch.as_tensor(received.params[key]).view(own[key].shape) for key in own})
        n = train(self.model, self.site, received.current_round)
        weights = {key: value.numpy().copy() for key, value in self.model.state_dict().items()}
        if number == 0:
            mark("round")
        sent = FLModel(ParamsType.FULL, weights, meta={"NUM_STEPS_CURRENT_ROUND": n})
        return FLModelUtils.to_shareable(sent)
