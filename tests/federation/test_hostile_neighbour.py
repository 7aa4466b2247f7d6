"""A site that does not keep to the rules, with a kit of the consortium; and a user of a hospital's machine without."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from consilium.federation.admin import open_admin
from consilium.federation.trial import START, settle
from tests.federation.conftest import PATIENCE, SITES, Running
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(600)]
OURS = "patients of bea only"
AUX, ORDER = "aux_communication", "consilium.order"


@pytest.fixture(scope="module")
def two(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server, bea and cid as they should be; ada's kit is free for the test."""
    local = settle(toy_study(federation), SITES, tmp_path_factory.mktemp("two"))
    with ExitStack() as stack:
        stack.callback(local.end)
        for name in ("server", "bea", "cid"):
            local.start(name)
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(("bea", "cid"), START)
        yield Running(local, admin)


class Neighbour:
    """The hostile program, one request at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, **request: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return str(json.loads(self.process.stdout.readline()))


@contextmanager
def neighbour(kit: Path, name: str = "ada") -> Iterator[Neighbour]:
    command = [sys.executable, "-m", "tests.federation.hostile_site", str(kit), name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line == "joined\n" for line in process.stdout)
            yield Neighbour(process)
        finally:
            process.kill()


def own_file(two: Running) -> Path:
    """A file of bea's beside its kit's key; its path has no '..' and no link, as NVIDIA FLARE's shell wants it."""
    path = two.local.kits["bea"] / "table.csv"
    path.write_text(OURS)
    return path


def test_one_site_reads_nothing_of_another(two: Running) -> None:
    file = own_file(two)
    from_server = {"cn__origin": "server", "cn__from": "server"}
    with neighbour(two.local.kits["ada"]) as ask:
        for headers in ({}, from_server):
            said = ask(to="bea", channel="admin", topic="sys.shell", body=f"cat {file.name}", headers=headers)
            assert OURS not in said
            assert not said.startswith("ok")
        for topic in ("sys.info", "train.shutdown", "train.restart", "train.check_status"):
            assert not ask(to="bea", channel="admin", topic=topic).startswith("ok"), topic
        assert not ask(to="server", channel="_net_manager", topic="cells").startswith("ok")
        assert not ask(to="server", channel="hci_channel", topic="command").startswith("ok")
        assert two.local.processes["bea"].poll() is None
        assert set(two.connected()) >= {"bea", "cid"}
    log = (two.local.kits["server"] / "process.log").read_text()
    assert "refused from 'ada'" in log


def test_a_run_goes_on_beside_a_site_that_writes_to_its_processes(two: Running, federation: Path) -> None:
    """To the job's processes at the server and at another site, in its own name and in others'."""
    study = toy_study(
        federation, study__name="beside", study__rounds=15, study__score_every=15, study__deadline=60.0,
        study__sites=("bea", "cid"),
    )  # fmt: skip
    with neighbour(two.local.kits["ada"]) as ask:
        job = two.admin.submit(study)
        two.wait_for_round(study, 2)
        assert two.admin.journal(job)  # the administrator follows a run while it goes on
        ended = {"cn__channel": "sm__STREAM", "cn__topic": "sm__ERROR", "sm__et": "BlobSizeError", "sm__em": "x"}
        for to in (f"bea.{job}", f"server.{job}"):
            assert not ask(to=to, channel=AUX, topic=ORDER, identity="bea").startswith("ok")
            assert not ask(to=to, channel="client_command", topic="abort").startswith("ok")
            assert not ask(to=to, channel="server_command", topic="abort").startswith("ok")
            assert not ask(to=to, channel=AUX, topic=ORDER, headers=ended).startswith("ok")
        assert two.admin.wait(job, PATIENCE) == "FINISHED:COMPLETED", two.admin.outcome(job)
    events = two.folder(study).events()
    assert not [event for event in events if event["event"] in ("lost", "refused")]


def test_a_site_has_no_port_and_its_socket_is_its_users(two: Running) -> None:
    """What other users of the machine could connect to."""
    for name in ("bea", "cid"):
        process = psutil.Process(two.local.processes[name].pid)
        assert [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN] == []
        line = two.local.kits[name] / "cell"
        assert stat.S_ISSOCK(line.stat().st_mode)
        assert stat.S_IMODE(line.stat().st_mode) == 0o600
        assert stat.S_IMODE(line.parent.stat().st_mode) == 0o700
    server = psutil.Process(two.local.processes["server"].pid)
    assert len([each for each in server.net_connections("inet") if each.status == psutil.CONN_LISTEN]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_of_the_machine_gets_no_connection(two: Running) -> None:
    """Even if the folders above were open: the process asks the system who is at the other end."""
    line = two.local.kits["bea"] / "cell"
    code = f"import os, socket; os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(line)!r})"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PermissionError" in refused.stderr
    with socket.socket(socket.AF_UNIX) as own:  # its own user may
        own.connect(str(line))
