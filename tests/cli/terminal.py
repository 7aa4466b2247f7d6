"""Commands as a user gives them: in this process, in a process that can be killed, and on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.cli.main import main

ROOT = Path(__file__).parents[2]
PATIENCE = 150.0  # seconds until a process that should have done something counts as stuck


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document it must be."""
        return json.loads(self.out)

    @property
    def folder(self) -> Path:
        """The run folder that `run` and `resume` print last."""
        return Path(self.out.splitlines()[-1])


def call(*arguments: object) -> Outcome:
    """One command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int)
    return Outcome(status, out.getvalue(), err.getvalue())


def refused(outcome: Outcome, *words: str, status: int = 2) -> str:
    """The sentence of a command that was refused: on standard error, no traceback, and nothing on standard output."""
    assert outcome.status == status, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    sentence = outcome.err.splitlines()[-1] if outcome.err else ""
    for word in words:
        assert word in outcome.err, outcome.err
    return sentence


# ------------------------------------------------------------------------------------ processes

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["consilium.simulation", "consilium.reporting", "consilium.cli.main"])


class Running:
    """A command in a process of its own, started from a server that has torch loaded already."""

    def __init__(self, folder: Path, *arguments: object, environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        words = [str(argument) for argument in arguments]
        settings = {"CONSILIUM_CACHE": os.environ["CONSILIUM_CACHE"], **(environment or {})}
        self._process = _CONTEXT.Process(target=_work, args=(words, str(self._out), str(self._err), settings))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """End it as the kernel would: no handler, no clean-up."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(PATIENCE)

    def end(self) -> Outcome:
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, "the command did not end"
        return Outcome(self._process.exitcode, self._out.read_text(), self._err.read_text())


def _work(words: list[str], out: str, err: str, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    import torch

    torch.set_num_threads(1)
    main(words)


def wait_for(happened: Callable[[], Any], what: str) -> Any:
    """Wait until something has happened; returns it."""
    until = time.monotonic() + PATIENCE
    while not (found := happened()):
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.01)
    return found


def children_of(pid: int) -> list[int]:
    """The processes a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended (or waits only to be buried)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def events(runs: Path) -> list[dict[str, Any]]:
    """The journal of the one run in a folder, as far as it has been written."""
    lines = [line for path in runs.glob("*/journal.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in lines]


# ------------------------------------------------------------------------------------ terminals


class Terminal:
    """A command on a terminal of 100 columns."""

    def __init__(self, *arguments: object) -> None:
        ours, theirs = os.openpty()
        os.set_blocking(ours, False)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "consilium.cli.main", *(str(argument) for argument in arguments)]
        on_terminal = ["setsid", "--ctty", "--wait", *command]
        ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        self._process = subprocess.Popen(on_terminal, env=environment, cwd=ROOT, **ends)
        os.close(theirs)
        self._ours = ours
        self.text = ""

    def read(self) -> str:
        """All that has been written so far."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                piece = os.read(self._ours, 65536)
            except OSError:  # the other side has closed
                break
            if not piece:
                break
            self.text += piece.decode()
        return self.text

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        """Wait for the end; returns the exit status."""
        until = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            assert time.monotonic() < until, f"the command did not end:\n{self.text}"
            self.read()
            time.sleep(0.01)
        self.read()
        os.close(self._ours)
        return self._process.returncode


def lines_of(text: str) -> Iterator[str]:
    """What a terminal shows in the end, line by line: carriage returns, cursor-up and erase-line obeyed."""
    screen: list[str] = [""]
    row = 0
    rest = text
    while rest:
        if rest.startswith("\x1b["):
            body, rest = _sequence(rest[2:])
            if body.endswith("A"):
                row = max(0, row - int(body[:-1] or 1))
            elif body == "2K":
                screen[row] = ""
            continue
        char, rest = rest[0], rest[1:]
        if char == "\n":
            row += 1
            if row == len(screen):
                screen.append("")
        elif char != "\r":
            screen[row] += char
    return iter(screen)


def _sequence(text: str) -> tuple[str, str]:
    for end, char in enumerate(text):
        if char.isalpha():
            return text[: end + 1], text[end + 1 :]
    return text, ""
