"""All sites in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from consilium.study import Study
from consilium.weights import SiteName
from consilium.wires.answering import Hospitals
from consilium.wires.simulated import Answer, Request, SimulatedWire


class InProcess(SimulatedWire):
    """The simplest wire: good for debugging, and for one core."""

    def __init__(self, study: Study, folder: Path) -> None:
        super().__init__(study, folder)
        self._hospitals = Hospitals()

    def ask(self, requests: Mapping[SiteName, Request]) -> Iterator[tuple[SiteName, Answer]]:
        for name, request in requests.items():
            yield name, self._hospitals.answer(request)
