"""The lock of a run folder: one process works on a run, and others see that it does."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consilium.errors import RunError
from consilium.wording import command

LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock a run for one process; the lock ends with the process that holds it."""
    with (run / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another process is working on {run}; wait for it or stop it.") from error
        yield


def at_work(run: Path) -> bool:
    """Whether a process works on a run: it holds the lock as long as it lives."""
    if not (run / LOCK).exists():
        return False
    with (run / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False


def way_on(run: Path) -> str:
    """What to do about a run that is not finished, as the end of a sentence."""
    if at_work(run):
        return f"another process is working on it: wait for it, or follow it with {command('watch', run)}"
    return f"continue it with {command('resume', run)}"
