"""A simulation in which some answers are not what the site made: a wire that changes them on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from consilium import engine
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.tree import Packet
from consilium.weights import SiteName
from consilium.wires.in_process import InProcess
from consilium.wires.local_sites import LocalAnswer
from consilium.wires.site_wire import Returned

Lie = Callable[[SiteName, int, Returned], Returned]  # site, how many answers it gave before, its answer → what arrives


class Lying(InProcess):
    """Sites in this process; what they answer passes through `lie`."""

    def __init__(self, study: Study, folder: Path, lie: Lie) -> None:
        super().__init__(study, folder)
        self.lie = lie
        self.answered: dict[SiteName, int] = {}

    def _read(self, site: SiteName, answer: LocalAnswer) -> Returned:
        count = self.answered.get(site, 0)
        self.answered[site] = count + 1
        return self.lie(site, count, super()._read(site, answer))


def run_with(study: Study, runs: Path, lie: Lie) -> RunFolder:
    """Run a study whose sites' answers are changed; its folder."""
    folder = RunFolder.create(study, runs)
    engine.run(study, Lying(study, folder.path, lie), folder)
    return folder


def scaled(answer: Returned, factor: float) -> Returned:
    """An answer with every floating tensor times `factor`."""
    assert answer.packet is not None
    tensors = {k: t * factor if t.is_floating_point() else t for k, t in answer.packet.tensors.items()}
    return Returned(answer.head, Packet(answer.packet.header, tensors))


def events(folder: RunFolder, kind: str) -> list[Any]:
    return [event for event in folder.events() if event["event"] == kind]


def largest(folder: RunFolder) -> float:
    """The largest value of the last state."""
    weights = folder.states.last(folder.study.method).server.global_
    return max(float(torch.as_tensor(t, dtype=torch.float64).abs().max()) for t in weights.values())
