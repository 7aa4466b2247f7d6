"""Synthetic federations, one file for each kind, each with `write(folder, cases, size, seed)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from consilium.data.new_folder import new_folder
from consilium.data.phantoms import abdomen, digits, prostate, retina
from consilium.errors import StudyError
from consilium.extensions import is_code, load
from consilium.fields import nearest

PHANTOMS: dict[str, Callable[[Path, int | None, int | None, int], None]] = {
    "retina": retina.write,
    "prostate": prostate.write,
    "abdomen": abdomen.write,
    "digits": digits.write,
}


def write_phantom(
    kind: str,
    folder: Path,
    cases: int | None = None,
    size: int | None = None,
    seed: int = 0,
    sites: int | None = None,
    division: int | None = None,
    unlabelled: int = 0,
    alike: float = 0.0,
    tests: int = 0,
) -> None:
    """Writes a synthetic federation, whole or not at all; `None` is the kind's own default.

    `kind` may be a user's own function, "file.py:name", called with (folder, cases, size, seed).

    `sites`: how many, of digits. `division`: who annotates which organ, of the abdomen; `unlabelled`: how many more
    training cases without a mask; `tests`: how many test cases, whatever `cases` gives. `alike`: of the retina, the
    share of a site's patients behind its partner's camera.
    """
    if is_code(kind):
        if any((sites, division, unlabelled, alike)):
            raise StudyError("--sites, --division, --unlabelled and --alike are for the project's own phantoms.")
        own = load(str(Path(kind).resolve()) if ".py:" in kind else kind, "phantom")
        with new_folder(folder) as partly:
            own(partly, cases, size, seed)
        return
    if kind not in PHANTOMS:
        raise StudyError(f"there is no phantom '{kind}'; {nearest(kind, PHANTOMS)}")
    if sites is not None and kind != "digits":
        raise StudyError(f"the {kind} phantom has sites of its own; --sites is for digits.")
    if division is not None and kind != "abdomen":
        raise StudyError(f"--division says who annotates which organ of the abdomen; leave it out for {kind}.")
    if unlabelled and kind != "abdomen":
        raise StudyError(f"cases without a mask are drawn of the abdomen only; leave out --unlabelled for {kind}.")
    if tests and kind != "abdomen":
        raise StudyError(f"the number of test cases is set for the abdomen only; give {kind} more cases.")
    if alike and kind != "retina":
        raise StudyError(f"sites that share cameras are drawn of the retina only; leave out --alike for {kind}.")
    write = PHANTOMS[kind]
    if alike:
        write = partial(retina.write, alike=alike)
    if sites is not None:
        write = partial(digits.write, sites=sites)
    if kind == "abdomen":
        write = partial(abdomen.write, division=1 if division is None else division, unlabelled=unlabelled, tests=tests)
    with new_folder(folder) as partly:
        write(partly, cases, size, seed)
