"""Units of systemd for a server or a site: an unprivileged user, and nothing of the machine that it does not need."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from consilium.errors import DataError
from consilium.federation.metrics import address_of
from consilium.federation.settings_check import OwnSettings, Reader, read_apart
from consilium.federation.supervisor import command, kit_of
from consilium.files import make_folder, write_text

USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
SANDBOX = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
PrivateTmp=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
"""


def write_service(
    kit: Path, hospital: Path | None, to: Path, user: str, metrics: str = "", read: Reader = read_apart
) -> Path:
    """Write the unit of the server or site that a kit belongs to; `hospital` is a site's hospital.toml."""
    if not USER.fullmatch(user):
        raise DataError(f"--user {user}: write the name of a user of this machine, in small letters.")
    if user == "root":
        raise DataError("--user root: a server or site runs not as root, but as a user of its own (`useradd`).")
    if to.suffix != ".service":
        raise DataError(f"--to {to}: the file of a unit ends in .service.")
    if to.exists():
        raise DataError(f"{to} exists already; edit it, or delete it first.")
    kit = kit.resolve()
    kind = "server" if (kit / "startup" / "server.crt").exists() else "site"
    name = str(kit_of(kit, kind)["name"])
    settings = None
    if kind == "server" and hospital is not None:
        raise DataError(f"--hospital {hospital}: the kit is of the server, which has no hospital.toml; leave it out.")
    if kind == "site":
        if hospital is None:
            raise DataError("a site needs its settings: --hospital FILE.toml.")
        settings = read(hospital)
        if settings.site != name:
            raise DataError(f"{hospital} is of site '{settings.site}', but the kit is of '{name}'.")
        make_folder(settings.memory, private=True)  # systemd opens it to the unit, and cannot if it is not there
    command(kit, kind, name)  # refuses what NVIDIA FLARE cannot start
    if metrics:
        address_of(metrics)
    write_text("".join(_lines(kit, kind, name, hospital, settings, user, metrics)), to)
    return to


def _lines(
    kit: Path, kind: str, name: str, hospital: Path | None, settings: OwnSettings | None, user: str, metrics: str
) -> Iterator[str]:
    words = [sys.executable, "-m", "consilium", "federation", kind, str(kit)]
    if hospital:
        words += ["--hospital", str(hospital.resolve())]
    if metrics:
        words += ["--metrics", metrics]
    folder = f"consilium-{name}"
    yield f"[Unit]\nDescription=consilium, {kind} {name}\nWants=network-online.target\nAfter=network-online.target\n\n"
    yield f"[Service]\nType=exec\nUser={user}\nWorkingDirectory={_quoted(kit)}\n"
    yield f"ExecStart={' '.join(_quoted(word) for word in words)}\n"
    yield f"CacheDirectory={folder}\nCacheDirectoryMode=0700\nEnvironment=CONSILIUM_CACHE=%C/{folder}\n"
    yield "# Status 2 is a mistake in the settings, which a new start does not mend.\n"
    yield "Restart=always\nRestartSec=10\nRestartPreventExitStatus=2\n"
    yield "KillMode=mixed\nTimeoutStopSec=60\n"
    yield "# A job that takes too much memory ends alone; the supervisor goes on. A core file would hold images.\n"
    yield "OOMPolicy=continue\nLimitCORE=0\nLimitNOFILE=65536\n\n"
    yield SANDBOX
    if settings is None or settings.device == "cpu":
        yield "PrivateDevices=yes\n"
    else:
        yield f'# No PrivateDevices=yes: hospital.toml has device = "{settings.device}", which may be a GPU.\n'
    yield f"ReadWritePaths={_quoted(kit)}\n"
    if settings:
        yield f"ReadWritePaths={_quoted(settings.memory.resolve())}\nReadOnlyPaths={_quoted(settings.data.resolve())}\n"
    yield "\n[Install]\nWantedBy=multi-user.target\n"


def _quoted(word: object) -> str:
    """As systemd reads it back: % begins a specifier there, and $ a variable."""
    text = str(word).replace("%", "%%").replace("$", "$$")
    if re.search(r"[\s\"'\\]", text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return text
