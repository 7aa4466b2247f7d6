"""A federation on one machine ends with the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from consilium import simulation
from consilium.cli import federation as commands
from consilium.errors import RunError
from consilium.federation import trial
from consilium.federation.admin import AdminClient
from consilium.federation.returning import FOLLOWED_BY, OUTCOME
from tests.cli.conftest import write_study
from tests.cli.terminal import call
from tests.federation.conftest import digest
from tests.toy import toy_study


class Sleepers(trial.LocalFederation):
    """Participants that only sleep."""

    def start(self, name: str) -> None:
        self.processes[name] = subprocess.Popen(["sleep", "60"])


@contextlib.contextmanager
def nobody(*_: object) -> Iterator[Any]:
    yield SimpleNamespace(wait_for=lambda *_: None)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_trial_takes_its_processes_down(
    which: signal.Signals, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Sleepers(tmp_path, {"admin": tmp_path}, {})
    monkeypatch.setattr(trial, "settle", lambda *_: local)
    monkeypatch.setattr(trial, "open_admin", nobody)
    before = signal.getsignal(which)
    with pytest.raises(SystemExit) as stopped, trial.local_federation(toy_study(federation), ("ada", "bea"), tmp_path):
        os.kill(os.getpid(), which)
    assert stopped.value.code == 128 + which
    assert set(local.processes) == {"server", "ada", "bea"}
    assert all(process.poll() is not None for process in local.processes.values())
    assert signal.getsignal(which) is before


class FakeAdmin:
    """A run of two jobs, of which a site made the second necessary; its journal is one."""

    def __init__(self) -> None:
        self.ended = {"one": "finished", "two": "finished"}
        self.events = [{"event": "start", "round": 0}, {"event": "going on"}, {"event": "finish"}]

    def over(self, job: str) -> bool:
        return True

    def journal(self, job: str, after: int = 0) -> list[dict[str, object]]:
        return self.events[after : 2 if job == "one" else 3]

    def awaited_successor(self, job: str) -> str | None:
        return "two" if job == "one" else None

    def outcome(self, job: str) -> dict[str, str]:
        return {"state": self.ended[job], "said": ""}

    def named(self, start: str) -> str:
        return start

    follow = AdminClient.follow


def test_every_event_is_shown_once_through_the_jobs_of_a_run() -> None:
    admin, seen = FakeAdmin(), []
    assert admin.follow("one", seen.append) == "two"
    assert seen == admin.events


def test_a_followed_log_is_one_event_per_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = FakeAdmin()
    monkeypatch.setattr(commands, "_admin", lambda kit: contextlib.nullcontext(admin))
    commands.log("one", follow=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == admin.events


def test_status_says_how_each_job_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A job without one of its sites is as completed for the engine as any other."""
    told = {
        "one": {
            "status": "FINISHED:COMPLETED",
            FOLLOWED_BY: "two",
            OUTCOME: {"state": "going on", "said": "bea came back"},
        },
        "two": {
            "status": "FINISHED:COMPLETED",
            OUTCOME: {"state": "finished", "said": "site 'bea' was left out: its disk is full."},
        },
        "tri": {"status": "FINISHED:COMPLETED", OUTCOME: {"state": "finished", "said": ""}},
        "for": {"status": "FINISHED:ABORTED", OUTCOME: {"state": "stopped", "said": "round 3: no site\nanswered."}},
        "now": {"status": "RUNNING"},
    }
    session = SimpleNamespace(
        list_jobs=lambda: [{"job_id": job, "job_name": "eyes", "status": meta["status"]} for job, meta in told.items()],
        get_job_meta=told.__getitem__,
    )
    admin = AdminClient(session, ())  # type: ignore[arg-type]
    monkeypatch.setattr(AdminClient, "connected", lambda self: [])
    monkeypatch.setattr(AdminClient, "standing", lambda self: {})
    monkeypatch.setattr(commands, "_admin", lambda kit: contextlib.nullcontext(admin))
    monkeypatch.setattr(commands, "endings", lambda kit, standing: [])
    commands.status()
    assert capsys.readouterr().out.splitlines() == [
        "job one  eyes  finished:completed, resumed as two",
        "job two  eyes  finished:completed; site 'bea' was left out: its disk is full.",
        "job tri  eyes  finished:completed",
        "job for  eyes  finished:aborted; round 3: no site answered.",
        "job now  eyes  running",
    ]


def test_a_job_is_resumed_only_if_its_run_lacks_something() -> None:
    """A site that was left out from the start is said, and cannot join later."""
    out = {"state": "finished", "said": "site 'bea' was left out: its disk is full."}
    told = {"status": "FINISHED:COMPLETED", OUTCOME: {**out, "lacks": []}}
    session = SimpleNamespace(get_job_meta=lambda job: told, clone_job=lambda job: "two")
    admin = AdminClient(session, ())  # type: ignore[arg-type]
    with pytest.raises(RunError, match="finished and lacks nothing"):
        admin.resume("one")
    for outcome in ({**out, "lacks": ["bea"]}, out):  # servers of 0.2 do not say what a run lacks
        told[OUTCOME] = outcome
        assert admin.resume("one") == "two"


def test_a_finished_job_is_not_resumed_before_the_server_has_said_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is over a moment before its outcome stands in its facts."""
    told = [{"status": "FINISHED:COMPLETED"}] * 3 + [
        {"status": "FINISHED:COMPLETED", OUTCOME: {"state": "finished", "said": "", "lacks": []}}
    ]
    session = SimpleNamespace(
        get_job_meta=lambda job: told.pop(0) if told[1:] else told[0], clone_job=lambda job: "two"
    )
    monkeypatch.setattr("consilium.federation.admin.time.sleep", lambda seconds: None)
    with pytest.raises(RunError, match="finished and lacks nothing"):
        AdminClient(session, ()).resume("one")  # type: ignore[arg-type]


@pytest.mark.parametrize(("words", "told"), [([], 2), (["--quiet"], 0)])
def test_a_trial_says_what_it_does(
    words: list[str], told: int, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = write_study(tmp_path / "toy.toml", federation)
    admin = FakeAdmin()
    admin.events = []
    vars(admin).update(submit=lambda _: "one", fetch=lambda job, runs: runs / job)
    monkeypatch.setattr(trial, "local_federation", lambda *_: contextlib.nullcontext((None, admin)))
    done = call("federation", "try", study, "--sites", "2", "--runs", tmp_path / "runs", *words)
    assert (done.status, done.out) == (0, f"{tmp_path / 'runs' / 'two'}\n")
    assert done.err.count("\n") == told
    assert ("starting a server and 2 sites" in done.err) == bool(told)


@pytest.mark.parametrize(("given", "started"), [([], 3), (["--sites", "1"], 2)])
def test_sites_that_are_left_out_are_guests_of_a_trial(
    given: list[str], started: int, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not among the sites that train, although the study names no sites."""
    study = write_study(tmp_path / "toy.toml", federation)
    admin = FakeAdmin()
    admin.events, told = [], []
    vars(admin).update(submit=lambda found: told.append(found.plan) or "one", fetch=lambda job, runs: runs / job)
    monkeypatch.setattr(trial, "local_federation", lambda *_: contextlib.nullcontext((None, admin)))
    done = call("federation", "try", study, "--set", "study.leave_out=['ada']", *given, "--runs", tmp_path / "runs")
    assert done.status == 0 and f"starting a server and {started} sites" in done.err
    assert (told[0].sites, told[0].leave_out) == (("bea", "cid")[: started - 1], ("ada",))


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.xdist_group("federation")
@pytest.mark.timeout(900)
def test_a_study_that_names_a_class_can_be_tried(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "tests.federation.other_package:Method", study__rounds=1, study__deadline=60.0)
    tried = trial.try_federation(study, None, tmp_path / "runs")
    assert digest(tried) == digest(simulation.run(study, tmp_path / "simulated", workers=0).folder)
