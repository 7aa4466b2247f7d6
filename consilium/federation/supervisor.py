"""A participant's NVIDIA FLARE process, started again whenever it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # NVIDIA FLARE needs it too

from consilium import children
from consilium.errors import DataError, RunError, WorkError
from consilium.federation.certificates import certificate_of, require_one_kit
from consilium.federation.events import note, rotate
from consilium.federation.kit_settings import close_kit
from consilium.federation.metrics import Participant, address_of, served
from consilium.federation.places import ALLOWED, CONNECTED, EVENTS, OUTPUT
from consilium.federation.project import ROLES
from consilium.federation.settings_check import OwnSettings, Reader, read_apart, read_here
from consilium.files import append_lines, make_folder, read_json

QUICK = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "10",  # a dead site must not keep the next job waiting
    "NVFLARE_RM_QUERY_INTERVAL": "1",
}
PAUSE = 2.0  # seconds before a process that ended is started again
LOOK = 5.0  # seconds between two looks at the size of the logs
DAY = 86_400.0  # seconds between two warnings that the certificate ends


def kit_of(folder: Path, kind: str) -> Mapping[str, Any]:
    """What a kit says about itself."""
    path = folder / "consilium.json"
    if not path.is_file():
        raise DataError(
            f"{folder} is not a kit: it has no consilium.json. Kits are made by `consilium federation kits`."
        )
    remedy = "copy it from the kit that the consortium made, or ask the consortium for a new kit"
    facts: Mapping[str, Any] = read_json(path, remedy)
    if not isinstance(facts, dict) or "name" not in facts:
        raise DataError(f"{path} is damaged: it does not say whose kit this is; {remedy}.")
    name = str(facts["name"])
    kinds = {"server": "server", "admin": "admin", "office": "admin"}  # "office": kits of 0.1
    role = str(facts.get("role", kinds.get(name, "site")))  # kits before 0.2 have no role
    if ("admin" if role in ROLES else role) != kind:
        wanted = "an administrator" if kind == "admin" else f"a {kind}"
        raise DataError(f"{folder} is the kit of '{name}', which is not {wanted}.")
    return facts


def command(folder: Path, kind: str, name: str) -> list[str]:
    """How a participant's process is started."""
    if " " in str(folder):
        raise DataError(f"{folder} has a space in it, which NVIDIA FLARE does not support; move the kit.")
    who = [] if kind == "server" else [f"uid={name}"]
    return [
        *(sys.executable, "-u", "-m", "consilium.federation.start", kind),
        *("-m", str(folder), "-s", f"fed_{'server' if kind == 'server' else 'client'}.json"),
        *("--set", "secure_train=true", *who, "org=consilium", "config_folder=config"),
    ]


def prepare(
    folder: Path,
    kind: str,
    hospital: Path | None = None,
    code: Sequence[str] = (),
    resume: bool = True,
    read: Reader = read_here,
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a participant, after a look at its kit and its hospital.toml.

    `code` names classes of other packages that a study may name at this server. `resume`: a server that was started
    again goes on by itself with runs that died with it. `read` looks at the hospital.toml.
    """
    folder = folder.resolve()
    facts = kit_of(folder, kind)
    require_one_kit(folder, str(facts.get("user", "")))
    close_kit(folder, kind)
    if hospital is not None:
        settings = read(hospital)
        if settings.site != facts["name"]:
            raise DataError(f"{hospital} is of site '{settings.site}', but the kit is of '{facts['name']}'.")
        make_folder(settings.memory, private=True)
    own = (
        {"CONSILIUM_HOSPITAL": str(hospital.resolve())}
        if hospital
        else {ALLOWED: "\n".join(_full(name) for name in code)}
    )
    if not resume:
        own["CONSILIUM_NO_RESUME"] = "1"  # returning.NO_RESUME
    memory = children.PASSING_ON if kind == "server" else children.TRAINING
    return command(folder, kind, str(facts["name"])), {**children.environment(memory), **QUICK, **own}


@contextlib.contextmanager
def alone(folder: Path, what: str) -> Iterator[int]:
    """One process at a time for a folder; gives the lock's file, which a child that inherits it holds too."""
    file = os.open(folder / ".running", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = f"{_holder(file)} holds {folder}/.running"
            raise RunError(f"{what} is running already ({held}); stop that one first.") from error
        _hold(file, os.getpid())
        yield file
    finally:
        os.close(file)


def _hold(file: int, *processes: int) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
        os.ftruncate(file, 0)
        os.pwrite(file, " ".join(map(str, processes)).encode(), 0)


def _holder(file: int) -> str:
    """Who holds a lock: the supervisor or, if that was killed, what it started, which goes on without it."""
    for pid in os.pread(file, 100, 0).decode(errors="replace").split():
        with contextlib.suppress(psutil.Error, ValueError):
            if "consilium" in " ".join(psutil.Process(int(pid)).cmdline()):
                return f"process {pid}"
    return "a process of it"  # of an earlier version, or a job's


def supervise(
    folder: Path,
    kind: str,
    hospital: Path | None = None,
    code: Sequence[str] = (),
    resume: bool = True,
    metrics: str = "",
) -> None:
    """Keep a participant running until this process is told to stop; its output goes to `process.log` in the kit.

    A second one with the same kit or the same memory folder is refused: two would evict each other for ever. `metrics`
    is a port, or an address and a port, to serve health and metrics at.
    """
    folder = folder.resolve()
    name = str(kit_of(folder, kind)["name"])
    where = address_of(metrics) if metrics else None
    settings: OwnSettings | None = read_apart(hospital) if hospital else None
    arguments, variables = prepare(folder, kind, hospital, code, resume, lambda path: settings or read_here(path))
    memory = settings.memory if settings else None
    if settings and (missing := missing_data(settings)):
        _say(f"warning: {missing}")
    watched = Participant(folder, name, memory)
    with contextlib.ExitStack() as stack:
        locks = [stack.enter_context(alone(place, f"the {kind} '{name}'")) for place in (folder, memory) if place]
        if kind == "server":
            require_port(folder)
        if where:
            stack.enter_context(served(watched, where))
        stop = threading.Event()
        for which in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, which, signal.signal(which, lambda *_: stop.set()))
        while not stop.is_set():
            _warn(folder)
            child = start(folder, arguments, variables, locks)
            for lock in locks:
                _hold(lock, os.getpid(), child.pid)
            watched.up, watched.starts = True, watched.starts + 1
            note(folder, "started", name=name, process=child.pid, starts=watched.starts)
            _say(f"{kind} '{name}' is up (process {child.pid}); what happens is in {folder / EVENTS}. Ctrl-C stops it.")
            _wait(child, folder, stop)
            watched.up = False
            end(child)
            note(folder, "ended", name=name, process=child.pid, status=child.returncode, asked=stop.is_set())
            if not stop.is_set():
                _say(f"its process ended with status {child.returncode}, see {folder / OUTPUT}; it starts again.")
            stop.wait(PAUSE)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def require_port(kit: Path) -> None:
    """Refuse a port that another program listens on: gRPC would share it, and each would get some of the sites."""
    target = str(read_json(kit / "startup" / "fed_server.json")["servers"][0]["service"]["target"])
    host, _, port = target.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server that ended do not matter
        try:
            probe.bind(("127.0.0.1" if host == "localhost" else "", int(port)))
        except OSError as error:
            said = f"the server cannot listen on port {port}: {error.strerror}"
            raise WorkError(f"{said}; stop the program that does, or make kits with another port.") from error


def missing_data(settings: OwnSettings) -> str:
    """Why no study can run here yet; empty if the site folder is there. It may be a disk that comes later."""
    if (settings.data / "site.toml").is_file():
        return ""
    return f"{settings.data} has no site.toml; until the data are there, this site takes part in no study."


def _wait(child: subprocess.Popen[bytes], folder: Path, stop: threading.Event) -> None:
    """Until a process has ended, or shall; its logs are put aside when they are large, and a day's warnings given."""
    looked = warned = time.monotonic()
    while child.poll() is None and not stop.wait(0.2):
        now = time.monotonic()
        if now - looked > LOOK:
            looked = now
            for log in (OUTPUT, EVENTS):
                rotate(folder / log)
        if now - warned > DAY:
            warned = now
            _warn(folder)


def _warn(folder: Path) -> None:
    """Say that the certificate ends soon, where a person and a log system see it."""
    certificate = certificate_of(folder)
    if warning := certificate.warning():
        print(f"warning: {warning}", file=sys.stderr, flush=True)
        note(folder, "certificate", name=certificate.name, expires=certificate.expires.isoformat(), said=warning)


def start(
    folder: Path, arguments: list[str], variables: Mapping[str, str], locks: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A participant's process in a session of its own: Ctrl-C is for the supervisor. It holds these locks too."""
    (folder / CONNECTED).unlink(missing_ok=True)  # of a process that was killed
    append_lines("", folder / OUTPUT, private=True)
    with (folder / OUTPUT).open("ab") as log:  # always at its end, also after it was emptied
        return subprocess.Popen(
            arguments,
            env=dict(variables),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(locks),
            umask=0o077,  # NVIDIA FLARE writes files too
        )


def end(child: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """End a process and the job processes it started, which would otherwise go on for a while by themselves."""
    jobs = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    child.terminate()
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            job.kill()


def _full(name: str) -> str:
    """The name of code with the full path of its file, wherever the server's processes run."""
    return str(Path(name).resolve()) if ".py:" in name else name
