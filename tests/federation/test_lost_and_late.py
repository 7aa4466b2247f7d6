"""Lost keys, slow sites, sites away at the end, a server that leaves a crash to a person: on real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from consilium import simulation
from tests.federation.conftest import PATIENCE, SITES, Running, digest
from tests.federation.test_without_a_person import job_processes, repeated
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]
COMMAND = [sys.executable, "-m", "consilium", "federation"]


@pytest.mark.parametrize("rejoin", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_site_whose_key_is_lost_between_jobs(running: Running, federation: Path, rejoin: bool) -> None:
    """It is left out, and the journal says why; a study that allows it lets the site go on as a new one."""
    study = toy_study(
        federation, "scaffold", study__name=f"lost-key-{rejoin}".lower(), study__rounds=30, study__score_every=30,
        study__deadline=60.0, study__rejoin=rejoin,
    )  # fmt: skip
    job = running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.admin.stop(job)
    running.admin.wait(job, PATIENCE)
    before = max(running.rounds(study, "bea"))
    (running.local.memory("bea") / "key").unlink()
    last = running.admin.resume(job)
    running.finished(study)
    running.admin.wait(last, PATIENCE)
    cause = "it has another key than when the run began: its memory folder was lost or replaced"
    (event,) = [e for e in running.events(study) if e["event"] in ("left out", "rejoined")]
    assert (event["event"], event["site"]) == ("rejoined" if rejoin else "left out", "bea")
    assert event["why"].startswith(cause)
    assert max(running.rounds(study, "bea")) == (30 if rejoin else before)
    assert max(running.rounds(study, "ada")) == max(running.rounds(study, "cid")) == 30
    summary = running.folder(study).summary()
    assert summary.get("left_out", {}).keys() == (set() if rejoin else {"bea"})
    if not rejoin:
        assert "[study] rejoin = true lets it go on as a new site" in running.admin.outcome(last)["said"]


@pytest.mark.slow
def test_a_site_whose_memory_is_lost_between_jobs_goes_on_as_a_new_one(running: Running, federation: Path) -> None:
    """The key is there, what the method kept is not: one round is lost, then the site begins anew."""
    study = toy_study(
        federation, "scaffold", study__name="lost-memory", study__rounds=30, study__score_every=30,
        study__deadline=60.0, study__rejoin=True,
    )  # fmt: skip
    job = running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.admin.stop(job)
    running.admin.wait(job, PATIENCE)
    before = max(running.rounds(study, "bea"))
    shutil.rmtree(running.local.memory("bea") / running.folder(study).path.name / "memory")
    running.admin.resume(job)
    running.finished(study)
    lost = [(e["site"], e["why"]) for e in running.events(study) if e["event"] == "lost"]
    assert lost == [("bea", "it has lost its memory of this run")]
    assert [e["site"] for e in running.events(study) if e["event"] == "rejoined"] == ["bea"]
    assert [round for round in running.rounds(study, "bea") if round > before] == list(range(before + 2, 31))


def test_a_quorum_closes_rounds_without_a_slow_site(running: Running, federation: Path, tmp_path: Path) -> None:
    """cid stands still for a while; with `wait = "quorum"` nobody waits for it, though the deadline is an hour."""
    study = toy_study(
        federation, "scaffold", study__name="quorum", study__rounds=40, study__score_every=40, study__wait="quorum",
        study__quorum=2, study__deadline=3600.0, study__silence=600.0,
    )  # fmt: skip
    running.admin.submit(study)
    running.wait_for_round(study, 2)
    stopped = job_processes(running, "cid")
    for process in stopped:
        process.suspend()
    try:
        since = max(e["round"] for e in running.events(study) if e["event"] == "round")
        running.wait_for_round(study, since + 4)  # it waits for less than the site's silence
    finally:
        for process in stopped:
            process.resume()
    run = running.finished(study)
    closed = "the round closed with 2 of 3 sites, a quorum"
    assert closed in {e["why"] for e in running.events(study) if e["event"] == "lost" and e["site"] == "cid"}
    rounds = {e["round"] for e in running.events(study) if e["event"] == "round"}
    assert rounds == set(range(1, 41))
    assert "unscored" not in running.folder(study).summary()  # scores are waited for
    assert repeated(running, study, run, tmp_path)


def test_resume_scores_a_site_that_was_away_at_the_end(running: Running, federation: Path, tmp_path: Path) -> None:
    """And `status` links the two jobs."""
    study = toy_study(
        federation, "scaffold", study__name="away-at-end", study__rounds=30, study__score_every=30,
        study__deadline=60.0, study__silence=20.0,  # on a busy machine a sound site may be quiet for seconds
    )  # fmt: skip
    job = running.admin.submit(study)
    running.wait_for_round(study, 2)
    running.kill("cid")
    run = running.finished(study)
    running.admin.wait(job, PATIENCE)
    job = running.admin.latest(job)
    assert running.folder(study).summary()["unscored"] == ["cid"]
    assert f"`consilium federation resume {job}` asks them again" in running.admin.outcome(job)["said"]
    weights = digest(run)
    running.start("cid")
    last = running.admin.resume(job)
    running.admin.wait(last, PATIENCE)
    summary = running.folder(study).summary()
    assert "unscored" not in summary and "undelivered" not in summary
    assert sorted(summary["headline"]["sites"]) == sorted(SITES)
    assert digest(run) == weights
    assert (running.local.memory("cid") / run.name / "release.safetensors").exists()
    admin = ["--kit", str(running.local.kits["admin"])]
    status = subprocess.run([*COMMAND, "status", *admin], capture_output=True, text=True, check=True).stdout
    assert f"job {job}  away-at-end  finished:completed, resumed as {last}" in status
    old = subprocess.run([*COMMAND, "fetch", job, *admin], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert f"job {job} was resumed as {last}" in old.stderr


@pytest.mark.slow
def test_a_server_with_no_resume_leaves_a_crash_to_a_person(running: Running, federation: Path, tmp_path: Path) -> None:
    """As started with `consilium federation server --no-resume`, whose supervisor starts the process again."""
    running.kill("server")
    kit = running.local.kits["server"]
    server = subprocess.Popen([*COMMAND, "server", str(kit), "--no-resume"])
    try:
        running.wait_until(lambda: set(running.connected()) == set(SITES), "sites that connect again")
        study = toy_study(
            federation, "scaffold", study__name="no-resume", study__rounds=20, study__score_every=20,
            study__deadline=60.0,
        )  # fmt: skip
        job = running.admin.submit(study)
        running.wait_for_round(study, 3)
        for process in reversed(psutil.Process(server.pid).children(recursive=True)):
            os.kill(process.pid, signal.SIGKILL)
        running.wait_until(lambda: set(running.connected()) == set(SITES), "sites that connect again")
        outcome = running.admin.outcome(job)
        assert (outcome["state"], outcome["again"]) == ("crashed", False)
        assert f"`consilium federation resume {job}` goes on" in outcome["said"]
        assert running.admin.state(job) == "FINISHED:ABNORMAL"
        assert running.admin.successor(job) is None
        done = len([e for e in running.events(study) if e["event"] == "round"])
        last = running.admin.resume(job)
        run = running.finished(study)
        assert done < 20
        running.admin.wait(last, PATIENCE)
        assert running.admin.successor(job) == last
        assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        running.local.start("server")
        running.wait_until(lambda: set(running.connected()) == set(SITES), "sites that connect again")
