"""Project files and kits: names are checked, and the defaults that would send logs or run code are off."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from consilium.cli import federation as commands
from consilium.errors import DataError, RunError, StudyError, WorkError
from consilium.federation.kit_settings import RIGHTS
from consilium.federation.kits import make_kits
from consilium.federation.project import ADMIN, Project, read_project
from consilium.federation.start import ADMIN_COMMANDS
from consilium.federation.supervisor import kit_of, prepare, supervise


def test_a_project_file_is_written_and_read(tmp_path: Path) -> None:
    project = Project("eyes", "fl.example.org", 8002, ("ada", "bea"))
    project.write(tmp_path / "eyes.toml")
    assert read_project(tmp_path / "eyes.toml") == project
    with pytest.raises(DataError, match="exists already"):
        project.write(tmp_path / "eyes.toml")


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        *(((), "at least one"), (("ada", "ada"), "once"), (("a/b",), "cannot be used"), (("server",), "another")),
        *((("admin",), "another"), (("authority",), "another"), (("ada.bea",), "no '.'"), (("localhost",), "another")),
    ],
)
def test_names_that_cannot_work_are_refused(sites: tuple[str, ...], why: str) -> None:
    with pytest.raises(StudyError, match=why):
        Project("eyes", "localhost", 8002, sites)


def test_a_kits_readme_names_our_own_start(tmp_path: Path) -> None:
    """NVIDIA FLARE's says to run start.sh, which knows nothing of hospital.toml."""
    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    starts = {"server": "federation server server", "admin": "federation submit", "ada": "federation site ada"}
    for name, start in starts.items():
        texts = [path.read_text() for path in kits[name].rglob("readme*")]
        assert len(texts) == 1
        assert f"consilium {start}" in texts[0]
        assert ".sh" not in texts[0] and "script" not in texts[0]  # there is none


def test_kits_send_no_logs_and_run_only_studies(tmp_path: Path) -> None:
    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    site = json.loads((kits["ada"] / "local/resources.json").read_text())
    assert site["allow_log_streaming"] is False
    assert site["class_allow_list"] == ["consilium.federation.site_entry.SiteJob"]
    server = json.loads((kits["server"] / "local/resources.json").read_text())
    assert server["class_allow_list"] == ["consilium.federation.server_entry.ServerJob"]
    assert not [part for part in site["components"] if "log" in part["id"]]
    rights = json.loads((kits["ada"] / "local/authorization.json").read_text())["permissions"]
    assert list(rights) == ["project_admin", "watcher"]
    for role in rights.values():
        assert {role[what] for what in ("shell_commands", "byoc", "operate")} == {"none"}
    sent = json.loads((kits["ada"] / "startup/fed_client.json").read_text())
    assert sent["client"]["connection_security"] == "mtls"
    with pytest.raises(DataError, match="has kits already"):
        make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    with pytest.raises(DataError, match="which is not a site"):
        prepare(kits["server"], "site")
    with pytest.raises(DataError, match="which is not an administrator"):
        kit_of(kits["ada"], "admin")
    with pytest.raises(DataError, match="none is not a kit"):
        commands.site(tmp_path / "none", tmp_path / "hospital.toml", example=True)
    hospital = tmp_path / "hospital.toml"
    hospital.write_text('site = "bea"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n')
    with pytest.raises(DataError, match="but the kit is of 'ada'"):
        prepare(kits["ada"], "site", hospital)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_kits_and_the_authority_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    finally:
        os.umask(before)
    paths = [tmp_path / "kits", *(tmp_path / "kits").rglob("*")]
    assert {path.name for path in paths} >= {"authority", "cert.json", "client.key", "resources.json"}
    wrong = [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) != (0o700 if path.is_dir() else 0o600)]
    assert wrong == []


def test_no_kit_holds_a_start_that_goes_round_ours(tmp_path: Path) -> None:
    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    assert not [path for kit in kits.values() for path in kit.rglob("*") if path.suffix in (".sh", ".ipynb")]
    for name, kind in (("ada", "site"), ("server", "server")):
        arguments, _ = prepare(kits[name], kind)
        assert arguments[arguments.index("-m") + 1 :][:2] == ["consilium.federation.start", kind]


def test_who_holds_a_kit_is_named_also_when_its_supervisor_was_killed(tmp_path: Path) -> None:
    kits = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")
    hospital = tmp_path / "hospital.toml"
    hospital.write_text('site = "ada"\ndata = "d"\nmemory = "m"\nlabels = ["blob"]\n')
    words = [sys.executable, "-m", "consilium", "federation", "site", str(kits["ada"]), "--hospital", str(hospital)]
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen(words, stderr=said)
    try:
        end = time.monotonic() + 60
        while not (kits["ada"] / "events.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.2)
        (began,) = map(json.loads, (kits["ada"] / "events.jsonl").read_text().splitlines())
        with pytest.raises(RunError, match=rf"is running already \(process {first.pid} holds "):
            supervise(kits["ada"], "site", hospital)
    finally:
        first.kill()
        first.wait()
    up = f"site 'ada' is up (process {began['process']}); what happens is in {kits['ada'] / 'events.jsonl'}"
    assert up in (tmp_path / "said").read_text()
    try:
        with pytest.raises(RunError, match=rf"\(process {began['process']} holds .*; stop that one first"):
            supervise(kits["ada"], "site", hospital)
    finally:
        os.kill(began["process"], signal.SIGKILL)


def test_a_server_does_not_share_its_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        kit = make_kits(Project("eyes", "localhost", port, ("ada",)), tmp_path / "kits")["server"]
        with pytest.raises(WorkError, match=f"cannot listen on port {port}: Address already in use; stop the program"):
            supervise(kit, "server")
    assert not (kit / "events.jsonl").exists()  # nothing was started


def test_a_kit_of_an_earlier_version_is_closed_when_it_starts(tmp_path: Path) -> None:
    kit = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")["ada"]
    path = kit / "local/resources.json"
    settings = json.loads(path.read_text())
    settings |= {"class_allow_list": ["consilium.federation"], "mine": 7, "app_validator": None}
    settings["components"][-1]["path"] = (
        "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher"
    )
    settings["components"].append({"id": "site_log_streamer", "path": "x.y"})
    path.write_text(json.dumps(settings))
    (kit / "local/comm_config.json").unlink()
    (kit / "startup/start.sh").write_text("python3 -m nvflare…")
    prepare(kit, "site")
    closed = json.loads(path.read_text())
    assert closed["class_allow_list"] == ["consilium.federation.site_entry.SiteJob"]
    assert closed["app_validator"]["path"] == "consilium.federation.launchers.JobFilesValidator"
    assert [part["path"] for part in closed["components"]][-1] == "consilium.federation.launchers.SiteJobStarter"
    assert closed["mine"] == 7  # the owner's other settings stay
    assert json.loads((kit / "local/comm_config.json").read_text())["internal"]["scheme"] == "unix"
    assert not (kit / "startup/start.sh").exists()


CHANGES = ("submit_job", "clone_job", "abort_job")


@pytest.mark.parametrize(("role", "not_allowed"), [("project_admin", ()), ("watcher", CHANGES), ("lead", None)])
def test_the_rights_of_an_administrator_are_its_commands(role: str, not_allowed: tuple[str, ...] | None) -> None:
    """A right that is missing shows only as a journal that stays empty."""
    from nvflare.fuel.sec.authz import AuthzContext, Person
    from nvflare.security.security import FLAuthorizer

    authorizer = FLAuthorizer("consilium", RIGHTS)
    admin = Person(ADMIN, "consilium", role)

    def may(right: str) -> bool:
        return bool(authorizer.authorize(AuthzContext(user=admin, submitter=admin, right=right))[0])

    commands = [name for name in ADMIN_COMMANDS if not name.startswith("_")]
    assert [name for name in commands if not may(name)] == list(commands if not_allowed is None else not_allowed)
    assert [name for name in ("cat", "ls", "byoc", "shutdown", "restart", "sys_info") if may(name)] == []
