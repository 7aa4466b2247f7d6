"""`run --dry-run` tells what a run would do; it leaves nothing behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from consilium import dry_run, step_timing
from consilium.dry_run import estimated_seconds, time_text, tried_times
from consilium.methods import METHODS
from consilium.step_timing import StepTimes
from tests.cli.conftest import write_study
from tests.cli.terminal import call, refused
from tests.toy import RESIDUAL, toy_study


def test_sites_steps_phases_and_bytes_are_those_of_the_run(
    finished: Callable[[str], Path], federation: Path, tmp_path: Path
) -> None:
    run = finished("fedsm")
    file = write_study(tmp_path / "toy.toml", federation, "fedsm")
    told = call("run", file, "--dry-run", "--json", "--runs", tmp_path / "runs")
    assert told.status == 0, told.err
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["event"] == "train"]
    found = told.document
    assert {site["site"]: site["train"] for site in found["sites"]} == events[0]["sites"]
    for site in found["sites"]:
        first = next(event for event in trained if event["site"] == site["site"])
        assert site["steps"] == first["steps"]
    after = [("statistics", 1), ("routing", 1), ("calibrate", 1)]
    assert [(phase["phase"], phase["rounds"]) for phase in found["phases"]] == [("train", 2), *after]
    seen = max(event["bytes_up"] for event in trained if event["phase"] == "train")
    assert found["phases"][0]["bytes_up"] == pytest.approx(seen, rel=0.02)
    assert found["scorings"] == sum(event["event"] == "score" for event in events)
    assert (found["state"], found["seconds"] > 0) == ("new", True)


def test_nothing_is_left_behind(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    before = sorted(tmp_path.rglob("*"))
    told = call("run", study, "--dry-run", "--runs", tmp_path / "runs")
    assert told.status == 0, told.err
    assert sorted(tmp_path.rglob("*")) == before
    for word in ("device: ", "steps a round", "phase train: 2 rounds", "memory: ", "disk: ", "time: about "):
        assert word in told.out


def test_more_threads_than_cores_are_noted_and_absurd_ones_refused(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "default_workers", lambda: 1)
    told = call("run", study, "--dry-run", "--runs", tmp_path / "runs", "--set", "local.threads=2")
    assert "note: [local] threads = 2: this machine has 1 core; more is slow" in told.out
    refused(call("run", study, "--dry-run", "--set", "local.threads=1000"), "threads = 1000: at most 256")


def test_a_device_that_is_not_there_is_named_with_what_would_be_used(study: Path, tmp_path: Path) -> None:
    told = call("run", study, "--dry-run", "--device", "cuda:99", "--runs", tmp_path / "runs")
    assert told.status == 2
    assert "in place of cuda:99, which cannot be used" in told.out
    assert "Set [local] device = 'auto', which uses" in told.err


def test_a_phase_that_was_not_timed_costs_as_much_as_the_dearest_that_was(federation: Path) -> None:
    made = toy_study(federation, "fedavg-finetune")
    times = {"score": 0.0, "score_full": 0.0, "prepare": 0.0, "case_bytes": 1, "server_bytes": 1, "memory_bytes": 1}
    known = StepTimes(step={"train": 2.0}, items=1.0, **times)  # type: ignore[arg-type]
    both = replace(known, step={"train": 2.0, "adapt": 2.0})
    assert estimated_seconds(made, known, 1) == estimated_seconds(made, both, 1)


def test_a_teacher_that_catches_up_is_not_counted_in_every_round(organs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of optimisers in place of seconds, a step takes one."""
    made = [0]

    @contextmanager
    def clock() -> Iterator[list[float]]:
        before, taken = made[0], [0.0]
        yield taken
        taken[0] = made[0] - before

    def count(*_: object) -> None:
        made[0] += 1

    monkeypatch.setattr(step_timing, "_clock", clock)
    hook = register_optimizer_step_post_hook(count)
    try:
        times = tried_times(toy_study(organs, "fedavg-pl", method__teachers__rounds=9))
    finally:
        hook.remove()
    assert times.step == {"teacher": 1.0}  # in the next phase the site waits for the other teachers


def test_a_finished_study_is_told(finished: Callable[[str], Path], federation: Path, tmp_path: Path) -> None:
    run = finished("fedavg")
    file = write_study(tmp_path / "toy.toml", federation)
    told = call("run", file, "--dry-run", "--runs", run.parent)
    assert f"{run}, which is finished: nothing would be trained" in told.out


def test_a_site_without_training_cases_is_refused(study: Path, tmp_path: Path, federation: Path) -> None:
    import shutil

    copy = tmp_path / "unsplit"
    shutil.copytree(federation, copy)
    table = copy / "ada/cases.csv"
    table.write_text(table.read_text().replace(",train,", ",test,"))
    told = call("run", study, "--dry-run", "--set", f"data.federation={copy}")
    assert told.status == 2 and "no training cases at ada" in told.err


@pytest.mark.usefixtures("no_report")
def test_quiet_prints_the_run_folder_alone(finished: Callable[[str], Path], federation: Path, tmp_path: Path) -> None:
    run = finished("fedavg")
    file = write_study(tmp_path / "toy.toml", federation)
    done = call("run", file, "--runs", run.parent, "--quiet")
    assert (done.status, done.out, done.err) == (0, f"{run}\n", "")
    again = call("resume", run, "-q")
    assert (again.status, again.out, again.err) == (0, f"{run}\n", "")
    watched = call("run", file, "--runs", run.parent, "--quiet", "--watch")
    assert watched.out == f"{run}\n"
    assert watched.err.startswith("  page: http://127.0.0.1:")  # it was asked for, and nothing else tells its port


@pytest.mark.usefixtures("no_report")
def test_quiet_on_a_terminal_too(
    finished: Callable[[str], Path], federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    run = finished("fedavg")
    file = write_study(tmp_path / "toy.toml", federation)
    monkeypatch.setattr("io.StringIO", Screen)
    assert f"reading {file}" in call("run", file, "--runs", run.parent, "--workers", 0).err
    assert call("run", file, "--runs", run.parent, "--workers", 0, "-q").err == ""
    assert call("resume", run, "--workers", 0, "-q").err == ""


def test_a_tracker_that_is_not_installed_is_refused_as_by_the_run(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consilium.tracking.find_spec", lambda name: None)
    told = call("run", study, "--dry-run", "--runs", tmp_path / "runs", "--set", 'study.track=["mlflow"]')
    refused(told, "pip install 'consilium[mlflow]'")


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "a second"), (42.4, "42 s"), (400.0, "7 min"), (9000.0, "2.5 h")])
def test_times_promise_no_more_than_is_known(seconds: float, said: str) -> None:
    assert time_text(seconds) == said


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_looked_at(method: str, organs: Path, tmp_path: Path) -> None:
    file = write_study(tmp_path / "toy.toml", organs, method)
    units = f"task.residual_units={int(method in RESIDUAL)}"
    told = call("run", file, "--dry-run", "--runs", tmp_path / "runs", "--set", units)
    assert told.status == 0, told.err
