"""FedAvg with NVIDIA FLARE's simulator: a thread per client, or it would start a process anew in every round."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe.sim_env import SimEnv
from work import NETWORKS, WIDTHS, sites

HERE = Path(__file__).parent


def main(data: str, rounds: int) -> None:
    n = len(sites(data))
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, NETWORKS)))  # the server builds the model by its path
    sys.path.append(str(NETWORKS))
    names = ("dimensions", "channels", "outputs", "widths", "residual", "norm", "dropout")
    arguments = dict(zip(names, (2, 3, 2, list(WIDTHS), 0, "instance", 0.0)))
    with tempfile.TemporaryDirectory() as place:
        recipe = FedAvgRecipe(
            name="fedavg",
            model={"class_path": "nested_unet.NestedUNet", "args": arguments},
            min_clients=n,
            num_rounds=rounds,
            train_script=str(HERE / "flare_client.py"),
            train_args=data,
        )
        recipe.execute(SimEnv(num_clients=n, num_threads=n, workspace_root=place))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
