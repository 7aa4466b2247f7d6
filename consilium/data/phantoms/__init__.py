"""Synthetic federations, one file for each kind, each with `write(folder, cases, size, seed)`."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from consilium.data.phantoms import abdomen, prostate, retina
from consilium.errors import DataError, StudyError

PHANTOMS: dict[str, Callable[[Path, int | None, int | None, int], None]] = {
    "retina": retina.write,
    "prostate": prostate.write,
    "abdomen": abdomen.write,
}


def write_phantom(
    kind: str,
    folder: Path,
    cases: int | None = None,
    size: int | None = None,
    seed: int = 0,
    division: int | None = None,
) -> None:
    """Writes a synthetic federation, whole or not at all; `None` is the kind's own default.

    `division`: who annotates which organ, of the abdomen.
    """
    if kind not in PHANTOMS:
        near = difflib.get_close_matches(kind, PHANTOMS, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise StudyError(f"there is no phantom '{kind}'; {hint}There are: {', '.join(PHANTOMS)}.")
    write = PHANTOMS[kind]
    if division is not None:
        if kind != "abdomen":
            raise StudyError(f"--division says who annotates which organ of the abdomen; leave it out for {kind}.")
        write = partial(abdomen.write, division=division)
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not empty; name a new or empty folder with --to.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process that had our number
    try:
        unfinished.mkdir()
        write(unfinished, cases, size, seed)
        unfinished.rename(folder)
    except BaseException:  # also Ctrl-C: nothing half made is left
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
