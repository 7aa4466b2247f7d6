"""TensorBoard: event files in the run folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from consilium.tracking import Ending


class TensorBoard:
    """One writer per run; a resumed run adds a file."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def settings(self, study: Mapping[str, Any]) -> None:
        self._writer.add_text("study", f"```\n{json.dumps(study, indent=1)}\n```")

    def figures(self, values: Mapping[str, float], round: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)

    def note(self, name: str, text: str, round: int) -> None:
        self._writer.add_text(name, text, round)

    def close(self, how: Ending) -> None:
        self._writer.close()


def open_tracker(folder: Path) -> TensorBoard:
    return TensorBoard(folder)
