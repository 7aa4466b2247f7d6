"""A participant's NVIDIA FLARE process, started again whenever it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # NVIDIA FLARE needs it too

from consilium import children
from consilium.errors import DataError, RunError
from consilium.federation.kit_settings import close_kit
from consilium.federation.named_code import ALLOWED
from consilium.files import append_lines, make_folder, read_json
from consilium.hospital import read_hospital

QUICK = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "10",  # a dead site must not keep the next job waiting
    "NVFLARE_RM_QUERY_INTERVAL": "1",
}
PAUSE = 2.0  # seconds before a process that ended is started again


def kit_of(folder: Path, kind: str) -> Mapping[str, Any]:
    """What a kit says about itself."""
    path = folder / "consilium.json"
    if not path.is_file():
        raise DataError(
            f"{folder} is not a kit: it has no consilium.json. Kits are made by `consilium federation kits`."
        )
    facts: Mapping[str, Any] = read_json(path)
    kinds = {"server": "server", "office": "office"}
    if kinds.get(str(facts["name"]), "site") != kind:
        raise DataError(f"{folder} is the kit of '{facts['name']}', which is not a {kind}.")
    return facts


def command(folder: Path, kind: str, name: str) -> list[str]:
    """How a participant's process is started."""
    if " " in str(folder):
        raise DataError(f"{folder} has a space in it, which NVIDIA FLARE cannot bear; move the kit.")
    who = [] if kind == "server" else [f"uid={name}"]
    return [
        *(sys.executable, "-u", "-m", "consilium.federation.start", kind),
        *("-m", str(folder), "-s", f"fed_{'server' if kind == 'server' else 'client'}.json"),
        *("--set", "secure_train=true", *who, "org=consilium", "config_folder=config"),
    ]


def prepare(
    folder: Path, kind: str, hospital: Path | None = None, code: Sequence[str] = (), resume: bool = True
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a participant, after a look at its kit and its hospital.toml.

    `code` names classes of other packages that a study may name at this server. `resume`: a server that was started
    again goes on by itself with runs that died with it.
    """
    folder = folder.resolve()
    facts = kit_of(folder, kind)
    close_kit(folder, kind)
    if hospital is not None:
        settings = read_hospital(hospital)
        if settings.site != facts["name"]:
            raise DataError(f"{hospital} is of site '{settings.site}', but the kit is of '{facts['name']}'.")
        make_folder(Path(settings.memory), private=True)
    own = {"CONSILIUM_HOSPITAL": str(hospital.resolve())} if hospital else {ALLOWED: " ".join(code)}
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
            raise RunError(f"{what} is running already (it holds {folder}/.running); stop that one first.") from error
        yield file
    finally:
        os.close(file)


def supervise(
    folder: Path, kind: str, hospital: Path | None = None, code: Sequence[str] = (), resume: bool = True
) -> None:
    """Keep a participant running until this process is told to stop; its output goes to `process.log` in the kit.

    A second one with the same kit or the same memory folder is refused: two would evict each other for ever.
    """
    name = str(kit_of(folder, kind)["name"])
    arguments, variables = prepare(folder, kind, hospital, code, resume)
    places = [folder, *([Path(read_hospital(hospital).memory)] if hospital else [])]
    with contextlib.ExitStack() as stack:
        locks = [stack.enter_context(alone(place, f"the {kind} '{name}'")) for place in places]
        stop = threading.Event()
        for which in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, which, signal.signal(which, lambda *_: stop.set()))
        while not stop.is_set():
            child = start(folder, arguments, variables, locks)
            while child.poll() is None and not stop.wait(0.2):
                pass
            end(child)
            stop.wait(PAUSE)


def start(
    folder: Path, arguments: list[str], variables: Mapping[str, str], locks: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A participant's process in a session of its own: Ctrl-C is for the supervisor. It holds these locks too."""
    append_lines("", folder / "process.log", private=True)
    with (folder / "process.log").open("ab") as log:
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
