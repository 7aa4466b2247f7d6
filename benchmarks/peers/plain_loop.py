"""FedAvg as forty lines of PyTorch: one process, one thread, sites in turn."""

from __future__ import annotations

import sys

import torch
from work import average, mark, mark_first_step, network, sites, train


def main(data: str, rounds: int) -> None:
    torch.set_num_threads(1)
    held, model = sites(data), network()
    mark_first_step()
    for round in range(rounds):
        start = {key: value.clone() for key, value in model.state_dict().items()}
        models, cases = [], []
        for site in held.values():
            model.load_state_dict(start)
            cases.append(train(model, site, round))
            models.append({key: value.clone() for key, value in model.state_dict().items()})
        model.load_state_dict(average(models, cases))
        mark("round")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
