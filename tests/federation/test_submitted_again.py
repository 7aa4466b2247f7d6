"""A study that is submitted once more: its run is found, compared with the data of today, or made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from consilium import simulation
from consilium.errors import RunError
from consilium.federation.admin import for_federation
from consilium.federation.server_job import check_finished, choose_run
from consilium.hospital import Hospital
from consilium.run_folder import RunFolder
from tests.federation.conftest import PATIENCE, SITES, Running, digest
from tests.federation.test_service_and_wire import Direct, deploy
from tests.toy import SIZES, toy_study


def test_the_folder_of_a_job(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation)
    first, second = (RunFolder.path_of(study, tmp_path, attempt) for attempt in (1, 2))
    assert choose_run(study, tmp_path, "", False) == first
    assert choose_run(study, tmp_path, "", True) == first
    folder = RunFolder.create_at(first, study)
    assert choose_run(study, tmp_path, "", True) == first  # it has not begun
    folder.note("start")
    assert choose_run(study, tmp_path, "", False) == first
    assert choose_run(study, tmp_path, "", True) == second
    RunFolder.create_at(second, study).note("start")
    assert choose_run(study, tmp_path, "", False) == second
    assert choose_run(study, tmp_path, first.name, False) == first  # a job that follows another


def test_a_finished_study_is_compared_with_the_data_of_today(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(federation, tmp_path / "data")
    hospitals = {
        name: Hospital(name, str(tmp_path / "data" / name), str(tmp_path / name), ("blob",), "cpu") for name in SIZES
    }
    study = for_federation(toy_study(tmp_path / "data", study__rounds=1), tuple(SIZES))
    folder = deploy(study, hospitals, tmp_path / "server")
    said = check_finished(study, folder, Direct(study, hospitals))
    assert said.startswith(f"this study was finished already, as {folder.path.name}, and was not trained again")
    with monkeypatch.context() as changed:
        changed.setattr("consilium.federation.server_job.code_hashes", lambda _: {"method.py": "other"})
        with pytest.raises(RunError, match=r"made from something else: the plug-in file method\.py has changed"):
            check_finished(study, folder, Direct(study, hospitals))
    table = tmp_path / "data/bea/cases.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match=r"made from something else: site 'bea': it has other cases.*submit STUDY.toml"):
        check_finished(study, folder, Direct(study, hospitals))


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.xdist_group("federation")
@pytest.mark.timeout(900)
def test_a_finished_study_is_trained_again_only_if_asked(running: Running, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__name="once-more", study__rounds=1, study__deadline=60.0)
    admin = running.admin
    first = admin.submit(study)
    admin.wait(first, PATIENCE)
    run = running.finished(study)
    before = len(running.events(study))
    second = admin.submit(study)
    admin.wait(second, PATIENCE)
    outcome = admin.outcome(second)
    assert (outcome["state"], outcome["run"]) == ("finished", run.name)
    assert "was finished already" in outcome["said"]
    assert len(running.events(study)) == before
    assert digest(admin.fetch(second, tmp_path / "runs")) == digest(run)
    third = admin.submit(study, again=True)
    admin.wait(third, PATIENCE)
    outcome = admin.outcome(third)
    assert (outcome["state"], outcome["run"]) == ("finished", f"{run.name}-2")
    again = RunFolder.path_of(for_federation(study, SITES), running.local.runs, 2)
    assert digest(again) == digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)
