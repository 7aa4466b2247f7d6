"""Synthetic federations, one file for each kind, each with `write(folder, cases, size, seed)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from consilium.data.new_folder import new_folder
from consilium.data.phantoms import digits, prostate, retina
from consilium.errors import StudyError
from consilium.fields import nearest

PHANTOMS: dict[str, Callable[[Path, int | None, int | None, int], None]] = {
    "retina": retina.write,
    "prostate": prostate.write,
    "digits": digits.write,
}


def write_phantom(
    kind: str,
    folder: Path,
    cases: int | None = None,
    size: int | None = None,
    seed: int = 0,
    sites: int | None = None,
) -> None:
    """Writes a synthetic federation, whole or not at all; `None` is the kind's own default."""
    if kind not in PHANTOMS:
        raise StudyError(f"there is no phantom '{kind}'; {nearest(kind, PHANTOMS)}")
    if sites is not None and kind != "digits":
        raise StudyError(f"the {kind} phantom has sites of its own; --sites is for digits.")
    write = PHANTOMS[kind] if sites is None else partial(digits.write, sites=sites)
    with new_folder(folder) as partly:
        write(partly, cases, size, seed)
