"""A folder that is written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from consilium.errors import DataError


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `to` when all went well; `to` must be new or empty."""
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(f"{to} exists and is not empty; name a new or empty folder with --to.")
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had our number
    try:
        partial.mkdir()
        yield partial
        partial.rename(to)
    except BaseException:  # also Ctrl-C: nothing half made is left
        shutil.rmtree(partial, ignore_errors=True)
        raise
