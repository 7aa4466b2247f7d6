"""Writes what an importer found as a federation of site folders, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import ImageError, NiftiGeometry, suffix_of
from consilium.data.images import ImageArray, holds_dicom
from consilium.data.importers.continuing import WrittenCases
from consilium.data.importers.crops import CropAround
from consilium.data.importers.found import Found, RawCase, listed
from consilium.data.importers.reading import MAJORITY, read_case
from consilium.data.mask_files import write_mask
from consilium.data.new_folder import new_folder
from consilium.data.orientation import affine_of
from consilium.data.site_folder import SITE_NAME, Case, Federation, inside_of, read_federation, refuse, survey
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.data.splits import draw_splits
from consilium.errors import DataError, StudyError
from consilium.fields import nearest
from consilium.wording import counted

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Writing:
    """How a found dataset is written."""

    seed: int = 0  # of the drawn splits
    split: tuple[float, float, float] | str = ""  # shares, or "published"; "": as the importer says
    rater: str = MAJORITY  # or the name of one of several raters
    reference: bool = False  # images stay where they are and site.toml names their root
    yes: bool = False  # doubtful cases are left out instead of stopping the import
    crop: str = ""  # a label: pictures are cut around it


@dataclass(frozen=True)
class Imported:
    """A federation that was written, and what happened on the way, in sentences."""

    federation: Federation
    said: tuple[str, ...]


def write_found(
    parts: Sequence[Found], to: Path, how: Writing, command: str, progress: Callable[[int, int], None] | None = None
) -> Imported:
    """Reads every case of one or several datasets, judges it and writes it; one thread per core works on a case.

    `command` is a digest of the sources and options: only what a stopped import of the same wrote is taken over.
    On doubt nothing is written unless someone said yes. All parts have labels, dimensions and channels of the first.
    """
    head = parts[0]
    for site in sorted({case.site for found in parts for case in found.cases}):
        if not SITE_NAME.fullmatch(site):
            raise StudyError(f"the site's name {site!r} cannot be used; write letters of a-z, digits, '-', '_' or '.'.")
    if how.reference and any(found.root is None for found in parts):
        raise StudyError("--reference: this dataset cannot stay where it is; leave --reference out.")
    crop = CropAround(_values(how.crop, head)) if how.crop else None
    sound, doubts = _sound_names(parts)
    sound, divided = _whole_patients(sound, how)
    doubts = [doubt for found in parts for doubt in found.doubts] + doubts + divided
    total = sum(len(found.cases) for found in parts)
    _refuse(doubts, sound, total, how, ", as far as they can be read: none was opened yet")
    notes: list[str] = []
    kept: dict[str, list[Case]] = defaultdict(list)
    with new_folder(to, command) as folder:
        before = WrittenCases(folder, (replace(how, yes=False), crop))
        there = [before.find(*pair) for pair in sound]
        written = _in_parallel(
            lambda pair: pair[1] or _attempt(*pair[0], folder, how, crop), list(zip(sound, there, strict=True))
        )
        for done, ((case, found), old, (row, said)) in enumerate(zip(sound, there, written, strict=True), start=1):
            if row is None:
                doubts += said
            else:
                kept[case.site].append(row)
                notes += said
                if old is None:
                    before.add(case, found, row, said)
            if progress is not None:
                progress(done, len(sound))
        _refuse(doubts, [case for site in kept.values() for case in site], total, how)
        before.keep_only(row for rows in kept.values() for row in rows)
        write_federation_toml(folder, head.task, head.labels, head.dimensions, head.channels, head.contains or None)
        for site, rows in sorted(kept.items()):
            found = next(found for case, found in sound if case.site == site)
            root = found.root.resolve() if how.reference and found.root is not None else None
            write_site(folder, site, rows, found.annotated.get(site, ()), found.source, found.licence, root)
        refuse(survey(folder).faults, f"the tables for {to}")  # a table with a fault must not appear at all
        if any(not case.split for site in kept.values() for case in site):
            draw_splits(folder, how.split if isinstance(how.split, tuple) else head.shares, how.seed)
        before.close()  # as the last: until here Ctrl-C keeps the cases
    left = [line for found in parts for line in found.left_out]
    said = [f"left out: {line}" for line in (*left, *doubts)] + [f"rater left out: {note}" for note in notes]
    return Imported(read_federation(to), (*_paired(kept, sound), *said))


def _paired(kept: Mapping[str, Sequence[Case]], sound: Sequence[tuple[RawCase, Found]]) -> list[str]:
    """What was paired at each site, with the first pair as an example: a wrong pattern shows in it."""
    lines = []
    for site, rows in sorted(kept.items()):
        names = {row.name for row in rows}
        raw = [(case, found) for case, found in sound if case.site == site and case.name in names]
        pairs = [(case, found) for case, found in raw if case.raters or case.label]
        if pairs:
            first, found = pairs[0]
            drawn = [found.relative(layer.path) for layers in first.raters.values() for layer in layers]
            some = ", ".join(drawn[:2]) + (f" and {len(drawn) - 2} more" if len(drawn) > 2 else "")
            what = "masks" if drawn else "classes"
            example = f"{found.relative(first.images[0])} with {some or first.label}"
            lines.append(f"{site}: paired {counted(len(pairs), 'image')} with their {what}, such as {example}")
        if len(pairs) < len(rows):
            lines.append(f"{site}: took {counted(len(rows) - len(pairs), 'image')} without masks")
    return lines


def _refuse(doubts: Sequence[str], cases: Sequence[object], total: int, how: Writing, but: str = "") -> None:
    """Stops at doubts that nobody has looked at, and where no case is left; `but` ends the sentence."""
    if not cases:
        none = "the only case cannot" if total == 1 else f"none of the {total} cases can"
        raise DataError(f"{none} be used, so nothing was written.{listed(doubts)}")
    if doubts and not how.yes:
        count = f"{len(doubts)} doubts" if len(doubts) > 1 else "One doubt"
        others = f"{counted(len(cases), 'other case')}{but}.{listed(doubts)}"
        raise DataError(f"{count}, so nothing was written; look, then add --yes to import the {others}")


def _values(label: str, found: Found) -> list[int]:
    if found.task != "segmentation" or label not in found.labels:
        raise StudyError(f"--crop {label}: this is not a label; {nearest(label, found.labels)}")
    return [1 + found.labels.index(name) for name in (label, *inside_of(label, found.contains))]


def _sound_names(parts: Sequence[Found]) -> tuple[list[tuple[RawCase, Found]], list[str]]:
    """The cases whose names can be names of files and are used once, in order."""
    pairs = [(case, found) for found in parts for case in found.cases]
    pairs.sort(key=lambda pair: (pair[0].site, pair[0].name))
    often = Counter((case.site, case.name) for case, _ in pairs)
    sound, doubts = [], []
    for case, found in pairs:
        if often[case.site, case.name] > 1:
            doubts.append(f"{case.images[0]}: {often[case.site, case.name]} images are called {case.name!r}.")
        elif not case.name or not case.name.isprintable() or "/" in case.name or "\\" in case.name:
            doubts.append(f"{case.images[0]}: the case name {case.name!r} cannot name a file.")
        else:
            sound.append((case, found))
    return sound, doubts


def _whole_patients(
    pairs: Sequence[tuple[RawCase, Found]], how: Writing
) -> tuple[list[tuple[RawCase, Found]], list[str]]:
    """The cases of patients whom the source does not divide among splits, where its splits are used."""
    splits: dict[tuple[str, str], set[str]] = defaultdict(set)
    for case, found in pairs:
        if split := _split(case, found, how):
            splits[case.site, case.patient].add(split)
    whole, doubts = [], []
    for case, found in pairs:
        if len(several := sorted(splits[case.site, case.patient])) > 1:
            doubts.append(
                f"{case.images[0]}: its patient {case.patient!r} is in several splits, "
                f"{' and '.join(several)}; keep a patient in one."
            )
        else:
            whole.append((case, found))
    return whole, doubts


def _split(case: RawCase, found: Found, how: Writing) -> str:
    """As the source has it, or "" where it is drawn; an image without a mask is of use in training only."""
    if found.task == "segmentation" and not case.raters:
        return "train"
    drawn = isinstance(how.split, tuple) or not (how.split or found.published_splits)
    return "" if drawn else case.split


def _in_parallel(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """The results in the order of the items; decoders and packers release Python's lock, so threads are enough."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further case is begun


def _attempt(
    case: RawCase, found: Found, folder: Path, how: Writing, crop: CropAround | None
) -> tuple[Case | None, list[str]]:
    """A row of the table and notes, or None and why the case is in doubt."""
    notes: list[str] = []
    try:
        return _write_case(case, found, folder / case.site, how, crop, notes), notes
    except ImageError as error:
        return None, [str(error)]


def _write_case(
    case: RawCase, found: Found, place: Path, how: Writing, crop: CropAround | None, notes: list[str]
) -> Case:
    try:
        read = read_case(case, found, how.rater)
    except ImageError:
        raise
    except DataError as error:
        raise ImageError(case.images[0], str(error)) from None
    notes += read.notes
    if crop is not None:
        read = crop(read)
    source = case.images[0]
    if how.reference:
        if not read.as_stored:
            raise ImageError(source, "is changed by the import, so it cannot stay where it is; leave --reference out.")
        image = source.resolve()
    elif read.as_stored and not holds_dicom(source) and suffix_of(source) != ".mhd":
        image = place / "images" / f"{case.name}{suffix_of(source)}"
        image.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, image)  # not its rights: a source may be read-only
    else:
        image = write_image(read.image, place / "images" / case.name)
    label: Path | str | None = case.label or None
    if read.mask is not None:
        label = write_mask(read.mask, replace(read.image, origin_file=image), place / "labels" / case.name)
    return Case(case.name, case.patient, _split(case, found, how), image, label)


def write_image(image: ImageArray, path: Path) -> Path:
    """An image (channels, *spatial) as png, nii.gz or npy, whichever keeps its values; `path` has no suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = _storable(image.array)
    if image.geometry is not None and len(image.spacing) == 3:
        return _write_nifti(array, image, path.with_name(f"{path.name}.nii.gz"))
    if array.ndim == 3 and (len(array), array.dtype.name) in ((1, "uint8"), (3, "uint8"), (1, "uint16")):
        from PIL import Image

        target = path.with_name(f"{path.name}.png")
        pixels = array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)
        Image.fromarray(np.ascontiguousarray(pixels)).save(target)
        return target
    target = path.with_name(f"{path.name}.npy")
    np.save(target, array)
    return target


def _write_nifti(array: NDArray[Any], image: ImageArray, target: Path) -> Path:
    """No header of a DICOM file, and so no person's name, comes with it."""
    import nibabel

    affine = image.geometry.affine if isinstance(image.geometry, NiftiGeometry) else affine_of(image.geometry)
    stored = array.T if len(array) > 1 else array[0].T
    made = nibabel.Nifti1Image(stored, affine, dtype=stored.dtype)
    if isinstance(image.geometry, NiftiGeometry):  # what the file said about its place, also that it said nothing
        made.header["sform_code"] = image.geometry.header["sform_code"]
        made.header["qform_code"] = image.geometry.header["qform_code"]
    made.header.set_xyzt_units("mm")
    nibabel.save(made, target)
    return target


def _storable(array: NDArray[Any]) -> NDArray[Any]:
    """Types that the formats know and that hold the values."""
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    if array.dtype == np.float64 or array.dtype == np.float16:
        return array.astype(np.float32)
    if array.dtype.itemsize == 8:
        smaller = np.int32 if np.abs(array).max(initial=0) < 2**31 else np.float32
        return array.astype(smaller)
    return array
