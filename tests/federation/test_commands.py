"""From nothing to a finished run with the commands of docs/deployment.md."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consilium import simulation
from consilium.federation.trial import free_port
from tests.federation.conftest import PATIENCE, digest
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]
COMMAND = [sys.executable, "-m", "consilium"]


def consilium(*words: str) -> str:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def kept_running(*words: str) -> Iterator[None]:
    process = subprocess.Popen([*COMMAND, *words])
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_the_documented_way(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__sites=["ada", "bea"], study__deadline=120.0)
    file, project, kits = tmp_path / "study.toml", str(tmp_path / "consortium.toml"), tmp_path / "kits"
    file.write_text(study.to_toml().replace(str(federation), "nowhere"))  # the administrator has no data, but the facts
    port = str(free_port())
    consilium("federation", "init", project, "--server", "localhost", "--port", port, "--site", "ada", "--site", "bea")
    consilium("federation", "kits", project, "--to", str(kits))
    admin = ("--kit", str(kits / "admin"))
    for site in ("ada", "bea"):
        text = f'site = "{site}"\ndata = "{federation / site}"\nmemory = "memory-{site}"\nlabels = ["blob"]\n'
        (tmp_path / f"{site}.toml").write_text(text)
    with (
        kept_running("federation", "server", str(kits / "server")),
        kept_running("federation", "site", str(kits / "ada"), "--hospital", str(tmp_path / "ada.toml")),
        kept_running("federation", "site", str(kits / "bea"), "--hospital", str(tmp_path / "bea.toml")),
    ):
        _until_connected(admin)
        job = consilium("federation", "submit", str(file), "--wait", *admin)
        run = consilium("federation", "fetch", job, "--runs", str(tmp_path / "runs"), *admin)
        assert f"job {job}" in consilium("federation", "status", *admin)
        assert '"event": "finish"' in consilium("federation", "log", job, *admin)
    assert digest(Path(run)) == digest(simulation.run(study, tmp_path / "simulated", workers=0).folder)
    scan = str(next((federation / "ada" / "images").iterdir()))
    masks = str(tmp_path / "masks")
    assert consilium("predict", "--hospital", str(tmp_path / "ada.toml"), scan, "--to", masks).endswith(".csv")


def _until_connected(admin: tuple[str, ...]) -> None:
    for _ in range(int(PATIENCE)):
        done = subprocess.run([*COMMAND, "federation", "status", *admin], capture_output=True, text=True, check=False)
        if done.returncode == 0 and "not connected" not in done.stdout:
            return
        time.sleep(1.0)
    raise AssertionError(f"the sites did not connect: {done.stdout}{done.stderr}")
