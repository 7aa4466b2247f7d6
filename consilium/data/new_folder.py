"""A folder that is written whole or not at all.

.<name>.<process>.partial/    beside it until it is whole; .<name>.<process>-<n>.partial where that name is taken
    .owner.json    the computer that writes it, and the command if it can go on after it was stopped
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consilium.errors import DataError
from consilium.files import write_json

OWNER = ".owner.json"


@contextmanager
def new_folder(to: Path, command: str = "") -> Iterator[Path]:
    """A folder to write into, which becomes `to` when all went well; `to` must be new or empty.

    With a digest of the `command` what the same one wrote on this computer before it was stopped is taken over, and
    Ctrl-C leaves it for the next.
    """
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(f"{to} exists and is not empty; name a new or empty folder with --to.")
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = _made(to)
    try:
        if not _taken_over(partial, to, command):
            write_json({"host": platform.node(), "command": command}, partial / OWNER, durable=False)
        yield partial
        (partial / OWNER).unlink(missing_ok=True)
        partial.rename(to)
    except Exception:  # nothing half made is left
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except BaseException:  # Ctrl-C, also as the command's own exception, or the end of the process
        if not command or _owner(partial)[1] != command:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _made(to: Path, n: int = 0) -> Path:
    """An empty folder of ours; another computer that shares the disk may have a process of our number."""
    partial = to.with_name(f".{to.name}.{os.getpid()}{f'-{n}' if n else ''}.partial")
    try:
        partial.mkdir()
    except FileExistsError:
        return _made(to, n + 1)
    return partial


def _taken_over(partial: Path, to: Path, command: str) -> bool:
    """Whether the empty folder now holds what our command wrote; what other commands left here is removed.

    A folder is renamed before it is looked into, so of two processes that want it one gets it.
    """
    pattern = re.compile(rf"\.{re.escape(to.name)}\.(\d+)(-\d+)?\.partial")
    for left in sorted(to.parent.iterdir()):
        found = pattern.fullmatch(left.name)
        if found is None or left == partial or _runs(int(found[1])) or _owner(left)[0] != platform.node():
            continue
        try:
            left.rename(partial)
        except OSError:
            continue  # another process was faster
        if command and _owner(partial)[1] == command:
            return True
        shutil.rmtree(partial)
        partial.mkdir()
    return False


def _owner(folder: Path) -> tuple[str, str]:
    """The computer and the command that a folder is of; empty where it does not say."""
    try:
        told = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return str(told["host"]), str(told["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def _runs(process: int) -> bool:
    """Whether another process of this number runs here; what has ours is of an earlier try, or of one long gone."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return True  # no number of a process: nobody's
    except OSError:
        return True  # somebody else's
    return True
