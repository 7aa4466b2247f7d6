"""run, resume and demo when all goes well."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from consilium import demo
from consilium.cli.progress import ProgressDisplay
from consilium.data.phantoms import write_phantom
from consilium.run_folder import RunFolder
from tests.cli.conftest import write_study
from tests.cli.terminal import Outcome, call, refused

Failing = Callable[[int], AbstractContextManager[None]]
Finished = Callable[[str], Path]
FILES = ("last.safetensors", "best.safetensors", "scores.csv")


def run(study: Path, *more: object, workers: int = 0) -> Outcome:
    return call("run", study, "--workers", workers, "--runs", study.parent / "runs", *more)


def trained(study: Path, *more: object, workers: int = 0) -> Path:
    """The folder of a run that must succeed; --json, because a report takes longer than the toy's training."""
    done = run(study, "--json", *more, workers=workers)
    assert done.status == 0, done.err
    return Path(done.document["run"])


def test_run_prints_its_folder_last(study: Path) -> None:
    done = run(study)
    assert done.status == 0
    assert done.out == f"{done.folder}\n"
    assert done.folder.parent == study.parent / "runs"
    for name in ("study.toml", "origin.json", "journal.jsonl", "scores.csv", "summary.json", "report.html"):
        assert (done.folder / name).is_file(), name
    assert (done.folder / "scores.csv").read_text().splitlines()[0] == (
        "round,phase,model,of,when,site,outside,split,case,label,metric,value"
    )


@pytest.mark.usefixtures("no_report")
def test_progress_without_a_terminal_is_plain_lines(study: Path) -> None:
    done = run(study)
    lines = done.err.splitlines()
    assert lines[0] == "fedavg: training 2 rounds at 3 sites (ada 8, bea 12, cid 10)"
    assert lines[1] == f"  in {done.folder}"
    assert lines[2].startswith("  round 1/2  validation dice 0.") and "s left" in lines[2]
    assert lines[3].startswith("  round 2/2  validation dice 0.") and "left" not in lines[3]  # nothing is
    assert "site mean" in lines[-1]
    assert not any("\x1b" in line for line in lines)


@pytest.mark.usefixtures("no_report")
def test_a_finished_study_says_so(study: Path) -> None:
    folder = trained(study)
    again = run(study)
    assert (again.status, again.folder) == (0, folder)
    assert again.err.startswith("this study is already finished: ")
    resumed = call("resume", folder)
    assert (resumed.status, resumed.folder) == (0, folder)


def test_set_changes_a_key_and_the_folder(study: Path) -> None:
    changes = (
        "--set",
        "study.rounds=1",
        "--set",
        "local.lr=0.02",
        "--set",
        "study.name=other",
        "--set",
        "study.seed=7",
    )
    folder = trained(study, *changes)
    assert folder.name.startswith("other-s7-")
    opened = RunFolder.open(folder).study
    assert (opened.plan.rounds, opened.local.lr) == (1, 0.02)


def test_one_json_document(study: Path) -> None:
    done = run(study, "--json")
    assert (done.status, done.err) == (0, "")
    promised = {"method", "seed", "rounds", "headline", "best", "last", "seconds", "bytes_up", "bytes_down"}
    assert promised | {"run", "peak_memory_mb"} <= done.document.keys()
    assert done.document["headline"]["model"] == "global"
    assert run(study, "--json").document == done.document


@pytest.mark.usefixtures("no_report")
def test_one_site_and_one_round_are_told_in_the_singular(federation: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "toy.toml", federation, rounds=1)
    study.write_text(study.read_text().replace("[study]", '[study]\nsites = ["ada"]'))
    assert run(study).err.startswith("fedavg: training 1 round at 1 site (ada 8)\n")
    refused(run(study, "--set", "study.min_sites=2"), "[study] min_sites = 2: there is 1 site.")
    assert "what leaves the hospital\n" in call("methods", "--study", study).out


@pytest.mark.federation  # it starts a process
def test_worker_processes_give_the_same_bytes(study: Path, finished: Finished) -> None:
    folder = trained(study, workers=1)
    for name in FILES:
        assert (folder / name).read_bytes() == (finished("fedavg") / name).read_bytes(), name


def test_attendance_of_another_run_is_repeated(federation: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "toy.toml", federation, rounds=2)
    first = trained(study, "--set", "study.away={bea=[1]}")
    assert trained(study, "--attendance", first) == first  # the same study, so the same run
    other = trained(study, "--attendance", first, "--set", "study.name=other")
    assert (other / "last.safetensors").read_bytes() == (first / "last.safetensors").read_bytes()
    away = [e for e in RunFolder.open(other).events() if e["event"] == "away"]
    assert [(event["round"], event["site"]) for event in away] == [(1, "bea")]


@pytest.mark.usefixtures("no_report")
def test_too_few_sites_stop_the_run_and_resume_goes_on(federation: Path, tmp_path: Path, failing: Failing) -> None:
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=3)
    with failing(3):
        stopped = run(study)
    (folder,) = (tmp_path / "runs").iterdir()
    refused(stopped, "round 3", "min_sites", "the link broke", f"`consilium resume {folder}`", status=1)
    refused(run(study), f"`consilium resume {folder}`", status=2)
    resumed = call("resume", folder, "--workers", 0)
    assert (resumed.status, resumed.folder) == (0, folder)
    whole = trained(study, "--set", "study.name=whole")
    for name in FILES:
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_run_that_another_process_works_on_is_not_to_be_resumed(
    federation: Path, tmp_path: Path, failing: Failing
) -> None:
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=2)
    with failing(2):
        run(study)
    (folder,) = (tmp_path / "runs").iterdir()
    refused(call("compare", folder), f"`consilium resume {folder}`")
    with RunFolder.open(folder).locked():
        for done in (run(study), call("compare", folder), call("export", folder, "--to", tmp_path / "package")):
            said = refused(done, "another process is working on it", f"`consilium watch {folder}`")
            assert "consilium resume" not in said
        assert "another process is working on it" in run(study, "--dry-run").out


def test_a_failure_in_training_leaves_its_traceback_in_a_file(
    federation: Path, tmp_path: Path, failing: Failing
) -> None:
    study = write_study(tmp_path / "toy.toml", federation, "fedavg", rounds=3)
    with failing(2):
        stopped = run(study)
    (folder,) = (tmp_path / "runs").iterdir()
    log = folder / "sites/bea/errors.log"
    refused(stopped, f"round 2: bea did not answer: RuntimeError: the link broke (details in {log})", status=1)
    assert ", train round 2: answered 'failed'\nTraceback" in log.read_text()
    assert "site_service.py" in log.read_text()
    lost = [event["why"] for event in RunFolder.open(folder).events() if event["event"] == "lost"]
    assert [str(folder / f"sites/{site}/errors.log") in why for site, why in zip(("ada", "bea", "cid"), lost)] == [
        True
    ] * 3


@pytest.mark.usefixtures("no_report")
def test_progress_counts_the_papers_rounds_and_fedsm_below_one_over_k_warns(federation: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path / "toy.toml", federation, "fedsm", rounds=1)
    done = run(study, "--set", "method.pull=0.1")
    assert done.status == 0
    assert "below 1/K" in done.err
    assert "training 1 round" in done.err
    assert "round 1/1" in done.err


# ------------------------------------------------------------------------------------ demo


def test_demo_starts_without_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def stand_in(to: Path, rounds: int, seed: int, workers: int | None, watcher: Any) -> Any:
        asked.append((to, rounds, seed, workers))
        return type("Nothing", (), {"show": lambda self: None})()

    monkeypatch.setattr(demo, "run_demo", stand_in)
    done = call("demo")
    assert done.status == 0, done.err
    call("demo", "--to", tmp_path, "--rounds", 3, "--seed", 4, "--workers", 1)
    assert asked == [(Path("demo"), demo.DEFAULT_ROUNDS, 0, None), (tmp_path, 3, 4, 1)]


def test_demo_studies_differ_only_in_the_method(tmp_path: Path) -> None:
    data = tmp_path / "eyes"
    write_phantom("retina", data, 18, 16, 0)
    changes = [f'data.federation="{data}"', "study.name=same"]
    files = {name: demo.folder_of_studies() / f"demo_{name}.toml" for name in demo.METHODS}
    tables = {name: demo.load_study(file, changes).tables() for name, file in files.items()}
    assert {name: table.pop("method")["name"] for name, table in tables.items()} == {n: n for n in demo.METHODS}
    assert all(table == tables["fedavg"] for table in tables.values())


@pytest.mark.xdist_group("pool")
def test_demo_in_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: Any) -> None:
    monkeypatch.setattr(demo, "CASES", 18)
    monkeypatch.setattr(demo, "SIZE", 16)
    monkeypatch.setattr(demo, "Pool", lambda size: contextlib.nullcontext(pool))
    studies = tmp_path / "studies"
    studies.mkdir()
    for path in demo.folder_of_studies().glob("demo_*.toml"):
        text = path.read_text(encoding="utf-8")
        for large, small in (("size = [64, 64]", "size = [16, 16]"), ("widths = [8, 16, 32, 64]", "widths = [4, 8]")):
            assert large in text
            text = text.replace(large, small)
        (studies / path.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(demo, "folder_of_studies", lambda: studies)
    monkeypatch.setenv("COLUMNS", "140")
    to = tmp_path / "demo"
    done = call("demo", "--to", to, "--rounds", 1, "--workers", 2)
    assert done.status == 0, done.err
    assert len(list((to / "runs").iterdir())) == 4
    assert (to / "report.html").is_file()
    assert len((to / "predictions/predictions.csv").read_text().splitlines()) == 1 + 6
    for word in ("Pooled", "FedAvg", "FedSM", "drishti", "report.html"):
        assert word in done.out
    monkeypatch.setattr(demo, "write_report", lambda *_: None)
    again = call("demo", "--to", to, "--rounds", 1)
    assert (again.status, again.out) == (0, done.out)
    assert "training" not in again.err  # what is done is not repeated


def test_a_quiet_progress_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(quiet=True) as progress:
        progress.say("hello")
        progress.show({"event": "warning", "text": "look out"})
    assert capsys.readouterr() == ("", "")


def test_progress_prints_words_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "[local] device = 'cuda' cannot be used: " + "a long reason, " * 10
    with ProgressDisplay() as progress:
        progress.show({"event": "warning", "text": sentence})
    assert capsys.readouterr().err == f"note: {sentence}\n"


def test_the_summary_is_on_disk(finished: Finished) -> None:
    summary = json.loads((finished("fedsm") / "summary.json").read_text())
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("fedsm", 0, 2)
    assert summary["headline"]["model"] == "super"
    assert summary["headline"]["sites"].keys() == {"ada", "bea", "cid"}


def test_run_names_what_changed_and_asks_for_again(federation: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(federation, tmp_path / "own"))
    file = write_study(tmp_path / "toy.toml", own, rounds=1)
    command = ("run", file, "--workers", 0, "--runs", tmp_path / "runs")
    first = call(*command, "--json").document
    (own / "ada/labels/ada000.png").write_bytes((own / "ada/labels/ada001.png").read_bytes())
    done = call(*command)
    assert done.status == 2
    assert "site 'ada' has other images or masks" in done.err and "--again" in done.err
    assert done.out == ""
    again = call(*command, "--again", "--json").document
    assert again["run"] == f"{first['run']}-2"
    assert "finished" in call(*command).err


def test_a_device_that_is_not_there_leaves_no_folder(study: Path, tmp_path: Path) -> None:
    done = call("run", study, "--workers", 0, "--runs", tmp_path / "runs", "--set", "local.device=nope")
    assert done.status == 2
    assert "device = 'nope'" in done.err
    assert not list(tmp_path.glob("runs/*"))
