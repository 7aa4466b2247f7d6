"""Health, metrics and events of one participant; and what its supervisor costs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from consilium.errors import DataError, StudyError
from consilium.federation import supervisor
from consilium.federation.certificates import Certificate
from consilium.federation.events import note, rotate
from consilium.federation.metrics import LeftLog, Participant, address_of, connections, latest_run, served
from consilium.federation.settings_check import read_apart
from consilium.files import checked_line, write_json


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    folder.mkdir()
    write_json({"name": "server", "role": "server", "sites": ["ada", "bea"]}, folder / "consilium.json")
    return folder


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def journal(kit: Path, run: str) -> None:
    folder = kit / "runs" / run
    folder.mkdir(parents=True)
    events = [
        {"event": "start", "rounds": 5, "aside": ["calibrate"]},
        *({"event": "train", "round": number, "site": "ada"} for number in (1, 2)),
        {"event": "train", "round": 1, "site": "bea"},
        *({"event": "round", "round": number, "phase": "train"} for number in (1, 2)),
        {"event": "train", "round": 3, "phase": "calibrate", "site": "ada"},
        {"event": "round", "round": 3, "phase": "calibrate"},
    ]
    text = "".join(checked_line(event) + "\n" for event in events)
    (folder / "journal.jsonl").write_text(text + '{"event": "ro')  # it is being written


def test_a_server_tells_who_is_connected_since_when_and_the_last_round(kit: Path) -> None:
    write_json({"ada": {"since": 7.0, "expires": 9.0}}, kit / "connections.json")
    journal(kit, "eyes-s0")
    server = Participant(kit, "server")
    server.up, server.starts = True, 3
    with served(server, ("127.0.0.1", 0)) as port:
        status, text = ask(port, "/metrics")
        assert ask(port, "/health") == (200, "ok\n")
        assert ask(port, "/")[0] == 404
        server.up = False
        assert ask(port, "/health")[0] == 503
    assert status == 200
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples == {
        'consilium_up{name="server"}': "1",
        'consilium_starts_total{name="server"}': "3",
        'consilium_connected{name="server",participant="ada"}': "1",
        'consilium_connected{name="server",participant="bea"}': "0",
        'consilium_connected_since_timestamp_seconds{name="server",participant="ada"}': "7",
        'consilium_certificate_expiry_timestamp_seconds{name="server",participant="ada"}': "9",
        'consilium_round{name="server",run="eyes-s0"}': "2",
        'consilium_rounds{name="server",run="eyes-s0"}': "5",
        'consilium_site_round{name="server",run="eyes-s0",participant="ada"}': "2",
        'consilium_site_round{name="server",run="eyes-s0",participant="bea"}': "1",
    }
    told = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert sorted(told) == sorted(set(told)) == sorted({name.partition("{")[0] for name in samples})


def test_a_site_is_healthy_when_it_is_connected_and_tells_what_left(kit: Path, tmp_path: Path) -> None:
    lines = [{"what": "card", "round": None, "bytes": 0}, {"what": "train", "round": 4, "bytes": 50}]
    (tmp_path / "left.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"bytes": 9')
    site = Participant(kit, "ada", tmp_path)
    site.up = True
    assert not site.healthy()
    write_json({"server": {"since": 7.0}}, kit / "connections.json")
    assert site.healthy()
    assert 'consilium_left_bytes_total{name="ada"} 50' in site.text()
    assert 'consilium_left_round{name="ada"} 4' in site.text()
    left = LeftLog(tmp_path).read()
    (tmp_path / "left.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, {"bytes": 9})))
    assert (left.messages, left.read().messages, left.bytes) == (2, 3, 59)  # a line that was cut short is read later


def test_nothing_is_served_but_on_loopback_unless_asked_for() -> None:
    assert address_of("9100") == ("127.0.0.1", 9100)
    assert address_of("0.0.0.0:9100") == ("0.0.0.0", 9100)
    for wrong in ("", "x", "host:", "70000"):
        with pytest.raises(StudyError, match="write a port"):
            address_of(wrong)


def test_a_port_that_is_taken_is_said(kit: Path) -> None:
    other = Participant(kit, "other")
    with (
        served(Participant(kit, "server"), ("127.0.0.1", 0)) as port,
        pytest.raises(StudyError, match="choose another port"),
        served(other, ("127.0.0.1", port)),
    ):
        pass


def test_no_run_is_no_round(kit: Path) -> None:
    assert latest_run(kit) == {}


def test_a_large_log_is_put_aside_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    with log.open("ab", buffering=0) as writer:  # as the child of a supervisor holds it
        os.chmod(log, 0o600)
        for number in range(8):
            writer.write(f"line {number}\n".encode() * 10)
            assert rotate(log, largest=50, kept=3)
            assert log.stat().st_size == 0
        writer.write(b"and on\n")
        assert not rotate(log, largest=50, kept=3)
    assert log.read_text() == "and on\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process.log", *(f"process.log.{n}" for n in (1, 2, 3))]
    assert (tmp_path / "process.log.1").read_text().startswith("line 7\n")
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_every_event_is_a_line_of_json(kit: Path) -> None:
    note(kit, "started", name="server")
    note(kit, "refused", name="ada\n", why="„revoked“")
    lines = [json.loads(line) for line in (kit / "events.jsonl").read_text().splitlines()]
    assert [(line["event"], line["name"]) for line in lines] == [("started", "server"), ("refused", "ada\n")]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


def test_a_participant_says_at_its_start_that_its_certificate_ends(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    soon = Certificate("ada", "", 1, datetime.now(UTC) + timedelta(days=10, minutes=1))
    monkeypatch.setattr(supervisor, "certificate_of", lambda _: soon)
    supervisor._warn(kit)
    assert "warning: the certificate of 'ada' expires on" in capsys.readouterr().err
    assert json.loads((kit / "events.jsonl").read_text())["event"] == "certificate"


def test_status_warns_of_the_own_certificate_the_servers_and_those_connected(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consilium.cli.standing import endings

    now = datetime.now(UTC)
    own = Certificate("office@consilium.org", "", 1, now + timedelta(days=300))
    monkeypatch.setattr("consilium.federation.certificates.certificate_of", lambda _: own)
    standing = {
        name: {"expires": (now + timedelta(days=days)).timestamp()}
        for name, days in (("server", 5), ("ada", 100), ("bea", 29), ("office@consilium.org", 1))
    }
    assert [said.split("'")[1] for said in endings(kit, standing)] == ["server", "bea"]


HEAVY = ("torch", "numpy", "monai", "nvflare", "scipy")
IMPORTS = f"""
import sys
from consilium.cli import main
from consilium.federation import supervisor
def look(*_):
    print(sorted(set(sys.modules) & set({HEAVY})))
    raise SystemExit
supervisor.start = look
supervisor.read_apart = lambda path: supervisor.OwnSettings("ada", path.parent / "m")  # in a process of its own
main.main(sys.argv[1:])
"""


def test_a_supervisor_imports_neither_torch_nor_the_engine(tmp_path: Path) -> None:
    """It lives as long as the site; torch alone is 190 MB."""
    from consilium.federation.kits import make_kits
    from consilium.federation.project import Project

    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    (tmp_path / "h.toml").write_text('site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", IMPORTS, "federation", "site", str(kits["ada"]), "--hospital"]
    done = subprocess.run(
        [*command, str(tmp_path / "h.toml")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_settings_are_checked_apart_and_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "hospital.toml"
    path.write_text('site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n[limits]\nmethods = ["fedsn"]\n')
    with pytest.raises(DataError, match="there is no method 'fedsn'; did you mean 'fedsm'"):
        read_apart(path)


def test_a_site_is_connected_when_the_server_has_answered(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA FLARE opens a line before it calls: without a server a site opens one every ten seconds."""
    from nvflare.fuel.f3.drivers.base_driver import BaseDriver
    from nvflare.fuel.f3.sfm.conn_manager import ConnManager

    from consilium.federation.connection_guard import watch_server

    for place, name in ((BaseDriver, "add_connection"), (BaseDriver, "close_connection")):
        monkeypatch.setattr(place, name, lambda driver, conn: None)
    monkeypatch.setattr(ConnManager, "update_endpoint", lambda manager, sfm_conn, data: None)
    watch_server(kit)
    line = SimpleNamespace(name="CN1", connector=SimpleNamespace(params={"scheme": "grpc"}))
    driver: Any = None

    BaseDriver.add_connection(driver, line)
    BaseDriver.close_connection(driver, line)
    assert not (kit / "events.jsonl").exists()
    BaseDriver.add_connection(driver, line)
    assert not connections(kit)
    ConnManager.update_endpoint(driver, SimpleNamespace(conn=line), {})
    assert list(connections(kit)) == ["server"]
    BaseDriver.close_connection(driver, line)
    ConnManager.update_endpoint(driver, SimpleNamespace(conn=line), {})  # another thread was late
    assert not connections(kit)
    events = [json.loads(text)["event"] for text in (kit / "events.jsonl").read_text().splitlines()]
    assert events == ["connected", "disconnected"]


def test_a_site_without_its_data_is_warned_at_its_start(tmp_path: Path) -> None:
    settings = supervisor.OwnSettings("ada", tmp_path / "memory", tmp_path / "data")
    assert "has no site.toml" in supervisor.missing_data(settings)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "site.toml").touch()
    assert supervisor.missing_data(settings) == ""
