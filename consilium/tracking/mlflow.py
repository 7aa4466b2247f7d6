"""MLflow: a store beside the run folders, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.entities import RunStatus as MlflowStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from consilium.files import read_json, write_json
from consilium.tracking import MLFLOW_STORE, Ending

EXPERIMENT = "consilium"
STATUS = {"finished": MlflowStatus.FINISHED, "interrupted": MlflowStatus.KILLED, "failed": MlflowStatus.FAILED}
LONGEST, MOST = 500, 100  # characters of one parameter, parameters of one call


class Mlflow:
    """One MLflow run per run folder; a resumed run goes on with it."""

    def __init__(self, folder: Path) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it would write into our progress, and with -q too
        self._client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent.resolve() / MLFLOW_STORE}"
        )
        known = folder / "mlflow.json"
        self._id = self._known(known) or self._new(folder.name)
        self._client.update_run(self._id, MlflowStatus.to_string(MlflowStatus.RUNNING))  # an earlier process ended it
        write_json({"run": self._id}, known)

    def _known(self, path: Path) -> str | None:
        """The run of an earlier process, if the store still has it."""
        if not path.exists():
            return None
        try:
            return str(self._client.get_run(read_json(path)["run"]).info.run_id)
        except MlflowException:
            return None

    def _new(self, name: str) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def settings(self, study: Mapping[str, Any]) -> None:
        told = self._client.get_run(self._id).data.params  # parameters cannot be written twice
        named = {f"{table}.{key}": str(value)[:LONGEST] for table, keys in study.items() for key, value in keys.items()}
        new = [Param(name, value) for name, value in named.items() if name not in told]
        for start in range(0, len(new), MOST):
            self._client.log_batch(self._id, params=new[start : start + MOST])

    def figures(self, values: Mapping[str, float], round: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, round) for name, value in values.items()])

    def note(self, name: str, text: str, round: int) -> None:
        self._client.set_tag(self._id, f"{name}/{round}", text)

    def close(self, how: Ending) -> None:
        self._client.set_terminated(self._id, MlflowStatus.to_string(STATUS[how]))


def open_tracker(folder: Path) -> Mlflow:
    return Mlflow(folder)
