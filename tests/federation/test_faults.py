"""Killed sites, a killed server, strangers: nothing committed is lost, and the bits stay those of the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium import simulation
from tests.federation.conftest import Running, digest
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def test_a_killed_site_is_missed_and_comes_back_by_itself(running: Running, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "apfl", study__name="returning", study__rounds=40, study__score_every=40, study__deadline=100.0
    )
    running.office.submit(study)
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
    study = toy_study(
        federation,
        "scaffold",
        study__name="killed-server",
        study__rounds=30,
        study__score_every=30,
        study__deadline=60.0,
    )
    job = running.office.submit(study)
    running.wait_for_round(study, 5)
    running.kill("server")
    done = max(e["round"] for e in running.events(study) if e["event"] == "round")
    running.local.start("server")
    running.wait_until(lambda: _all_here(running), "sites that connect again")
    running.office.resume(job)
    run = running.finished(study)
    assert sum(e["event"] == "round" and e["round"] == done for e in running.events(study)) == 1
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)


def _all_here(running: Running) -> bool:
    try:
        return set(running.office.connected()) == set(running.office.sites)
    except Exception:
        return False
