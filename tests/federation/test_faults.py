"""Killed sites, a killed server, strangers: nothing committed is lost, and the bits stay those of the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium import simulation
from tests.federation.conftest import PATIENCE, SITES, Running, digest
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def test_a_killed_site_is_missed_and_comes_back_by_itself(running: Running, federation: Path, tmp_path: Path) -> None:
    """Messages are changes of the last order, which the new process does not have."""
    study = toy_study(
        federation,
        "apfl",
        study__name="returning",
        study__rounds=40,
        study__score_every=40,
        study__deadline=280.0,
        study__compress=True,
    )
    running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.kill("bea")
    running.local.start("bea")  # before the deadline: the server need not wait for an answer that cannot come
    run = running.finished(study)
    rounds = [e["round"] for e in running.events(study) if e["event"] == "train" and e["site"] == "bea"]
    lost = [e["round"] for e in running.events(study) if e["event"] == "lost"]
    assert lost
    assert max(rounds) > max(lost)
    again = simulation.run(simulation.with_attendance(study, run), tmp_path, workers=0)
    assert digest(again.folder) == digest(run)


@pytest.mark.slow
def test_a_killed_server_goes_on(running: Running, federation: Path, tmp_path: Path) -> None:
    """Once it runs again it takes up the run by itself, as soon as its sites are back."""
    study = toy_study(
        federation,
        "scaffold",
        study__name="killed-server",
        study__rounds=30,
        study__score_every=30,
        study__deadline=60.0,
        study__compress=True,
    )
    running.admin.submit(study)
    running.wait_for_round(study, 5)
    running.kill("server")
    done = max(e["round"] for e in running.events(study) if e["event"] == "round")
    running.local.start("server")
    run = running.finished(study)
    assert sum(e["event"] == "round" and e["round"] == done for e in running.events(study)) == 1
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)


@pytest.mark.slow
def test_a_stopped_run_goes_on(running: Running, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "apfl", study__name="stopped", study__rounds=25, study__score_every=25, study__deadline=60.0
    )
    job = running.admin.submit(study)
    running.wait_for_round(study, 4)
    running.admin.stop(job)
    running.admin.wait(job, PATIENCE)
    done = max(e["round"] for e in running.events(study) if e["event"] == "round")
    assert done < 25
    running.admin.resume(job)
    assert digest(running.finished(study)) == digest(simulation.run(study, tmp_path, workers=0).folder)
    assert sum(e["event"] == "round" and e["round"] == done for e in running.events(study)) == 1


@pytest.mark.slow
def test_the_rounds_go_on_without_a_killed_site(running: Running, federation: Path, tmp_path: Path) -> None:
    """Nobody restarts it: one round waits until its deadline, later ones do not; then it comes back with its memory."""
    study = toy_study(
        federation, "scaffold", study__name="absent", study__rounds=60, study__score_every=60, study__deadline=12.0
    )
    running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.kill("cid")
    gone = max(running.rounds(study, "cid"))
    running.wait_for_round(study, gone + 6)
    running.local.start("cid")
    run = running.finished(study)
    lost = [e for e in running.events(study) if e["event"] == "lost" and e["site"] == "cid"]
    assert len(lost) >= 4
    assert max(running.rounds(study, "cid")) > max(e["round"] for e in lost)
    waited = [e["seconds"] for e in running.events(study) if e["event"] == "round" and e["seconds"] > 8]
    assert len(waited) <= 2  # it was waited for once
    assert digest(simulation.run(simulation.with_attendance(study, run), tmp_path, workers=0).folder) == digest(run)


@pytest.mark.slow
def test_fewer_than_min_sites_stop_the_run_until_they_are_back(
    running: Running, federation: Path, tmp_path: Path
) -> None:
    study = toy_study(
        federation, "apfl", study__name="too-few", study__rounds=12, study__score_every=12,
        study__deadline=12.0, study__min_sites=3,
    )  # fmt: skip
    job = running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.kill("bea")
    running.admin.wait(job, PATIENCE)
    said = running.admin.outcome(job)["said"]
    assert "2 of 3 sites answered, but min_sites is 3" in said
    assert f"consilium federation resume {job}" in said
    running.local.start("bea")
    running.wait_until(lambda: set(running.connected()) == set(SITES), "bea to connect")
    running.admin.resume(job)
    assert digest(running.finished(study)) == digest(simulation.run(study, tmp_path, workers=0).folder)
