"""What a server can make a hospital do that does not trust it: run signed studies, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from consilium.federation import job_files
from consilium.federation.admin import AdminClient, for_federation, open_admin
from consilium.federation.supervisor import end
from consilium.federation.trial import START, LocalFederation, settle
from consilium.left_log import left as log_of
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.wires.flare import PART
from tests.federation.conftest import PATIENCE, Running, odd_variables
from tests.federation.other_package import IMPORTED
from tests.federation.test_cell_policy import J
from tests.federation.test_hostile_neighbour import OURS
from tests.federation.test_job_files import sign
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(600)]


class HostileServer:
    """The program, one request at a time."""

    def __init__(self, local: LocalFederation, process: subprocess.Popen[str], admin: AdminClient) -> None:
        self.local, self.process, self.admin = local, process, admin

    def __call__(self, topic: str, **request: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"to": "bea", "topic": topic, **request}), file=self.process.stdin, flush=True)
        return next(str(json.loads(line[1:])) for line in self.process.stdout if line.startswith(":"))


@contextmanager
def hostile_server(local: LocalFederation) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.federation.hostile_server", str(local.kits["server"])]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **odd_variables(f"orders:{local.folder / 'answers.jsonl'}", path)}
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
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(("bea",), START)
        yield HostileServer(local, process, admin)


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
    """The administrator has not signed it; or has signed it, and it is not two documents and a study."""
    deploy = {"headers": {"job_id": J, "job_meta": {"job_id": J, "byoc": True}, "app_name": "app"}}
    job_files.write_app(tmp_path / "own", "[study]\n")
    assert "unsigned" in hostile("train.deploy", app=str(tmp_path / "own"), **deploy)
    job_files.write_app(tmp_path / "code", "[study]\n")
    (tmp_path / "code/custom").mkdir()
    (tmp_path / "code/custom/evil.py").write_text("raise SystemExit")
    sign(tmp_path / "code", hostile.local.kits["admin"])
    assert "differs in: custom" in hostile("train.deploy", app=str(tmp_path / "code"), **deploy)
    assert not (hostile.local.kits["bea"] / J).exists()


def limit(hostile: HostileServer, **limits: Any) -> None:
    """What bea's hospital.toml allows; it is read when a job begins."""
    path = hostile.local.hospital("bea")
    text = path.read_text().partition("[limits]")[0]
    path.write_text(text + "[limits]\n" + "".join(f"{key} = {value}\n" for key, value in limits.items()))


def left_of(hostile: HostileServer, study: Study) -> list[Mapping[str, Any]]:
    """What has left bea in a run, by its own log."""
    run = RunFolder.path_of(for_federation(study, ("bea",)), hostile.local.runs).name
    return [line for line in log_of(hostile.local.memory("bea")) if line["run"] == run]


EXPECTED = {
    "an order larger than the study needs": "order",
    "NaN in a tensor of the network": "infinite",
    "NaN in global/unused": "infinite",
    "another run": "foreign",
    "a second run of the study": "foreign",
    "another method": "foreign",
    "a round before": "old",
    "a round beyond the study": "foreign",
    "a score of another run": "foreign",
    "no order at all": "damaged",
    "a folder elsewhere": "damaged",
    "the last round once more": "rounds",
}


def test_a_hospital_refuses_orders_that_no_study_asks_for(hostile: HostileServer, federation: Path) -> None:
    """From a server that its job's process has been changed at (hostile_orders.py), in the middle of an honest run."""
    limit(hostile, study_rounds=4, study_scorings=3)
    study = toy_study(
        federation, study__name="orders", study__sites=["bea"], study__rounds=4, study__score_every=4,
        study__deadline=60.0, privacy__clip=1.0, privacy__noise=1.0,
    )  # fmt: skip
    job = hostile.admin.submit(study)
    hostile.admin.wait(job, PATIENCE)
    assert hostile.admin.outcome(job)["state"] == "finished"
    answers = [json.loads(line) for line in (hostile.local.folder / "answers.jsonl").read_text().splitlines()]
    scores = [answer["error"] for answer in answers if answer["what"] == "a score of another model"]
    assert {answer["what"]: answer["error"] for answer in answers if answer["what"] in EXPECTED} == EXPECTED
    assert not [answer for answer in answers if answer["error"] and answer["bytes"]]
    assert scores[-1] == "scores"
    left = left_of(hostile, study)
    assert [line["round"] for line in left if line["what"] == "train"] == [1, 2, 3, 4]
    assert len({line["sha256"] for line in left if line["what"] == "score"}) <= 3
    errors = (hostile.local.memory("bea") / "errors.log").read_text()
    assert "'request/run' cannot be '../../memory'" in errors
    assert f"an order of {PART + (4 << 20)} bytes, and at most" in errors
    failed = [line["facts"]["error"] for line in log_of(hostile.local.memory("bea")) if line["what"] == "failed"]
    assert Counter(failed) >= Counter(EXPECTED.values())  # every word that left has a line


@pytest.mark.slow
def test_a_hospital_lets_no_more_bytes_out_than_its_limit(hostile: HostileServer, federation: Path) -> None:
    """Over all studies: what left before counts."""
    used = sum(line["bytes"] for line in log_of(hostile.local.memory("bea")))
    limit(hostile, bytes=used + 12_000)
    study = toy_study(federation, study__name="bytes", study__sites=["bea"], study__rounds=9, study__deadline=60.0)
    job = hostile.admin.submit(study)
    hostile.admin.wait(job, PATIENCE)
    assert "its hospital.toml allows no more bytes to leave" in hostile.admin.outcome(job)["said"]
    assert 0 < sum(line["bytes"] for line in left_of(hostile, study)) <= 12_000


def touching(mark: Path) -> dict[str, Any]:
    """A call of a function of this package that NVIDIA FLARE would make, and what it would leave."""
    started = {"folder": str(mark.parent), "arguments": ["/bin/sh", "-c", f"touch {mark}"], "variables": {}}
    return {"path": "consilium.federation.supervisor.start", "args": started}


def test_the_administrators_key_runs_nothing_at_a_hospital(hostile: HostileServer, tmp_path: Path) -> None:
    """Signed by the administrator, passed on by a server that checks nothing: the site refuses, and nothing ran."""
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
        refused(hostile.admin, job)
    assert not mark.exists()
    log = (hostile.local.kits["server"] / "log.txt").read_text()
    assert len({line for line in log.splitlines() if "is not the document of this version" in line}) >= 4


def test_nor_at_the_server(running: Running, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for number, workflow in enumerate(
        (touching(mark), {"path": job_files.SERVER_CLASS, "args": {"x": touching(mark)}})
    ):
        server = {"format_version": 2, "workflows": [{"id": "run", **workflow}]}
        refused(running.admin, write_job(tmp_path / f"job{number}", server=server))
    code = write_job(tmp_path / "code")
    (code / "app/custom").mkdir()
    (code / "app/custom/sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    refused(running.admin, code)
    assert not mark.exists()


def test_the_administrator_has_the_commands_it_needs_and_no_others(running: Running) -> None:
    ask = running.admin.session.api.server_execute
    assert "unknown command" not in json.dumps(ask("check_status server"), default=str).lower()
    for command in (
        *("cat server process.log", "ls server", "sys_info server", "report_env server", "shutdown server"),
        *("restart client ada", "remove_client ada", "configure_site_log all x", "cells", "set_timeout 1"),
        *(f"delete_job {J}", f"configure_job_log {J} all x", f"get_job_log {J} server"),
    ):
        assert "unknown command" in json.dumps(ask(command), default=str).lower(), command


def test_a_server_imports_no_class_that_a_study_names(running: Running, federation: Path) -> None:
    study = toy_study(federation, "tests.federation.other_package:Method", study__name="named-class")
    job = running.admin.submit(study)
    running.admin.wait(job, PATIENCE)
    outcome = running.admin.outcome(job)
    assert outcome["state"] == "stopped"
    assert (
        "tests.federation.other_package:Method, which is not the project's own code and does not run on this server"
        in (outcome["said"])
    )
    assert "`consilium federation server --code tests.federation.other_package:Method`" in outcome["said"]
    logs = {name: (kit / "process.log").read_text() for name, kit in running.local.kits.items() if name != "admin"}
    assert not [name for name, log in logs.items() if IMPORTED in log]


def nested(mark: Path, outer: str = job_files.SITE_CLASS) -> dict[str, Any]:
    return {"path": outer, "args": {"x": touching(mark)}}


def write_job(folder: Path, client: Any = None, server: Any = None, sites: tuple[str, ...] = ("bea",)) -> Path:
    """A job as the administrator would send it, with other documents."""
    job_files.write_app(folder / "app", "[study]\n")
    for name, document in (("config_fed_client.json", client), ("config_fed_server.json", server)):
        if document is not None:
            (folder / "app/config" / name).write_text(json.dumps(document))
    meta = {"name": folder.name, "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["server", *sites]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def refused(admin: AdminClient, job: Path) -> None:
    name = str(admin.session.submit_job(str(job)))
    admin.wait(name, PATIENCE)
    assert admin.state(name) != "FINISHED:COMPLETED"
