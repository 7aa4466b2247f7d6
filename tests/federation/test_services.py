"""What starts a participant at boot: units of systemd, containers, and the same in a sandbox of this machine."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import yaml
from typer.main import get_command

from consilium.cli.federation import app
from consilium.errors import DataError
from consilium.federation.admin import open_admin
from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from consilium.federation.services import write_service
from consilium.federation.settings_check import OwnSettings
from consilium.federation.trial import START, settle
from tests.toy import toy_study

DEPLOY = Path(__file__).parents[2] / "deploy"
SITES = ("ada", "bea", "cid")


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path_factory.mktemp("kits") / "kits")


def settings(folder: Path, device: str = "auto") -> OwnSettings:
    return OwnSettings("ada", folder / "memory", folder / "data", device)


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """A unit's sections; a key may be there more than once."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            keys = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            keys.setdefault(key, []).append(value)
    return found


def test_a_unit_is_unprivileged_closed_and_started_again(kits: dict[str, Path], tmp_path: Path) -> None:
    hospital = tmp_path / "hospital.toml"
    to = write_service(kits["ada"], hospital, tmp_path / "a.service", "med", "9100", lambda _: settings(tmp_path))
    found = unit(to)
    assert found.keys() == {"Unit", "Service", "Install"}
    service = found["Service"]
    start = f"{sys.executable} -m consilium federation site {kits['ada']} --hospital {hospital} --metrics 9100"
    assert (service["User"], service["ExecStart"]) == (["med"], [start])
    assert service["Restart"] == ["always"]
    wanted = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "PrivateTmp": "yes", "CapabilityBoundingSet": ""}
    assert {key: service[key] for key in wanted} == {key: [value] for key, value in wanted.items()}
    assert service["ReadWritePaths"] == [str(kits["ada"]), str(tmp_path / "memory")]
    assert service["ReadOnlyPaths"] == [str(tmp_path / "data")]
    assert "PrivateDevices" not in service  # device = "auto" may be a GPU


def test_systemd_reads_the_units(kits: dict[str, Path], tmp_path: Path) -> None:
    """By systemd itself where it is installed; by a parser of its syntax everywhere."""
    hospital = tmp_path / "hospital.toml"
    paths = [
        write_service(kits["server"], None, tmp_path / "server.service", "med"),
        write_service(kits["ada"], hospital, tmp_path / "ada.service", "med", "", lambda _: settings(tmp_path, "cpu")),
    ]
    for path in paths:
        configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",)).read_string(path.read_text())
        assert unit(path)["Service"]["PrivateDevices"] == ["yes"]
    if tool := shutil.which("systemd-analyze"):
        done = subprocess.run([tool, "verify", *map(str, paths)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_name_with_a_percent_sign_stays_itself(tmp_path: Path) -> None:
    kit = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "50%" / "kits")["server"]
    assert unit(write_service(kit, None, tmp_path / "s.service", "med"))["Service"]["ReadWritePaths"] == [
        str(kit).replace("%", "%%")
    ]


@pytest.mark.parametrize(
    ("kit", "to", "user", "why"),
    [
        ("ada", "a.service", "med", "needs its settings"),
        ("admin", "a.service", "med", "which is not a site"),
        ("server", "a.unit", "med", "ends in .service"),
        ("server", "a.service", "Med; rm", "name of a user"),
        ("server", "a.service", "root", "not as root"),
    ],
)
def test_what_cannot_be_a_unit_is_refused(
    kits: dict[str, Path], tmp_path: Path, kit: str, to: str, user: str, why: str
) -> None:
    with pytest.raises(DataError, match=why):
        write_service(kits[kit], None, tmp_path / to, user)
    assert not (tmp_path / to).exists()


def test_a_server_has_no_hospital(kits: dict[str, Path], tmp_path: Path) -> None:
    """`federation server` has no such option: the unit would start nothing."""
    with pytest.raises(DataError, match="leave it out"):
        write_service(kits["server"], tmp_path / "hospital.toml", tmp_path / "a.service", "med")


# ------------------------------------------------------------------------------------ containers


def options(words: list[str]) -> tuple[str, list[str]]:
    """A command of ours, and the options given to it."""
    return words[0], [word for word in words if word.startswith("--")]


def test_the_compose_file_starts_our_commands_closed() -> None:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services.keys() == {"fl", *SITES}
    known: Any = get_command(app)
    for name, service in services.items():
        command, given = options(service["command"])
        assert command == ("server" if name == "fl" else "site")
        assert {*given} <= {option for one in known.commands[command].params for option in one.opts}
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert ("ports" in service) == (name == "fl")  # a site opens none
        assert not [volume for volume in service["volumes"] if "/data" in volume and not volume.endswith(":ro")]


def test_the_container_file_ends_as_an_unprivileged_user() -> None:
    lines = [line.split(maxsplit=1) for line in (DEPLOY / "Containerfile").read_text().splitlines() if line.strip()]
    words = [line for line in lines if line[0].isupper()]
    assert [rest for word, rest in words if word == "USER"] == ["10001"]
    assert [rest for word, rest in words if word == "ENTRYPOINT"] == ['["consilium", "federation"]']
    copied = {part for word, rest in words if word == "COPY" for part in rest.split()[:-1]}
    assert not [part for part in copied if not (DEPLOY.parent / part).exists()]
    if tool := shutil.which("hadolint"):
        done = subprocess.run([tool, str(DEPLOY / "Containerfile")], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


# ------------------------------------------------------------------------------------ a sandbox


def closed_in(site: str, kit: Path, memory: Path, cache: Path, hidden: list[Path]) -> list[str]:
    """Bubblewrap's words for what a container gives a site: its kit, memory and cache to write, and no other kit."""
    words = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "--share-net"]
    for path in hidden:
        words += ["--tmpfs", str(path)]
    for path in (kit, memory, cache):
        words += ["--bind", str(path), str(path)]
    return [*words, "--setenv", "CONSILIUM_CACHE", str(cache), "--hostname", site, "--die-with-parent", "--"]


@contextmanager
def running(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.xdist_group("federation")
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_three_sites_run_in_sandboxes(federation: Path, tmp_path: Path) -> None:
    """What compose.yaml would start: each site sees its own kit and no other, and cannot write to its data."""
    study = toy_study(federation, study__rounds=2, study__deadline=120.0)
    local = settle(study, SITES, tmp_path)
    commands = [sys.executable, "-m", "consilium", "federation"]
    with ExitStack() as stack:
        stack.enter_context(running([*commands, "server", str(local.kits["server"])]))
        for site in SITES:
            memory, cache = local.memory(site), tmp_path / "cache" / site
            for path in (memory, cache):
                path.mkdir(parents=True)
            others = [local.kits[other] for other in SITES if other != site]
            others += [local.kits["admin"], local.kits["server"], tmp_path / "kits/authority"]
            closed = closed_in(site, local.kits[site], memory, cache, others)
            seen = subprocess.run([*closed, "ls", *map(str, others)], capture_output=True, text=True, check=True).stdout
            assert "startup" not in seen
            touched = subprocess.run([*closed, "touch", str(federation / site / "x")], capture_output=True, check=False)
            assert touched.returncode != 0
            words = [*closed, *commands, "site", str(local.kits[site]), "--hospital", str(local.hospital(site))]
            stack.enter_context(running(words))
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(SITES, START)
        job = admin.follow(admin.submit(study))
        assert admin.outcome(job)["state"] == "finished"
        assert admin.outcome(job)["said"] == ""
