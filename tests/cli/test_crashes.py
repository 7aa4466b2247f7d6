"""Killed processes, full disks, impatient users: nothing committed is lost, and resuming gives the same bytes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from consilium.store import MemoryStore
from tests.cli.conftest import write_study
from tests.cli.terminal import ROOT, Running, Terminal, call, children_of, events, gone, lines_of, refused, wait_for

FILES = ("last.safetensors", "best.safetensors", "scores.csv")
ROUNDS = 4

real_processes = pytest.mark.federation  # they start, kill and wait, for which the default tier has no time

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
    pytest.mark.xdist_group("crashes"),  # one process loads torch for all of them
]


@pytest.fixture(scope="module")
def whole(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run; SCAFFOLD's server and sites both remember things."""
    place = tmp_path_factory.mktemp("whole")
    done = call("run", scaffold(place, federation), "--workers", 0, "--runs", place / "runs", "--json")
    assert done.status == 0, done.err
    return Path(done.document["run"])


def scaffold(place: Path, federation: Path) -> Path:
    study = write_study(place / "toy.toml", federation, "scaffold", ROUNDS)
    study.write_text(study.read_text().replace("lr = 0.01", 'lr = 0.1\noptimizer = "sgd"\nmomentum = 0.0'))
    return study


def same_bytes(folder: Path, whole: Path) -> None:
    for name in FILES:
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


@real_processes
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments_and_resumed(seed: int, whole: Path, federation: Path, tmp_path: Path) -> None:
    draw, runs = random.Random(seed), tmp_path / "runs"
    study = scaffold(tmp_path, federation)
    process = Running(tmp_path / "first", "run", study, "--workers", 0, "--runs", runs)
    for attempt in range(2):
        seen = len(events(runs))
        wait_for(lambda seen=seen: len(events(runs)) > seen + draw.randrange(1, 8), "the next events")
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        (folder,) = runs.iterdir()
        if (folder / "summary.json").exists():
            break
        if not attempt:
            process = Running(tmp_path / "second", "resume", folder, "--workers", 0)
    resumed = call("resume", folder, "--workers", 0, "--json")
    assert resumed.status == 0, resumed.err
    same_bytes(folder, whole)


@real_processes
def test_killed_with_workers_leaves_no_orphans(whole: Path, federation: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = Running(tmp_path / "first", "run", scaffold(tmp_path, federation), "--workers", 1, "--runs", runs)
    wait_for(lambda: [e for e in events(runs) if e["event"] == "round"], "the first round")
    (stem,) = children_of(process.pid)  # imports once for all; the workers are forked from it
    (worker,) = children_of(stem)
    workers = [stem, worker]
    process.kill()
    wait_for(lambda: all(gone(pid) for pid in workers), "the worker's end")
    (folder,) = runs.iterdir()
    assert call("resume", folder, "--workers", 0, "--json").status == 0
    same_bytes(folder, whole)


@real_processes
def test_a_killed_private_run_spends_nothing_twice(federation: Path, tmp_path: Path) -> None:
    """kill -9 after answers of the second round have left: the ledger is that of an undisturbed run."""
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", ROUNDS)
    private = [f"--set=privacy.{setting}" for setting in ("unit=patient", "clip=0.5", "epsilon=3.0")]
    done = call("run", study, "--workers", 0, "--runs", tmp_path / "whole", "--json", *private)
    assert done.status == 0, done.err
    runs = tmp_path / "runs"
    process = Running(tmp_path / "first", "run", study, "--workers", 0, "--runs", runs, *private)
    wait_for(lambda: sum(event["event"] == "train" for event in events(runs)) > 3, "answers of the second round")
    process.kill()
    (folder,) = runs.iterdir()
    resumed = call("resume", folder, "--workers", 0, "--json")
    assert resumed.status == 0, resumed.err
    spent = [call("ledger", place, "--json") for place in (Path(done.document["run"]), folder)]
    assert spent[0].document == spent[1].document
    assert 2.9 < spent[0].document["ada"]["epsilon"] <= 3.0


@real_processes
def test_a_killed_worker_is_a_site_that_did_not_answer(federation: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=3)
    long = ("--set", "local.epochs=80", "--set", "study.score_every=3")  # until the end the worker does nothing else
    process = Running(tmp_path / "first", "run", study, "--workers", 1, "--runs", runs, *long)
    wait_for(lambda: [e for e in events(runs) if e["event"] == "start"], "the start")
    (stem,) = children_of(process.pid)
    (worker,) = children_of(stem)
    os.kill(worker, signal.SIGKILL)  # in training or between two orders: an order is not repeated
    done = process.end()
    assert done.status == 0, done.err
    (lost,) = [e for e in events(runs) if e["event"] == "lost"]
    assert "worker process died" in lost["why"]
    trained = [(e["round"], e["site"]) for e in events(runs) if e["event"] == "train"]
    assert len(trained) == 3 * 3 - 1 and (lost["round"], lost["site"]) not in trained
    assert f"round {lost['round']}: {lost['site']} did not answer" in done.err


@real_processes
def test_the_second_of_two_processes_is_refused(federation: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=200)
    process = Running(tmp_path / "first", "run", study, "--workers", 0, "--runs", runs)
    wait_for(lambda: [e for e in events(runs) if e["event"] == "round"], "the first round")
    (folder,) = runs.iterdir()
    before = len(events(runs))
    refused(call("resume", folder, "--workers", 0), "another process", str(folder))
    refused(call("run", study, "--workers", 0, "--runs", runs), "another process is working on it")
    wait_for(lambda: len(events(runs)) > before, "the first process to go on")
    assert [e["event"] for e in events(runs) if e["event"] in ("start", "resume")] == ["start"]
    process.kill()


@real_processes
def test_an_interrupt_names_resume(federation: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=200)
    process = Running(tmp_path / "first", "run", study, "--workers", 0, "--runs", runs)
    wait_for(lambda: [e for e in events(runs) if e["event"] == "round"], "the first round")
    os.kill(process.pid, signal.SIGINT)
    done = process.end()
    sentence = refused(done, "resume", status=130)
    (folder,) = runs.iterdir()
    assert sentence == f"consilium: stopped. Committed rounds are saved; `consilium resume {folder}` continues."
    assert done.err.splitlines()[1] == f"  in {folder}"


# ------------------------------------------------------------------------------------ full disks

FULL = """
set -e
mount -t tmpfs -o size=160k none {disk}
{python} -m consilium.cli.main run {study} --workers 0 --runs {disk}/runs >{out}/first 2>&1 && exit 50 || status=$?
echo $status > {out}/status
cp -r {disk}/runs {out}/left
mount -o remount,size=50m {disk}
{python} -m consilium.cli.main resume {disk}/runs/* --workers 0 >{out}/second 2>&1 || exit 51
cp -r {disk}/runs {out}/done
"""


def _may_mount() -> bool:
    unshare = shutil.which("unshare")
    return bool(unshare) and subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode == 0


@real_processes
@pytest.mark.skipif(not _may_mount(), reason="needs a disk of its own (unshare)")
def test_a_full_disk(whole: Path, federation: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    study = scaffold(tmp_path, federation)
    script = FULL.format(disk=disk, study=study, out=tmp_path, python=sys.executable)
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    first = (tmp_path / "first").read_text()
    assert done.returncode == 0, (done, first, (tmp_path / "second"))
    assert (tmp_path / "status").read_text() == "1\n"
    assert "Traceback" not in first
    assert "No space left" in first and "consilium resume" in first
    (folder,) = (tmp_path / "done").iterdir()
    same_bytes(folder, whole)


def test_a_full_disk_is_no_absent_site(
    whole: Path, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on a disk of 240 kB: sites that could not write their memory were left out, and the run went on."""
    put = MemoryStore.put

    def full(memories: MemoryStore, round: int, *rest: Any) -> None:
        if (memories.site, round) == ("bea", 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(memories, round, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "put", full)
        done = call("run", scaffold(tmp_path, federation), "--workers", 0, "--runs", tmp_path / "runs")
    refused(done, "No space left", "consilium resume", status=1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert call("resume", folder, "--workers", 0, "--json").status == 0
    same_bytes(folder, whole)


def test_a_disk_that_is_full_at_the_report(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr("consilium.reporting.write_report", full)
    done = call("run", study, "--workers", 0, "--runs", tmp_path / "runs")
    assert done.status == 1
    assert "No space left" in done.err and "please report it" not in done.err


# ------------------------------------------------------------------------------------ on a terminal


@real_processes
def test_a_terminal_sees_a_live_display_and_keeps_a_clean_screen(federation: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=3)
    terminal = Terminal("run", study, "--workers", 0, "--runs", tmp_path / "runs")
    assert terminal.end() == 0
    assert "━" in terminal.text and "round 2/3" in terminal.text
    assert terminal.text.count("\x1b[?25l") == terminal.text.count("\x1b[?25h") == 1  # the cursor is back
    left = [line for line in lines_of(terminal.text) if line.strip()]
    assert not any("━" in line for line in left), left
    assert left[0].startswith("reading ")  # said before anything slow is imported
    assert left[1].startswith("fedavg: training 3 rounds")
    assert left[-1] == str(next((tmp_path / "runs").iterdir()))


@real_processes
def test_control_c_on_a_terminal(federation: Path, tmp_path: Path) -> None:
    """The terminal sends the interrupt to the workers too."""
    runs = tmp_path / "runs"
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=200)
    terminal = Terminal("run", study, "--workers", 1, "--runs", runs)
    wait_for(lambda: terminal.read() and [e for e in events(runs) if e["event"] == "round"], "the first round")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert not list(runs.glob("*/summary.json"))  # it did not wait for the 200 rounds
    left = [line for line in lines_of(terminal.text) if line.strip()]
    (folder,) = runs.iterdir()
    assert left[-1].startswith("consilium: stopped.") and f"`consilium resume {folder}`" in left[-1]
    assert "Traceback" not in terminal.text
    assert "did not answer" not in terminal.text
