"""Who is back is known from the server's own list of checked certificates, never from what a message claims."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import RunProcessKey
from nvflare.apis.job_def import RunStatus
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.utils.process_utils import spawn_process

from consilium.federation.kits import make_kits
from consilium.federation.launchers import ServerJobHandle
from consilium.federation.places import outcome_path, runs_of
from consilium.federation.project import Project
from consilium.federation.returning import CRASHES, FOLLOWED_BY, NO_RESUME, Returning, died
from consilium.federation.scheduling import RECONNECT, JobScheduler
from consilium.files import write_json


class Context:
    """The server when a registration was handled: `claimed` is what the message said of its sender."""

    def __init__(self, kit: Path, claimed: str, participants: dict[str, str], registered: dict[str, str]) -> None:
        clients = {token: SimpleNamespace(name=name) for token, name in registered.items()}
        started = {token: SimpleNamespace(name=name) for token, name in participants.items()}
        workspace = SimpleNamespace(get_root_dir=lambda: str(kit))
        self.engine = SimpleNamespace(
            run_processes={"job": {RunProcessKey.PARTICIPANTS: started}},
            client_manager=SimpleNamespace(clients=clients),
            get_workspace=lambda: workspace,
        )
        self.claimed = claimed

    def get_engine(self) -> Any:
        return self.engine

    def get_peer_context(self) -> Any:
        return SimpleNamespace(get_identity_name=lambda: self.claimed)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    place = tmp_path / "a/b/c/server"
    place.mkdir(parents=True)
    (place / "consilium.json").write_text(json.dumps({"name": "server", "sites": ["ada", "bea"]}))
    return place


def marked(kit: Path) -> list[str]:
    return sorted(path.name for path in kit.rglob("returned/job/*"))


JOB = {"t1": "ada", "t2": "bea"}


@pytest.mark.parametrize("claimed", ["../../../PWNED", "/nowhere/PWNED", "bea", "", "nobody"])
def test_a_claimed_name_marks_nobody(kit: Path, claimed: str, tmp_path: Path) -> None:
    """ada registers in someone's name, or FLARE refused the registration: nothing changed in the server's list."""
    before = sorted(tmp_path.rglob("*"))
    Returning().handle_event(EventType.CLIENT_REGISTER_PROCESSED, Context(kit, claimed, JOB, JOB))  # type: ignore[arg-type]
    assert marked(kit) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_site_with_a_new_token_is_back_whatever_it_claims(kit: Path) -> None:
    context = Context(kit, "bea", JOB, {"t3": "ada", "t2": "bea"})
    Returning().handle_event(EventType.CLIENT_REGISTER_PROCESSED, context)  # type: ignore[arg-type]
    assert marked(kit) == ["ada"]


def test_a_name_that_is_no_site_of_the_project_leaves_no_file(kit: Path) -> None:
    context = Context(kit, "cid", JOB, {**JOB, "t3": "../../cid"})
    Returning().handle_event(EventType.CLIENT_REGISTER_PROCESSED, context)  # type: ignore[arg-type]
    assert marked(kit) == []


# ------------------------------------------------------------------------------------ jobs whose process died


def crash(kit: Path, job: str, before: str, rounds: int) -> dict[str, Any]:
    """A job that had made so many rounds when it died."""
    run = runs_of(kit) / "run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "journal.jsonl").write_text('{"event": "start"}\n' + '{"event": "round", "round": 1}\n' * rounds)
    write_json({"job": job, "run": "run", "state": "running", "said": ""}, outcome_path(kit, job))
    outcome = died(kit, job, before)
    write_json(outcome, outcome_path(kit, job))
    return outcome


def test_a_run_goes_on_after_a_crash_unless_it_makes_no_round(kit: Path) -> None:
    assert CRASHES == 3
    first = crash(kit, "j1", "", 4)
    assert (first["state"], first["again"], first["crashes"]) == ("crashed", True, 1)
    assert crash(kit, "j2", "j1", 4)["again"]
    third = crash(kit, "j3", "j2", 4)
    assert (third["again"], third["crashes"]) == (False, 3)
    assert "died 3 times without making a round" in third["said"]
    assert "`consilium federation resume j3`" in third["said"]


def test_a_round_in_between_counts(kit: Path) -> None:
    crash(kit, "j1", "", 4)
    crash(kit, "j2", "j1", 4)
    assert crash(kit, "j3", "j2", 5)["crashes"] == 1


def test_a_person_may_switch_that_off(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from consilium.federation import supervisor

    monkeypatch.setattr(supervisor, "kit_of", lambda *_: {"name": "server"})
    monkeypatch.setattr(supervisor, "close_kit", lambda *_: None)
    monkeypatch.setattr(supervisor, "require_one_kit", lambda *_: None)
    assert NO_RESUME not in supervisor.prepare(kit, "server")[1]
    variables = supervisor.prepare(kit, "server", resume=False)[1]
    monkeypatch.setenv(NO_RESUME, variables[NO_RESUME])
    outcome = crash(kit, "j1", "", 4)
    assert not outcome["again"]
    assert "`consilium federation resume j1` goes on" in outcome["said"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("kill -9 $$", ProcessExitCode.INFRASTRUCTURE_ERROR),  # as when memory is short
        ("exit 0", JobReturnCode.SUCCESS),
        ("exit 3", JobReturnCode.EXECUTION_ERROR),
    ],
)
def test_a_job_process_that_a_signal_ended_has_not_failed_by_itself(script: str, code: int) -> None:
    """So FLARE calls the job abnormal, and the server goes on with its run."""
    handle = ServerJobHandle(process_adapter=spawn_process(["/bin/sh", "-c", script], dict(os.environ)))
    handle.wait()
    assert handle.poll() == code
    status = JobRunner._classify_finished_job_status({RunProcessKey.PROCESS_RETURN_CODE: handle.poll()})
    assert (status == RunStatus.FINISHED_ABNORMAL) == (script == "kill -9 $$")


# ------------------------------------------------------------------------------------ which job starts next


class Jobs:
    """What NVIDIA FLARE's store of jobs does here."""

    def __init__(self, **metas: dict[str, Any]) -> None:
        self.metas = metas

    def get_job(self, job: str, _: Any) -> Any:
        return SimpleNamespace(job_id=job, meta=dict(self.metas[job]))

    def get_jobs_by_status(self, states: list[RunStatus], _: Any) -> list[Any]:
        told = [state.value for state in states]
        return [self.get_job(job, _) for job, meta in self.metas.items() if meta["status"] in told]

    def set_status(self, job: str, state: RunStatus, _: Any) -> None:
        self.metas[job]["status"] = state.value

    def update_meta(self, job: str, facts: dict[str, Any], _: Any) -> None:
        self.metas[job].update(facts)

    def clone(self, from_jid: str, meta: dict[str, Any], fl_ctx: Any) -> dict[str, Any]:
        new = {**meta, "job_id": f"{from_jid}-again", "submit_time": 99.0, "status": "SUBMITTED"}
        self.metas[new["job_id"]] = new
        return new


def job_meta(submitted: float, *sites: str, status: str = "SUBMITTED") -> dict[str, Any]:
    return {"submit_time": submitted, "deploy_map": {"app": ["server", *sites]}, "status": status}


def ready(scheduler: JobScheduler, jobs: Jobs, *connected: str) -> list[str]:
    """The jobs that may start while these sites are connected."""
    engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=name) for name in connected])
    waiting = [jobs.get_job(job, None) for job, meta in jobs.metas.items() if meta["status"] == "SUBMITTED"]
    return [job.job_id for job in scheduler.ready(waiting, engine)]


def test_a_run_whose_server_died_goes_on_before_the_jobs_that_wait(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(waits=job_meta(2.0, "ada"), runs=job_meta(1.0, "ada", "bea", status="RUNNING"))
    write_json({"job": "runs", "run": "run", "state": "running", "said": ""}, outcome_path(kit, "runs"))
    workspace = SimpleNamespace(get_root_dir=lambda: str(kit))
    engine = SimpleNamespace(get_component=lambda _: jobs, get_workspace=lambda: workspace)
    returning = Returning()
    monkeypatch.setattr(returning, "log_info", lambda *_, **__: None)
    returning.handle_event(EventType.SYSTEM_START, SimpleNamespace(get_engine=lambda: engine))  # type: ignore[arg-type]
    assert jobs.metas["runs"]["status"] == RunStatus.FINISHED_ABNORMAL.value
    assert jobs.metas["runs"][FOLLOWED_BY] == "runs-again"
    assert 1.0 < jobs.metas["runs-again"]["submit_time"] < 2.0
    assert ready(JobScheduler(), jobs, "ada", "bea") == ["runs-again", "waits"]


def test_a_server_that_was_started_again_waits_for_the_sites_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a waiting job would start with the first site that is back, and leave the others out for good."""
    jobs = Jobs(later=job_meta(2.0, "ada"), sooner=job_meta(1.0, "ada", "bea"))
    scheduler = JobScheduler(max_jobs=1)
    assert ready(scheduler, jobs, "ada") == []  # `later` does not overtake
    assert ready(scheduler, jobs, "ada", "bea") == ["sooner", "later"]
    monkeypatch.setattr("time.monotonic", lambda: scheduler._until + 1.0)
    assert ready(scheduler, jobs, "ada") == ["sooner", "later"]  # bea stays away
    assert RECONNECT == 90.0  # docs/deployment.md says so


def test_a_job_that_goes_on_is_there_before_another_may_start(tmp_path: Path) -> None:
    kit = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")["server"]
    parts = {part["id"]: part for part in json.loads((kit / "local/resources.json").read_text())["components"]}
    assert next(iter(parts)) == "returning"
    assert parts["job_scheduler"]["path"] == f"{JobScheduler.__module__}.{JobScheduler.__name__}"
