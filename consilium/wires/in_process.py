"""All sites in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from consilium.study import Study
from consilium.weights import SiteName
from consilium.wires.local_sites import LocalAnswer, LocalRequest, LocalSites
from consilium.wires.simulated import SimulatedWire


class InProcess(SimulatedWire):
    """The simplest wire: good for debugging, and for one core."""

    def __init__(self, study: Study, folder: Path) -> None:
        super().__init__(study, folder)
        self._sites = LocalSites()

    def ask(self, requests: Mapping[SiteName, LocalRequest]) -> Iterator[tuple[SiteName, LocalAnswer]]:
        for name, request in requests.items():
            yield name, self._sites.answer(request)
