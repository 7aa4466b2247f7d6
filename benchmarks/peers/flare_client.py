"""The client script of NVIDIA FLARE's simulator: receive, train, send."""

from __future__ import annotations

import sys

import nvflare.client as flare
import torch
from work import mark, mark_first_step, network, sites, train


def main() -> None:
    torch.set_num_threads(1)
    flare.init()
    number = int(flare.get_site_name().rpartition("-")[2]) - 1
    site, model = list(sites(sys.argv[1]).values())[number], network()
    mark_first_step()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        own = model.state_dict()  # it sends a tensor of one number as a number
        model.load_state_dict({key: torch.as_tensor(received.params[key]).view(own[key].shape) for key in own})
        n = train(model, site, received.current_round)
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        flare.send(flare.FLModel(params=weights, meta={"NUM_STEPS_CURRENT_ROUND": n}))
        if number == 0:
            mark("round")


main()
