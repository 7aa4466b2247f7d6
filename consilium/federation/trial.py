"""`federation try`: a whole federation of local processes, from kits to results, and everything taken down again."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import StudyError, WorkError
from consilium.extensions import code_hash
from consilium.federation.admin import AdminClient, open_admin
from consilium.federation.kits import make_kits
from consilium.federation.places import runs_of
from consilium.federation.project import Project
from consilium.federation.supervisor import end, prepare, start
from consilium.fields import to_toml
from consilium.study import Study, with_plan
from consilium.timeline import timeline
from consilium.validation import admitted, expected_roster, members_of
from consilium.wording import counted

START = 180.0  # seconds until all processes are up, on a busy machine


@dataclass
class LocalFederation:
    """A federation of processes of this machine, on loopback."""

    folder: Path
    kits: dict[str, Path]
    processes: dict[str, subprocess.Popen[bytes]]
    code: tuple[str, ...] = ()  # classes of other packages that studies may name at the server

    def start(self, name: str) -> None:
        kit = self.kits[name]
        kind = "server" if name == "server" else "site"
        arguments, variables = prepare(kit, kind, None if kind == "server" else self.hospital(name), self.code)
        self.processes[name] = start(kit, arguments, variables)

    def end(self) -> None:
        for process in self.processes.values():
            end(process)

    def hospital(self, name: str) -> Path:
        return self.folder / "hospitals" / name / "hospital.toml"

    def memory(self, name: str) -> Path:
        return self.folder / "hospitals" / name / "memory"

    @property
    def runs(self) -> Path:
        return runs_of(self.kits["server"])


def settle(study: Study, sites: tuple[str, ...], folder: Path, server: str = "localhost") -> LocalFederation:
    """Kits and a hospital.toml per site, nothing started; data are read where the study's federation has them.

    Classes of other packages that this study names are allowed everywhere: it is the user's own, on one machine.
    """
    kits = make_kits(Project("local", server, free_port(), sites), folder / "kits")
    local = LocalFederation(folder.resolve(), kits, {}, study.plugins)
    federation = study.federation()
    for name in sites:
        path = local.hospital(name)
        path.parent.mkdir(parents=True)
        lines = {
            "site": name,
            "data": str(federation.sites[name].folder),
            "memory": str(local.memory(name)),
            "labels": list(study.facts.labels),
            "device": study.local.device,
        }
        text = "".join(f"{key} = {to_toml(value)}\n" for key, value in lines.items())
        path.write_text(
            f"{text}[limits]\ncode = {to_toml([f'{name} {code_hash(name)}' for name in study.plugins])}\n",
            encoding="utf-8",
        )
    return local


@contextmanager
def local_federation(
    study: Study, sites: tuple[str, ...], folder: Path
) -> Iterator[tuple[LocalFederation, AdminClient]]:
    """Server and sites as processes that end with the block."""
    local = settle(study, sites, folder)
    with stopped_by_signals(), ExitStack() as stack:
        stack.callback(local.end)
        for name in ("server", *sites):
            local.start(name)
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(sites, START)
        yield local, admin


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Being told to end, or losing the terminal, leaves the block as an error would: nothing goes on behind it."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread listen
        yield
        return
    before = {which: signal.signal(which, stop) for which in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def try_federation(
    study: Study,
    count: int | None,
    runs: Path,
    say: Callable[[str], None] = lambda _: None,
    show: Callable[[Mapping[str, Any]], None] | None = None,
) -> Path:
    """Run a study as a federation of the first `count` sites that train, and guests; returns the run folder in `runs`.

    `say` is told what happens before the run begins, and `show` gets every event of its journal.
    """
    federation = study.federation()
    names = members_of(study, federation)
    if count is not None and not 1 <= count <= len(names):
        raise StudyError(f"--sites {count}: the study has {counted(len(names), 'site')}.")
    members = tuple(names[:count])
    study = with_plan(study, sites=members)
    admitted(study, timeline(study.method, study.plan.rounds), expected_roster(study, federation, members))
    everyone = tuple(sorted({*members, *study.plan.leave_out}))
    say(f"making kits, starting a server and {len(everyone)} sites as processes of this machine")
    with (
        tempfile.TemporaryDirectory(prefix="consilium-") as folder,
        local_federation(study, everyone, Path(folder)) as (_, admin),
    ):
        say("all are connected; the study is submitted, and the roll call prepares the cases")
        job = admin.follow(admin.submit(study), show)
        outcome = admin.outcome(job)
        if outcome["state"] != "finished":
            raise WorkError(str(outcome["said"]))
        return admin.fetch(job, runs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
