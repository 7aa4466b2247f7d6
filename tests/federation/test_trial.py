"""A federation on one machine ends with the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from consilium import simulation
from consilium.federation import trial
from tests.federation.conftest import digest
from tests.toy import toy_study


class Sleepers(trial.LocalFederation):
    """Participants that only sleep."""

    def start(self, name: str) -> None:
        self.processes[name] = subprocess.Popen(["sleep", "60"])


@contextlib.contextmanager
def nobody(*_: object) -> Iterator[Any]:
    yield SimpleNamespace(wait_for=lambda *_: None)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_trial_takes_its_processes_down(
    which: signal.Signals, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Sleepers(tmp_path, {"admin": tmp_path}, {})
    monkeypatch.setattr(trial, "settle", lambda *_: local)
    monkeypatch.setattr(trial, "open_admin", nobody)
    before = signal.getsignal(which)
    with pytest.raises(SystemExit) as stopped, trial.local_federation(toy_study(federation), ("ada", "bea"), tmp_path):
        os.kill(os.getpid(), which)
    assert stopped.value.code == 128 + which
    assert set(local.processes) == {"server", "ada", "bea"}
    assert all(process.poll() is not None for process in local.processes.values())
    assert signal.getsignal(which) is before


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.xdist_group("federation")
@pytest.mark.timeout(900)
def test_a_study_that_names_a_class_can_be_tried(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "tests.federation.other_package:Method", study__rounds=1, study__deadline=60.0)
    tried = trial.try_federation(study, None, tmp_path / "runs")
    assert digest(tried) == digest(simulation.run(study, tmp_path / "simulated", workers=0).folder)
