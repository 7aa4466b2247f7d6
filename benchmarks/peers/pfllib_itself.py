"""FedAvg with PFLlib's own server and clients, from a checkout; data, loss and optimiser are those of the others.

Its loss, SGD and reading of a file in every round are replaced, as a user would in a client class; scores are left out.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from checkouts import Arguments, open_checkout, stand_in
from work import RATE, Site, batches, dice, mark, mark_first_step, network, sites

open_checkout(os.environ["BENCH_PFLLIB"], "system", "flcore/servers/serveravg.py")
stand_in("h5py")  # for its files of scores

from flcore.clients.clientavg import clientAVG  # type: ignore[import-not-found]  # noqa: E402
from flcore.servers import serverbase  # type: ignore[import-not-found]  # noqa: E402
from flcore.servers.serveravg import FedAvg  # type: ignore[import-not-found]  # noqa: E402

held: list[Site] = []


class Client(clientAVG):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss, self.round = dice, 0

    def load_train_data(self, batch_size: int | None = None) -> Any:
        return batches(held[self.id], self.round)

    def train(self) -> None:
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE, fused=True)
        super().train()
        self.round += 1


class Server(FedAvg):  # type: ignore[misc]
    def set_clients(self, clientObj: Any) -> None:
        super().set_clients(Client)

    def evaluate(self, *_: Any) -> None:
        self.rs_test_acc.append(0.0)

    def aggregate_parameters(self) -> None:
        super().aggregate_parameters()
        mark("round")

    def save_results(self) -> None: ...

    def save_global_model(self) -> None: ...


def main(data: str, rounds: int) -> None:
    torch.set_num_threads(1)  # faster than its default for steps as small as these
    held.extend(sites(data).values())
    serverbase.read_client_data = lambda dataset, number, is_train=True: held[number][0]  # it takes their number
    server = Server(Arguments(model=network(), num_clients=len(held), global_rounds=rounds - 1), 0)
    mark_first_step()
    server.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
