"""A server or a site whose disk is full still answers, and the administrator says what is wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.flare_api.api_spec import InternalError, JobNotFound
from nvflare.fuel.sec.audit import Auditor

from consilium.errors import RunError, WorkError
from consilium.federation.admin import AdminClient
from consilium.federation.start import keep_answering_on_full_disks

FULL = "server internal error: [Errno 28] No space left on device"


@pytest.fixture
def full_auditor(tmp_path: Path) -> Any:
    """NVIDIA FLARE's log of who asked what, on a full disk. It is written before every command."""
    auditor = Auditor(str(tmp_path / "audit.log"))
    auditor.audit_file.close()
    auditor.audit_file = open("/dev/full", "a")  # noqa: SIM115
    yield auditor
    with contextlib.suppress(OSError):
        auditor.audit_file.close()


def test_a_command_is_answered_though_its_log_cannot_be_written(
    full_auditor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="No space left"):
        full_auditor.add_event("admin", "get_job_meta")
    monkeypatch.setattr(Auditor, "add_event", Auditor.add_event)  # put back what follows
    keep_answering_on_full_disks()
    assert full_auditor.add_event("admin", "get_job_meta") == ""


@pytest.mark.parametrize(
    "ask",
    [
        lambda admin: admin.state("job"),
        lambda admin: admin.jobs(),
        lambda admin: admin.connected(),
        lambda admin: admin.stop("job"),
        lambda admin: admin._results("job").__enter__(),
    ],
)
def test_the_administrator_says_that_the_servers_disk_is_full(ask: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise InternalError(FULL)

    names = ("get_job_meta", "list_jobs", "get_system_info", "abort_job", "clone_job", "submit_job")
    admin = AdminClient(SimpleNamespace(**dict.fromkeys(names, full)), ("ada",))  # type: ignore[arg-type]
    with pytest.raises(WorkError, match="the server's disk is full"):
        ask(admin)


def test_a_job_that_the_server_does_not_have_is_said() -> None:
    def missing(job: str) -> Any:
        raise JobNotFound(f"no such job: {job}")

    admin = AdminClient(SimpleNamespace(get_job_meta=missing), ("ada",))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="no such job: nojob; `consilium federation status` lists"):
        admin.state("nojob")


JOBS = ("3f1c0a52-0000-4000-8000-000000000001", "3f1c7e10-0000-4000-8000-000000000002")


def asked_by_start(id_prefix: str) -> list[dict[str, str]]:
    """As NVIDIA FLARE answers: all jobs where nothing is asked for."""
    return [{"job_id": job} for job in JOBS if job.startswith(id_prefix)]


@pytest.mark.parametrize("given", ["3f1c0", "3f1c0a52", JOBS[0]])
def test_a_job_may_be_named_by_the_start_of_its_name(given: str) -> None:
    admin = AdminClient(SimpleNamespace(list_jobs=asked_by_start), ("ada",))  # type: ignore[arg-type]
    assert admin.named(given) == JOBS[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("3f1c", "'3f1c' is the start of 2 jobs: 3f1c0a52-.*, 3f1c7e10-.*; give more of the name"),
        ("7777", "no such job: 7777; .*"),
        ("", "'' is too short for a job's name; give its first 4 characters or more"),
        ("3f1", "'3f1' is too short"),
    ],
)
def test_a_start_that_names_no_job_or_several_is_said(given: str, said: str) -> None:
    admin = AdminClient(SimpleNamespace(list_jobs=asked_by_start), ("ada",))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=said):
        admin.named(given)
