"""Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` sends what a person wants to send."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from consilium.tracking import Ending

CODES = {"finished": 0, "interrupted": 255, "failed": 1}  # exit codes; W&B takes 255 for Ctrl-C


class WeightsAndBiases:
    """One W&B run per process; its files are in the run folder."""

    def __init__(self, folder: Path) -> None:
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project="consilium",
            name=folder.name,
            dir=str(folder),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_machine_info=True),
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def settings(self, study: Mapping[str, Any]) -> None:
        self._run.config.update({table: dict(keys) for table, keys in study.items()}, allow_val_change=True)

    def figures(self, values: Mapping[str, float], round: int) -> None:
        self._run.log({**values, "round": round})

    def note(self, name: str, text: str, round: int) -> None:
        self._run.summary[f"{name}/{round}"] = text

    def close(self, how: Ending) -> None:
        self._run.finish(exit_code=CODES[how])


def open_tracker(folder: Path) -> WeightsAndBiases:
    return WeightsAndBiases(folder)
