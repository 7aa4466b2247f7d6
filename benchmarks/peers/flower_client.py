"""The client of Flower's simulation, in a module of its own: an actor then keeps data and network between rounds."""

from __future__ import annotations

import os
from typing import Any

import torch
from flwr.client import NumPyClient
from flwr.common import Context
from work import mark_first_step, network, sites, train

held: dict[str, Any] = {}


class Client(NumPyClient):  # type: ignore[misc]
    def __init__(self, number: int) -> None:
        if not held:
            torch.set_num_threads(1)
            held.update(sites=list(sites(os.environ["BENCH_DATA"]).values()), model=network())
            mark_first_step()
        self.site, self.model = held["sites"][number], held["model"]

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        keys = self.model.state_dict().keys()
        self.model.load_state_dict({key: torch.from_numpy(value) for key, value in zip(keys, parameters)})
        n = train(self.model, self.site, config["round"])
        return [value.numpy() for value in self.model.state_dict().values()], n, {}


def client_of(context: Context) -> Any:
    return Client(int(context.node_config["partition-id"])).to_client()
