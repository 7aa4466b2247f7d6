"""Says what is wrong with a federation, in words: its tables, and every image and mask."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.case_table import read_table, write_table
from consilium.data.formats import ImageError, ItkGeometry, NiftiGeometry, stack_of
from consilium.data.images import Picture, files_of, orientation, read_image, read_mask
from consilium.data.new_folder import new_folder
from consilium.data.orientation import axes_to_same_grid, turned
from consilium.data.preprocess import shape_text
from consilium.data.site_folder import (
    SPLITS,
    Case,
    Fault,
    Federation,
    SiteFolder,
    refuse,
    survey,
)
from consilium.errors import DataError

__all__ = ["Examined", "Fault", "Finding", "blame", "check", "counts", "examine", "file_hash", "fix", "unlabelled"]


TWINS = 10  # notes about identical images; the rest are counted


@dataclass(frozen=True)
class Finding:
    """Everything that is wrong, what is legal but worth knowing, and the cases per site and split."""

    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    counts: Mapping[str, Mapping[str, int]]  # {"site": {"train": 4, "valid": 2, "test": 2, "empty": 0}}
    unlabelled: Mapping[str, int]  # of these, cases without a mask, where there are some


@dataclass(frozen=True)
class Examined:
    """A case as read; what could not be read is None and has a fault."""

    image: Picture | None
    mask: Picture | None
    values: tuple[int, ...]  # the values in the mask
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class _Facts:
    """What the notes need to remember of one sound case."""

    site: str
    case: Case
    digest: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    orientation: str
    values: tuple[int, ...]
    placed: bool  # image and mask say they lie at the same place


def check(folder: Path) -> Finding:
    """Every fault of the tables, of every image and of every mask, none hidden behind the first."""
    tables = survey(folder)
    federation = tables.federation
    if federation is None:
        return Finding(tables.faults, (), {}, {})
    faults = list(tables.faults)
    facts = []
    for site in federation.sites.values():
        for case in site.cases:
            seen = examine(federation, site.name, case.name, case.image, case.label)
            faults += seen.faults
            if not seen.faults:
                facts.append(_remember(site, case, seen))
    for row in tables.rejected:
        faults += examine(federation, row.site, row.name, row.image, row.label).faults
    return Finding(tuple(faults), tuple(_notes(federation, facts)), counts(federation), unlabelled(federation))


def counts(federation: Federation) -> dict[str, dict[str, int]]:
    """The number of cases per site and split; `empty` are those whose split is not drawn yet."""
    table = {}
    for site in federation.sites.values():
        number = Counter(case.split or "empty" for case in site.cases)
        table[site.name] = {split: number[split] for split in (*SPLITS, "empty")}
    return table


def unlabelled(federation: Federation) -> dict[str, int]:
    """The number of cases without a mask, of the sites that have such."""
    number = {name: sum(case.label is None for case in site.cases) for name, site in federation.sites.items()}
    return {name: n for name, n in number.items() if n}


def blame(federation: Federation, site: str, case: str, file: Path, sentence: str) -> Fault:
    """A fault of one file of a case."""
    inside = file.relative_to(federation.folder) if file.is_relative_to(federation.folder) else file
    return Fault(site, case, inside.as_posix(), sentence)


def examine(
    federation: Federation,
    site: str,
    case: str,
    image_file: Path | None,
    label: Path | str | None,
    orient: bool = True,
) -> Examined:
    """Reads a case's image and mask, where given, and compares them with each other and with the labels.

    `orient`: a mask stored in another orientation comes back in that of its image, if both headers then agree.
    """
    faults: list[Fault] = []
    image = mask = None
    values: tuple[int, ...] = ()
    if image_file is not None:
        try:
            image = read_image(image_file, federation.dimensions, federation.channels)
        except ImageError as error:
            faults.append(blame(federation, site, case, image_file, error.sentence))
    if isinstance(label, Path):
        try:
            mask = read_mask(label, federation.dimensions)
            mask = _oriented(mask, image) if orient and image is not None else mask
            values = _values(mask.array)
            sentences = _mask_faults(image, mask, values, federation.labels)
        except ImageError as error:
            sentences = [error.sentence]
        faults += [blame(federation, site, case, label, sentence) for sentence in sentences]
    return Examined(image, mask, values, tuple(faults))


def fix(folder: Path, to: Path) -> list[str]:
    """Copies a federation without its broken cases, and says each that was left out; the original is not touched."""
    folder, to = Path(folder), Path(to)
    if to.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(to.resolve()):
        raise DataError(f"{to} and {folder} lie inside each other; give --to another folder.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(f"{to} is already there; give --to a folder that is empty or new.")
    tables = survey(folder)
    federation = tables.federation
    common = [fault for fault in tables.faults if not fault.site or fault.file.endswith("site.toml")]
    refuse(common, f"{folder}, which cannot be mended by leaving cases out")
    assert federation is not None  # without it there is a common fault
    left_out = [f"left out: {fault}" for fault in tables.faults]
    sound = []
    for site in federation.sites.values():
        looks = {c: examine(federation, site.name, c.name, c.image, c.label).faults for c in site.cases}
        left_out += [f"left out: {fault}" for faults in looks.values() for fault in faults]
        good = tuple(case for case, faults in looks.items() if not faults)
        if good:
            sound.append(replace(site, cases=good))
        else:
            left_out.append(f"left out: site {site.name!r}, which has no sound case.")
    if not sound:
        raise DataError(f"{folder} has no sound case; run `consilium check {folder}` and correct the files.")
    _copy(federation, sound, to)
    return left_out


def file_hash(path: Path) -> str:
    """The content of a file, whatever its name; of an mhd, header and data."""
    total = hashlib.sha256()
    for part in files_of(path):
        with part.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _oriented(mask: Picture, image: Picture) -> Picture:
    axes = axes_to_same_grid(mask.geometry, image.geometry)
    if not axes:
        return mask
    return replace(mask, array=turned(mask.array, axes), spacing=image.spacing, geometry=image.geometry)


def _values(mask: NDArray[Any]) -> tuple[int, ...]:
    low, high = int(mask.min()), int(mask.max())
    if low >= 0 and high < 65536:  # counting is ten times faster than sorting
        return tuple(np.flatnonzero(np.bincount(mask.ravel().astype(np.int64))).tolist())
    return tuple(np.unique(mask).tolist())


def _mask_faults(image: Picture | None, mask: Picture, values: tuple[int, ...], labels: tuple[str, ...]) -> list[str]:
    sentences = []
    if strange := [value for value in values if not 0 <= value <= len(labels)]:
        sentences.append(_strange_values(strange, labels))
    if image is not None and image.array.shape[1:] != mask.array.shape:
        sizes = f"{shape_text(mask.array.shape)} but its image is {shape_text(image.array.shape[1:])}"
        sentences.append(f"is {sizes}; give the mask the image's size.")
    return sentences


def _strange_values(strange: list[int], labels: tuple[str, ...]) -> str:
    few = ", ".join(str(value) for value in strange[:8]) + (", …" if len(strange) > 8 else "")
    known = ", ".join(f"{value} {label}" for value, label in enumerate(("background", *labels)))
    hint = f" (write {len(labels)} instead of 255?)" if strange == [255] and len(labels) == 1 else ""
    return f"has the mask values {few}, which are not in labels ({known}); correct the mask{hint} or federation.toml."


def _remember(site: SiteFolder, case: Case, seen: Examined) -> _Facts:
    assert seen.image is not None
    return _Facts(
        site.name,
        case,
        _content(case.image, seen.image),
        seen.image.array.shape[1:],
        tuple(round(step, 3) for step in seen.image.spacing),
        orientation(seen.image),
        seen.values,
        seen.mask is None or _same_place(seen.image, seen.mask),
    )


def _content(path: Path, image: Picture) -> str:
    """What two images have in common that are the same; in a stack the file around them does not count."""
    if stack_of(path)[1] is None:
        return file_hash(path)
    return hashlib.sha256(f"{image.array.dtype}{image.array.shape}".encode() + image.array.tobytes()).hexdigest()


def _same_place(image: Picture, mask: Picture) -> bool:
    """Whether image and mask agree to a hundredth of a millimetre; True where one of them does not say."""
    one, two = image.geometry, mask.geometry
    if isinstance(one, NiftiGeometry) and isinstance(two, NiftiGeometry):
        return bool(np.allclose(one.affine, two.affine, rtol=0, atol=1e-2))
    if isinstance(one, ItkGeometry) and isinstance(two, ItkGeometry):
        parts = ((one.spacing, two.spacing), (one.origin, two.origin), (one.direction, two.direction))
        return all(len(a) == len(b) and np.allclose(a, b, rtol=0, atol=1e-2) for a, b in parts)
    return True


def _notes(federation: Federation, facts: list[_Facts]) -> list[str]:
    notes = []
    for site, number in counts(federation).items():
        if number["empty"]:
            waiting = _count(number["empty"], "case")
            notes.append(f"site {site!r} has {waiting} without a split; `consilium check --split` draws them.")
        else:
            notes += [f"site {site!r} has no {split} cases." for split in SPLITS if not number[split]]
    notes += [
        f"site {site!r} has {_count(n, 'case')} without a mask; methods with teachers learn from them, others do not."
        for site, n in unlabelled(federation).items()
    ]
    if federation.task == "segmentation":
        for folder in federation.sites.values():
            values = {value for fact in facts if fact.site == folder.name for value in fact.values}
            notes += _label_notes(federation, folder, values)
    else:
        for folder in federation.sites.values():
            notes += _class_notes(federation, folder)
    notes += _difference_notes(facts)
    notes += _twin_notes(facts)
    return notes


def _label_notes(federation: Federation, site: SiteFolder, values: set[int]) -> list[str]:
    notes = []
    for value, label in enumerate(federation.labels, start=1):
        if label in site.annotated and value not in values:
            notes.append(f"site {site.name!r} says it draws {label!r}, but none of its masks has the value {value}.")
        if label not in site.annotated and value in values:
            notes.append(f"site {site.name!r} has {label!r} in its masks, which site.toml does not list; it is hidden.")
    return notes


def _class_notes(federation: Federation, site: SiteFolder) -> list[str]:
    seen = {case.label for case in site.cases}
    missing = [label for label in federation.labels if label not in seen]
    untrained = {case.label for case in site.cases if case.split == "test"}
    untrained -= {case.label for case in site.cases if case.split != "test"}
    notes = [f"site {site.name!r} has no case of the class {_some(missing)}."] if missing else []
    if untrained:
        strange = [label for label in federation.labels if label in untrained]
        notes.append(f"site {site.name!r} tests the class {_some(strange)}, of which it has no case to train on.")
    return notes


def _difference_notes(facts: list[_Facts]) -> list[str]:
    notes = []
    shapes = sorted({fact.shape for fact in facts})
    if len(shapes) > 1:
        smallest, largest = (shape_text(pick) for pick in (np.min(shapes, axis=0), np.max(shapes, axis=0)))
        notes.append(
            f"images have {len(shapes)} sizes, from {smallest} to {largest}; a study may set [preprocess] size."
        )
    spacings = sorted({fact.spacing for fact in facts})
    if len(spacings) > 1:
        some = ", ".join(shape_text(spacing) for spacing in spacings[:4])
        notes.append(f"images have {len(spacings)} spacings ({some} mm, …); a study may set [preprocess] spacing.")
    turns = sorted({fact.orientation for fact in facts} - {""})
    if len(turns) > 1:
        notes.append(
            f"volumes are stored in {len(turns)} orientations ({', '.join(turns)}); a study brings them to one."
        )
    if turns and (unsaid := [f"{fact.site}/{fact.case.name}" for fact in facts if not fact.orientation]):
        notes.append(
            f"{_count(len(unsaid), 'volume')} whose file does not say its orientation: {_some(unsaid)}; it must be the "
            "study's."
        )
    if moved := [f"{fact.site}/{fact.case.name}" for fact in facts if not fact.placed]:
        notes.append(f"{_count(len(moved), 'mask')} in another place than the image, by its header: {_some(moved)}.")
    return notes


def _twin_notes(facts: list[_Facts]) -> list[str]:
    """Identical images in two splits or two sites: a test case that was trained on."""
    same: dict[str, list[_Facts]] = defaultdict(list)
    for fact in facts:
        same[fact.digest].append(fact)
    pairs: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group in same.values():  # one example of each place is enough: a picture may be there hundreds of times
        places = {(fact.site, fact.case.split or "empty"): fact.case.name for fact in reversed(group)}
        for (one, first), (two, second) in itertools.combinations(sorted(places.items()), 2):
            pairs[one + two].append(f"{first} = {second}")
    notes = [
        f"{_count(len(names), 'image')} of site {a!r} ({x}) also in site {b!r} ({y}): {_some(names)}."
        for (a, x, b, y), names in sorted(pairs.items())
    ]
    more = f"identical images in {len(notes) - TWINS} more pairs of sites and splits."
    return [*notes[:TWINS], more] if len(notes) > TWINS + 1 else notes


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _copy(federation: Federation, sites: list[SiteFolder], to: Path) -> None:
    with new_folder(to) as folder:
        shutil.copy2(federation.folder / "federation.toml", folder)
        for site in sites:
            _copy_site(site, folder / site.folder.name)


def _copy_site(site: SiteFolder, to: Path) -> None:
    to.mkdir()
    shutil.copy2(site.folder / "site.toml", to)
    table = read_table(site.folder / "cases.csv")
    first = {row["case"]: row for row in reversed(table.rows)}  # a repeated name was a fault of the later rows
    write_table(to / "cases.csv", replace(table, rows=tuple(first[case.name] for case in site.cases)))
    for case in site.cases:
        for path in (case.image, case.label):
            for part in files_of(path) if isinstance(path, Path) else ():
                target = to / part.relative_to(site.folder)
                if not target.exists():  # a stack holds many cases; its order is kept, so broken ones stay inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(part, target)
