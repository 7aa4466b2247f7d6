"""One federation of real processes with mTLS on loopback, shared by the tests of this folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from consilium.federation.admin import AdminClient, for_federation
from consilium.federation.supervisor import prepare, start
from consilium.federation.trial import LocalFederation, local_federation
from consilium.run_folder import RunFolder
from consilium.study import Study
from tests.toy import SIZES, toy_study

SITES = tuple(SIZES)
PATIENCE = 300.0  # seconds for anything on a busy machine


@dataclass(frozen=True)
class Running:
    """A federation under test."""

    local: LocalFederation
    admin: AdminClient

    def folder(self, study: Study) -> RunFolder:
        return RunFolder(RunFolder.path_of(for_federation(study, SITES), self.local.runs), study)

    def events(self, study: Study) -> list[Mapping[str, Any]]:
        return list(self.folder(study).events())

    def wait_until(self, true: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, f"waited in vain: {what}"
            time.sleep(0.1)

    def wait_for_round(self, study: Study, number: int) -> None:
        def reached() -> bool:
            return any(e["event"] == "round" and e["round"] >= number for e in self.events(study))

        self.wait_until(reached, f"round {number}")

    def kill(self, name: str) -> None:
        """−9, the participant and its job processes."""
        parent = self.local.processes[name]
        children = psutil.Process(parent.pid).children(recursive=True)
        os.kill(parent.pid, signal.SIGKILL)
        for child in children:
            child.kill()
        parent.wait()

    def restart(self, name: str, odd: str = "") -> None:
        """−9 and up again, as it was or as an odd site (odd_site.py)."""
        self.kill(name)
        self.start(name, odd)

    def start(self, name: str, odd: str = "") -> None:
        """Start a site; returns when the server has let it in. Its list may still show the one before as connected."""
        log, word = self.local.kits[name] / "process.log", "Successfully registered"
        before = log.read_text().count(word)
        arguments, variables = prepare(self.local.kits[name], "site", self.local.hospital(name))
        if odd:
            variables = variables | odd_variables(odd, variables["PYTHONPATH"])
        self.local.processes[name] = start(self.local.kits[name], arguments, variables)
        self.wait_until(lambda: log.read_text().count(word) > before, f"{name} to connect")

    def connected(self) -> list[str]:
        """As the server sees it; nobody while it is starting."""
        try:
            return self.admin.connected()
        except Exception:
            return []

    def rounds(self, study: Study, site: str) -> list[int]:
        """The rounds in which a site's update was merged."""
        return [e["round"] for e in self.events(study) if e["event"] == "train" and e["site"] == site]

    def finished(self, study: Study) -> Path:
        """The run folder, once the run is over, through however many jobs."""
        folder = self.folder(study)
        self.wait_until(lambda: folder.path.exists() and folder.finished, "the end of the run")
        return folder.path


def odd_variables(odd: str, path: str) -> dict[str, str]:
    """The environment in which a participant's processes do what odd_site.py says."""
    return {"CONSILIUM_ODD": odd, "PYTHONPATH": f"{Path(__file__).parent / 'hooks'}{os.pathsep}{path}"}


@pytest.fixture(scope="session")
def running(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("running")
    with local_federation(toy_study(federation), SITES, place) as (local, admin):
        yield Running(local, admin)
    shutil.rmtree(place, ignore_errors=True)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "last.safetensors").read_bytes()).hexdigest()
