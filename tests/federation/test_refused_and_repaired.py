"""A hospital that refuses a study, and one whose memory is damaged: on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium import simulation
from consilium.store import read_document
from tests.federation.conftest import PATIENCE, Running, digest
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(900)]


def test_a_site_that_refuses_a_study_is_left_out(running: Running, federation: Path) -> None:
    study = toy_study(federation, study__name="refused", study__rounds=2, study__score_every=2)
    rules = running.local.hospital("bea")
    before = rules.read_text()
    try:
        rules.write_text(before.partition("[limits]")[0] + '[limits]\nrefused = ["fedavg"]\n')
        job = running.admin.submit(study)
        running.finished(study)
        running.admin.wait(job, PATIENCE)
    finally:
        rules.write_text(before)
    why = "its hospital.toml does not allow the method"
    assert why in running.folder(study).summary()["left_out"]["bea"]
    assert why in running.admin.outcome(job)["said"]
    assert {e["site"] for e in running.events(study) if e["event"] == "train"} == {"ada", "cid"}


@pytest.mark.slow
def test_a_memory_damaged_between_jobs_is_made_again(running: Running, federation: Path, tmp_path: Path) -> None:
    """The round that made it is repeated at that site alone, and the run ends with the simulator's bits."""
    study = toy_study(federation, "scaffold", study__name="damaged", study__rounds=8, study__score_every=8)
    job = running.admin.submit(study)
    running.wait_for_round(study, 3)
    running.admin.stop(job)
    running.admin.wait(job, PATIENCE)
    last = max((running.folder(study).path / "server").glob("[0-9]*.json"))
    merged = read_document(last)["merged"]["bea"]
    memory = running.local.memory("bea") / running.folder(study).path.name / "memory"
    (memory / f"{merged:05d}.json").write_bytes(b"")
    last_job = running.admin.resume(job)
    run = running.finished(study)
    running.admin.wait(last_job, PATIENCE)
    said = [e["text"] for e in running.events(study) if e["event"] == "warning"]
    assert f"the memory of bea was damaged; round {merged + 1} was repeated there to make it again." in said
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)
