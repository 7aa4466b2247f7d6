"""FedAvg with Flower's simulation: one core per client, so that as many train at once as there are cores."""

from __future__ import annotations

import os
import sys
from typing import Any

from flower_client import client_of
from flwr.client import ClientApp
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from work import mark, network, sites

DATA, ROUNDS = sys.argv[1], int(sys.argv[2])


class Marked(FedAvg):  # type: ignore[misc]
    """FedAvg that says when a round ends."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        merged = super().aggregate_fit(server_round, results, failures)
        mark("round")
        return merged


def server_of(context: Context) -> ServerAppComponents:
    first = ndarrays_to_parameters([value.numpy() for value in network().state_dict().values()])
    n = len(sites(DATA))
    strategy = Marked(
        min_fit_clients=n,
        min_available_clients=n,
        fraction_evaluate=0.0,
        initial_parameters=first,
        on_fit_config_fn=lambda round: {"round": round},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # of the actors
    os.environ["BENCH_DATA"] = DATA
    run_simulation(
        server_app=ServerApp(server_fn=server_of),
        client_app=ClientApp(client_fn=client_of),
        num_supernodes=len(sites(DATA)),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
