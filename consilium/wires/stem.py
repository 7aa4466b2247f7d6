"""The process that worker processes are forked from: it imports torch once for all of them, while this one imports too.

Nothing here imports torch, so that a command can start it first of all.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection
from typing import IO

from consilium.children import TRAINING, environment

FORKS = sys.platform == "linux"  # elsewhere system libraries do not survive a fork: every worker then imports by itself


class Stem:
    """Started when first needed, and again after it died. It has one thread, so what it forks is whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        with self._lock:
            self._started()

    def worker(self, log: IO[bytes], modules: Collection[str], number: int) -> tuple[socket.socket, int]:
        """A new worker of this number that has imported these modules: the way to it, and its process."""
        with self._lock:
            for last in (False, True):
                control = self._started()
                here, there = socket.socketpair()
                try:
                    said = json.dumps({"modules": sorted(modules), "number": number}).encode()
                    socket.send_fds(control, [said], [there.fileno(), log.fileno()])
                    if process := control.recv(64):
                        return here, int(process)
                except OSError:
                    pass
                finally:
                    there.close()
                here.close()
                self._end()
                if last:
                    break
            raise ConnectionError(self.last_words())

    def _started(self) -> socket.socket:
        if self._control is None:
            self._log = self._log or tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
            self._control, there = socket.socketpair()
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "consilium.wires.site_process"],
                stdin=there.fileno(),
                stdout=self._log,
                stderr=self._log,
                env=environment(TRAINING),
            )
            there.close()
        return self._control

    def last_words(self) -> str:
        return last_line(self._log) if self._log else ""

    def _end(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()  # its workers live on until their own ends close
            process.wait()

    def close(self) -> None:
        with self._lock:
            self._end()
            if self._log is not None:
                self._log.close()


def last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


_spare: list[Stem] = []  # at most one, for whoever needs it first


def prepare() -> None:
    """Start importing now what worker processes will need: the next pool takes it over."""
    if not _spare:
        stem = Stem()
        stem.start()
        _spare.append(stem)


def take() -> Stem:
    """The one that was prepared, or one that starts when it is needed."""
    return _spare.pop() if _spare else Stem()


@atexit.register
def _discard() -> None:
    with contextlib.suppress(IndexError):
        _spare.pop().close()
