"""What a server can make a hospital do that does not trust it: run studies that the office signed, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from consilium.federation import job_files
from consilium.federation.office import Office, open_office
from consilium.federation.supervisor import end
from consilium.federation.trial import START, Local, settle
from tests.federation.conftest import PATIENCE, Running
from tests.federation.test_cell_policy import J
from tests.federation.test_hostile_neighbour import OURS
from tests.federation.test_job_files import sign
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(600)]


class HostileServer:
    """The program, one request at a time."""

    def __init__(self, local: Local, process: subprocess.Popen[str], office: Office) -> None:
        self.local, self.process, self.office = local, process, office

    def __call__(self, topic: str, **request: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"to": "bea", "topic": topic, **request}), file=self.process.stdin, flush=True)
        return next(str(json.loads(line[1:])) for line in self.process.stdout if line.startswith(":"))


@contextmanager
def hostile_server(local: Local) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.federation.hostile_server", str(local.kits["server"])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (
        (local.folder / "server.log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        try:
            yield process
        finally:
            end(process)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def hostile(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileServer]:
    local = settle(toy_study(federation), ("bea",), tmp_path_factory.mktemp("hostile"))
    with ExitStack() as stack:
        process = stack.enter_context(hostile_server(local))
        stack.callback(local.end)
        local.start("bea")
        office = stack.enter_context(open_office(local.kits["office"], START))
        office.wait_for(("bea",), START)
        yield HostileServer(local, process, office)


def test_a_server_gets_no_shell_at_a_hospital(hostile: HostileServer) -> None:
    (hostile.local.kits["bea"] / "table.csv").write_text(OURS)
    for topic in ("sys.shell", "sys.info", "sys.report_env", "train.shutdown", "train.restart", "train.delete_run"):
        said = hostile(topic, body="cat table.csv", headers={"job_id": J})
        assert "invalid_request" in said, (topic, said)
    assert hostile.local.processes["bea"].poll() is None


def test_a_servers_job_becomes_no_folder_of_the_kit(hostile: HostileServer, tmp_path: Path) -> None:
    """NVIDIA FLARE deletes the folder of a job's name before it writes: `startup` holds the hospital's key."""
    job_files.write_app(tmp_path / "app", "")
    for name in ("startup", "local", "..", "../memory", ""):
        said = hostile("train.deploy", app=str(tmp_path / "app"), headers={"job_id": name, "job_meta": {"x": 1}})
        assert "not a job's name" in said, (name, said)
    assert (hostile.local.kits["bea"] / "startup/client.key").exists()


def test_a_server_brings_no_code_and_no_study_of_its_own(hostile: HostileServer, tmp_path: Path) -> None:
    """The office has not signed it; or has signed it, and it is not two documents and a study."""
    deploy = {"headers": {"job_id": J, "job_meta": {"job_id": J, "byoc": True}, "app_name": "app"}}
    job_files.write_app(tmp_path / "own", "[study]\n")
    assert "unsigned" in hostile("train.deploy", app=str(tmp_path / "own"), **deploy)
    job_files.write_app(tmp_path / "code", "[study]\n")
    (tmp_path / "code/custom").mkdir()
    (tmp_path / "code/custom/evil.py").write_text("raise SystemExit")
    sign(tmp_path / "code", hostile.local.kits["office"])
    assert "differs in: custom" in hostile("train.deploy", app=str(tmp_path / "code"), **deploy)
    assert not (hostile.local.kits["bea"] / J).exists()


def touching(mark: Path) -> dict[str, Any]:
    """A call of a function of this package that NVIDIA FLARE would make, and what it would leave."""
    started = {"folder": str(mark.parent), "arguments": ["/bin/sh", "-c", f"touch {mark}"], "variables": {}}
    return {"path": "consilium.federation.supervisor.start", "args": started}


def test_the_offices_key_runs_nothing_at_a_hospital(hostile: HostileServer, tmp_path: Path) -> None:
    """Signed by the office, passed on by a server that checks nothing: the site refuses, and nothing ran."""
    mark = tmp_path / "ran"
    for number, client in enumerate(
        (
            {"executors": [{"tasks": ["*"], "executor": touching(mark)}]},
            {
                "executors": [
                    {"tasks": ["*"], "executor": {"path": job_files.SITE_CLASS, "args": {"x": touching(mark)}}}
                ]
            },
            {"executors": [], "components": [{"id": "x", **touching(mark)}]},
            {"executors": [], "task_data_filters": [{"tasks": ["*"], "filters": [touching(mark)]}]},
        )
    ):
        job = write_job(tmp_path / f"job{number}", client={"format_version": 2, **client})
        refused(hostile.office, job)
    assert not mark.exists()
    log = (hostile.local.kits["server"] / "log.txt").read_text()
    assert len({line for line in log.splitlines() if "is not the document of this version" in line}) >= 4


def test_nor_at_the_server(running: Running, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for number, workflow in enumerate(
        (touching(mark), {"path": job_files.SERVER_CLASS, "args": {"x": touching(mark)}})
    ):
        server = {"format_version": 2, "workflows": [{"id": "run", **workflow}]}
        refused(running.office, write_job(tmp_path / f"job{number}", server=server))
    code = write_job(tmp_path / "code")
    (code / "app/custom").mkdir()
    (code / "app/custom/sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    refused(running.office, code)
    assert not mark.exists()


def test_the_office_has_the_commands_it_needs_and_no_others(running: Running) -> None:
    ask = running.office.session.api.server_execute
    assert "unknown command" not in json.dumps(ask("check_status server"), default=str).lower()
    for command in (
        *("cat server process.log", "ls server", "sys_info server", "report_env server", "shutdown server"),
        *("restart client ada", "remove_client ada", "configure_site_log all x", "cells", "set_timeout 1"),
        *(f"delete_job {J}", f"configure_job_log {J} all x", f"get_job_log {J} server"),
    ):
        assert "unknown command" in json.dumps(ask(command), default=str).lower(), command


def nested(mark: Path, outer: str = job_files.SITE_CLASS) -> dict[str, Any]:
    return {"path": outer, "args": {"x": touching(mark)}}


def write_job(folder: Path, client: Any = None, server: Any = None, sites: tuple[str, ...] = ("bea",)) -> Path:
    """A job as the office would send it, with other documents."""
    job_files.write_app(folder / "app", "[study]\n")
    for name, document in (("config_fed_client.json", client), ("config_fed_server.json", server)):
        if document is not None:
            (folder / "app/config" / name).write_text(json.dumps(document))
    meta = {"name": folder.name, "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["server", *sites]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def refused(office: Office, job: Path) -> None:
    name = str(office.session.submit_job(str(job)))
    office.wait(name, PATIENCE)
    assert office.state(name) != "FINISHED:COMPLETED"
