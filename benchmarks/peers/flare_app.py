"""FedAvg with NVIDIA FLARE's simulator.

Each client has a thread, or it would start a process anew in every round. Server and clients look for news fifty times
a second in place of twice.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from flare_client import Trainer
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.job_config.api import FedJob
from work import NETWORKS, WIDTHS, sites

HERE = Path(__file__).parent
LOOK = 0.02  # seconds


def main(data: str, rounds: int) -> None:
    n = len(sites(data))
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, NETWORKS)))  # the server builds the model by its path
    sys.path.append(str(NETWORKS))
    names = ("dimensions", "channels", "outputs", "widths", "residual", "norm", "dropout")
    arguments = dict(zip(names, (2, 3, 2, list(WIDTHS), 0, "instance", 0.0)))
    with tempfile.TemporaryDirectory() as place:
        job = FedJob(name="fedavg", min_clients=n)
        job.to_server(PTFileModelPersistor(model={"path": "nested_unet.NestedUNet", "args": arguments}), id="persistor")
        job.to_server(FedAvg(num_clients=n, num_rounds=rounds, task_check_period=LOOK))
        job.to_clients(Trainer(data), tasks=["train"])
        job.to_server({"server": {"task_request_interval": LOOK}})  # how long clients wait after a task: 2 s by default
        job.to_clients({"default_task_fetch_interval": LOOK})
        job.simulator_run(place, n_clients=n, threads=n)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
