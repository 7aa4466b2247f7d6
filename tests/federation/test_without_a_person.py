"""Runs that go on without a person, on real processes: crashed servers, flapping, hanging and dead sites."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from consilium import simulation
from consilium.errors import RunError
from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from consilium.federation.supervisor import alone
from consilium.federation.trial import free_port
from tests.federation.conftest import PATIENCE, SITES, Running, digest
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def repeated(running: Running, study: object, run: Path, to: Path) -> bool:
    again = simulation.run(simulation.with_attendance(study, run), to, workers=0)  # type: ignore[arg-type]
    return digest(again.folder) == digest(run)


def job_processes(running: Running, name: str) -> list[psutil.Process]:
    """The processes of jobs that a participant has started."""
    return list(psutil.Process(running.local.processes[name].pid).children(recursive=True))


def test_a_crashed_server_goes_on_by_itself(running: Running, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "scaffold", study__name="crashed", study__rounds=20, study__score_every=20, study__deadline=60.0
    )
    job = running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.kill("server")
    running.local.start("server")  # as its supervisor does
    run = running.finished(study)
    last = running.admin.latest(job)
    assert last != job
    assert running.admin.state(job) == "FINISHED:ABNORMAL"  # not shown as running
    assert running.admin.outcome(job)["state"] == "crashed"
    with pytest.raises(RunError, match=f"resumed as {last}"):
        running.admin.fetch(job, tmp_path / "runs")
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)


def test_a_dead_job_process_at_one_site_does_not_end_the_run(
    running: Running, federation: Path, tmp_path: Path
) -> None:
    """Only the process of the job dies; the site itself goes on, and takes part in the next job."""
    study = toy_study(
        federation, "scaffold", study__name="dead-job", study__rounds=100, study__score_every=100, study__deadline=60.0
    )
    running.admin.submit(study)
    running.wait_for_round(study, 3)
    for process in job_processes(running, "bea"):
        process.kill()
    killed = max(event["round"] for event in running.events(study) if event["event"] == "round")
    assert killed < 100  # else the run was over
    run = running.finished(study)
    lost = {event["round"]: event["site"] for event in running.events(study) if event["event"] == "lost"}
    print(f"killed in round {killed}, lost rounds {sorted(lost)}")
    assert set(lost.values()) <= {"bea"}  # none, if its next process answers within the deadline
    assert max(running.rounds(study, "bea")) > max([killed, *lost])
    assert repeated(running, study, run, tmp_path)


@pytest.mark.slow
def test_a_dead_job_process_at_the_server_goes_on_by_itself(running: Running, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "apfl", study__name="dead-server-job", study__rounds=20, study__score_every=20,
        study__deadline=60.0,
    )  # fmt: skip
    job = running.admin.submit(study)
    running.wait_for_round(study, 3)
    for process in job_processes(running, "server"):
        process.kill()
    run = running.finished(study)
    assert running.admin.outcome(job)["state"] == "crashed"
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)


@pytest.mark.slow
def test_a_site_that_crashes_again_and_again_is_simply_away(running: Running, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "scaffold", study__name="flapping", study__rounds=60, study__score_every=60, study__deadline=60.0
    )
    running.admin.submit(study)
    running.wait_for_round(study, 2)
    over = threading.Event()

    def flaps() -> None:
        while not over.wait(20.0):
            running.kill("bea")
            running.local.start("bea")

    thread = threading.Thread(target=flaps)
    start = time.monotonic()
    thread.start()
    try:
        run = running.finished(study)
    finally:
        over.set()
        thread.join()
    seconds = time.monotonic() - start
    jobs = [event for event in running.events(study) if event["event"] == "going on"]
    assert len(jobs) <= 3 + seconds / 60  # pauses grow
    assert {event["site"] for event in running.events(study) if event["event"] == "lost"} <= {"bea"}
    assert repeated(running, study, run, tmp_path)
    running.wait_until(lambda: set(running.connected()) == set(SITES), "bea to connect")


@pytest.mark.slow
def test_a_hanging_site_costs_its_silence_not_the_deadline(running: Running, federation: Path, tmp_path: Path) -> None:
    """SIGSTOP: the connection stays, nothing is said. The deadline is an hour."""
    study = toy_study(
        federation, "scaffold", study__name="hanging", study__rounds=12, study__score_every=12, study__silence=6.0
    )
    running.admin.submit(study)
    running.wait_for_round(study, 2)
    stopped = job_processes(running, "cid")
    for process in stopped:
        process.suspend()
    try:
        run = running.finished(study)
    finally:
        for process in stopped:
            with_suspended(process)
    seconds = {e["round"]: e["seconds"] for e in running.events(study) if e["event"] == "round"}
    waited = [round for round, value in seconds.items() if value > 5]
    assert 1 <= len(waited) <= 2  # it was waited for twice at most
    assert max(seconds.values()) < 60
    why = {e["why"] for e in running.events(study) if e["event"] == "lost"}
    assert "it showed no sign of life" in why
    assert running.folder(study).summary()["unscored"] == ["cid"]
    assert repeated(running, study, run, tmp_path)


def with_suspended(process: psutil.Process) -> None:
    try:
        process.resume()
        process.kill()  # so that later tests find a fresh one
    except psutil.NoSuchProcess:
        pass


@pytest.mark.slow
def test_stop_takes_effect_within_a_round(running: Running, federation: Path) -> None:
    study = toy_study(
        federation, "scaffold", study__name="stop-soon", study__rounds=500, study__score_every=500,
        study__deadline=600.0,
    )  # fmt: skip
    job = running.admin.submit(study)
    running.wait_for_round(study, 2)
    for process in job_processes(running, "cid"):
        process.suspend()  # a round that would last
    rounds = max(e["round"] for e in running.events(study) if e["event"] == "round")
    start = time.monotonic()
    running.admin.stop(job)
    assert running.admin.wait(job, PATIENCE) == "FINISHED:ABORTED"
    assert time.monotonic() - start < 45
    assert max(e["round"] for e in running.events(study) if e["event"] == "round") <= rounds + 1


def test_a_second_instance_of_a_site_is_refused(running: Running, tmp_path: Path) -> None:
    kits = make_kits(Project("two", "localhost", free_port(), ("ada",)), tmp_path / "kits")
    hospital = tmp_path / "hospital.toml"
    hospital.write_text('site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n')
    words = [sys.executable, "-m", "consilium", "federation", "site", str(kits["ada"]), "--hospital", str(hospital)]
    first = subprocess.Popen(words)
    try:
        running.wait_until(lambda: (kits["ada"] / "process.log").exists(), "the first to start")
        second = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert second.returncode == 2
        assert "the site 'ada' is running already" in second.stderr
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE) == 0
    for place in (kits["ada"], tmp_path / "m"):  # the locks went with the first and its child
        with alone(place, "nobody"):
            pass
