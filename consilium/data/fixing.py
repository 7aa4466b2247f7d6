"""A copy of a federation with what can be mended safely, and without what cannot; the original is never touched.

Mended: masks of one label drawn as 255, grey pictures saved as colour, DICOM headers that name a person. Left out:
broken cases, and training cases whose image is also in a test or validation split, value by value.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from consilium.data.case_table import read_table
from consilium.data.check import CheckResult, check
from consilium.data.dicom_names import personal_elements, write_without_names
from consilium.data.formats import PILLOW_SUFFIXES, ImageError, suffix_of
from consilium.data.images import ImageArray, files_of, read_image, read_mask
from consilium.data.mask_files import write_mask, write_pillow
from consilium.data.new_folder import new_folder
from consilium.data.site_folder import Case, Fault, Federation, SiteFolder, refuse, survey
from consilium.data.site_writing import write_table
from consilium.errors import DataError
from consilium.wording import command

Mend = Callable[[Path], None]  # writes the mended file


def fix(folder: Path, to: Path) -> list[str]:
    """Copy a federation, and say each case that was mended or left out."""
    folder, to = Path(folder), Path(to)
    if to.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(to.resolve()):
        raise DataError(f"{to} and {folder} lie inside each other; give --to another folder.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(f"{to} exists already; give --to a folder that is empty or new.")
    tables = survey(folder)
    common = [fault for fault in tables.faults if not fault.site or fault.file.endswith("site.toml")]
    refuse(common, f"{folder}, which cannot be mended by leaving cases out")
    federation = tables.federation
    assert federation is not None  # without it there is a common fault
    found = check(folder)
    said = [f"left out: {fault}" for fault in tables.faults]
    mends: dict[Path, Mend] = {}
    sound = []
    for site in federation.sites.values():
        good = tuple(_sound(federation, site, found, mends, said))
        if good:
            sound.append(replace(site, cases=good))
        else:
            said.append(f"left out: site {site.name!r}, which has no sound case.")
    if not sound:
        raise DataError(f"{folder} has no sound case; run {command('check', folder)} and correct the files.")
    with new_folder(to) as new:
        shutil.copy2(federation.folder / "federation.toml", new)
        for site in sound:
            _copy_site(site, new / site.folder.name, mends)
    return said


def _sound(
    federation: Federation, site: SiteFolder, found: CheckResult, mends: dict[Path, Mend], said: list[str]
) -> Iterator[Case]:
    """The cases to copy; how their files are mended goes into `mends`, and all that was done into `said`."""
    faults: dict[str, list[Fault]] = {}
    for fault in found.faults:
        if fault.site == site.name and not fault.file.endswith("cases.csv"):
            faults.setdefault(fault.case, []).append(fault)
    copies = {f.case: f for f in found.errors if f.site == site.name and f.kind == "copy"}
    named = {f.case for f in found.findings if f.site == site.name and f.kind == "names a person"}
    for case in site.cases:
        if case.name in faults:
            changes = {file: how for file, how in _mends(federation, case).items() if file.is_relative_to(site.folder)}
            if len(changes) < len(faults[case.name]):
                said += [f"left out: {fault}" for fault in faults[case.name]]
                continue
            mends.update(changes)
            said += [f"mended: {fault}" for fault in faults[case.name]]
        if case.name in copies and case.split == "train":
            said.append(f"left out: {copies[case.name]}")
            continue
        header = f"the DICOM header of case {case.name!r} of site {site.name!r}"
        if case.name in named and not case.image.is_relative_to(site.folder):
            said.append(f"not mended: {header}: the file stays under its root.")
        elif case.name in named:
            files = [file for file in files_of(case.image) if personal_elements(file)]
            mends.update({file: _unnamed(file) for file in files})
            said.append(f"mended: {header} names no person now.")
        yield case


def _mends(federation: Federation, case: Case) -> dict[Path, Mend]:
    """What makes a broken case sound without a guess; {} where nothing does."""
    changes: dict[Path, Mend] = {}
    try:
        if federation.channels == 1 and suffix_of(case.image) in PILLOW_SUFFIXES and federation.dimensions == 2:
            colour = read_image(case.image, 2, 3).array
            if colour.dtype == np.uint8 and (colour == colour[:1]).all():
                changes[case.image] = lambda target: write_pillow(colour[0], target)
    except ImageError:
        pass
    if isinstance(case.label, Path) and len(federation.labels) == 1:
        try:
            mask = read_mask(case.label, federation.dimensions)
        except ImageError:
            return changes
        if set(np.unique(mask.array).tolist()) == {0, 255}:
            changes[case.label] = _ones(mask)
    return changes


def _ones(mask: ImageArray) -> Mend:
    def write(target: Path) -> None:
        written = write_mask((mask.array > 0).astype(np.uint8), mask, target)
        if written != target:
            written.rename(target)

    return write


def _unnamed(file: Path) -> Mend:
    return lambda target: write_without_names(file, target)


def _copy_site(site: SiteFolder, to: Path, mends: dict[Path, Mend]) -> None:
    to.mkdir()
    shutil.copy2(site.folder / "site.toml", to)
    table = read_table(site.folder / "cases.csv")
    first = {row["case"]: row for row in reversed(table.rows)}  # a repeated name was a fault of the later rows
    write_table(to / "cases.csv", replace(table, rows=tuple(first[case.name] for case in site.cases)))
    for case in site.cases:
        for path in (case.image, case.label):
            for part in files_of(path) if isinstance(path, Path) else ():
                if not part.is_relative_to(site.folder):
                    continue  # it lies under the root that site.toml names, and stays there
                target = to / part.relative_to(site.folder)
                if target.exists():  # a stack holds many cases; its order is kept, so broken ones stay inside
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                if part in mends:
                    mends[part](target)
                else:
                    shutil.copy2(part, target)
