"""A loop of PFLlib's form, written by us: one object per client with a model of its own, copied to and fro."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn
from work import Site, mark, mark_first_step, network, sites, train


class Client:
    def __init__(self, site: Site, model: nn.Module) -> None:
        self.site, self.model = site, copy.deepcopy(model)

    def set_parameters(self, model: nn.Module) -> None:
        for new, old in zip(model.parameters(), self.model.parameters()):
            old.data = new.data.clone()

    def train(self, round: int) -> None:
        train(self.model, self.site, round)


class Server:
    def __init__(self, held: dict[str, Site]) -> None:
        self.model = network()
        self.clients = [Client(site, self.model) for site in held.values()]

    def round(self, index: int) -> None:
        for client in self.clients:
            client.set_parameters(self.model)
        for client in self.clients:
            client.train(index)
        total = sum(len(client.site[0]) for client in self.clients)
        uploaded = [(len(client.site[0]) / total, copy.deepcopy(client.model)) for client in self.clients]
        for parameter in self.model.parameters():
            parameter.data.zero_()
        for share, model in uploaded:
            for mine, theirs in zip(self.model.parameters(), model.parameters()):
                mine.data += theirs.data.clone() * share


def main(data: str, rounds: int) -> None:
    torch.set_num_threads(1)  # faster than its default for steps as small as these
    server = Server(sites(data))
    mark_first_step()
    for round in range(rounds):
        server.round(round)
        mark("round")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
