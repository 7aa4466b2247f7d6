"""Published datasets and people's own folders become site folders; each importer is a folder of the same files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from consilium.data.importers.bids import importer as bids
from consilium.data.importers.cifar10 import importer as cifar10
from consilium.data.importers.federations import DATASETS, FEDERATIONS, Finder, find_federation
from consilium.data.importers.folder import importer as folder
from consilium.data.importers.layouts import need_cases
from consilium.data.importers.medmnist import importer as medmnist
from consilium.data.importers.mednist import importer as mednist
from consilium.data.importers.mnist import importer as mnist
from consilium.data.importers.nnunet import importer as nnunet
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.published import Published
from consilium.data.importers.writing import Imported, Writing, write_found
from consilium.data.new_folder import new_folder
from consilium.data.site_folder import SITE_NAME, Case, Federation, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.data.splits import VALID, set_aside
from consilium.errors import StudyError
from consilium.fields import nearest

STACKS: dict[str, Callable[[Sequence[Path]], Published]] = {
    "mnist": mnist.read,
    "cifar10": cifar10.read,
    "medmnist": medmnist.read,
    "mednist": mednist.read,
}
FINDERS: dict[str, Finder] = {"folder": folder.find, "nnunet": nnunet.find, "bids": bids.find, **DATASETS}
OPTIONS = {"folder": folder.OPTIONS, "nnunet": nnunet.OPTIONS, "bids": bids.OPTIONS}
Progress = Callable[[int, int], None]  # how many cases are done, of how many
PAPER_OPTIONS = ("site", "all")
TEST = 0.2  # of every class, where test cases are drawn (APPLE, appendix B.4)


def names() -> list[str]:
    """Every importer."""
    return [*FINDERS, *FEDERATIONS, *STACKS]


def import_found(
    name: str,
    sources: Sequence[Path],
    to: Path,
    options: ImportOptions | None = None,
    how: Writing | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Finds, reads and writes a dataset of single files, whole or not at all; `options.site` names its only site."""
    if name not in FINDERS:
        raise StudyError(f"there is no importer {name!r}; {nearest(name, names())}")
    options, how = options or ImportOptions(), how or Writing()
    options.refuse_others(name, OPTIONS.get(name, PAPER_OPTIONS))
    found = FINDERS[name](sources, options)
    need_cases(name, found, sources[0])
    sites = {case.site for case in found.cases}
    if options.site and name not in OPTIONS and len(sites) > 1:
        raise StudyError(f"--site {options.site}: {name} has the sites {', '.join(sorted(sites))}; leave --site out.")
    if options.site and len(sites) == 1:
        found = replace(found, cases=tuple(replace(case, site=options.site) for case in found.cases))
    return write_found([found], to, how, _digest(name, sources, options, how), progress)


def import_federation(
    name: str,
    folders: Mapping[str, Path],
    to: Path,
    options: ImportOptions | None = None,
    how: Writing | None = None,
    progress: Progress | None = None,
) -> Imported:
    """A paper's federation, one of FEDERATIONS, from the folders of its sources, whole or not at all."""
    options, how = options or ImportOptions(), how or Writing()
    options.refuse_others(name, ("all",))
    command = _digest(name, [part for pair in sorted(folders.items()) for part in pair], options, how)
    return write_found(find_federation(name, folders, options), to, how, command, progress)


def _digest(name: str, sources: Sequence[Path | str], options: ImportOptions, how: Writing) -> str:
    """Of a command; `--yes` may be added to it later."""
    places = [source if isinstance(source, str) else str(source.resolve()) for source in sources]
    options = replace(options, table=options.table and options.table.resolve())
    return hashlib.sha256(repr([name, places, options, replace(how, yes=False)]).encode()).hexdigest()[:32]


def import_dataset(name: str, sources: Sequence[Path], to: Path, site: str | None = None, seed: int = 0) -> Federation:
    """Writes a federation of one site with the pictures of a published dataset, whole or not at all."""
    if name not in STACKS:
        raise StudyError(f"there is no importer {name!r}; {nearest(name, names())}")
    site = name if site is None else site
    if not SITE_NAME.fullmatch(site):
        raise StudyError(f"--site {site!r}: write letters, digits, '-', '_' or '.', a letter or digit first.")
    with new_folder(to) as folder:
        found = STACKS[name](sources)
        (folder / site / "images").mkdir(parents=True)
        np.save(folder / site / "images" / f"{_stem(found)}.npy", found.train.images)
        if found.test is not None:
            np.save(folder / site / "images" / "test.npy", found.test.images)
        write_federation_toml(folder, "classification", found.classes, 2, 3 if found.train.images.ndim == 4 else 1)
        write_site(folder, site, _cases(found, site, seed), source=found.source, licence=found.licence)
    return read_federation(to)


def _stem(found: Published) -> str:
    return "all" if found.test is None else "train"


def _cases(found: Published, site: str, seed: int) -> Iterator[Case]:
    """Identical pictures are one patient, so that none is trained and tested on; 15 % of the training ones validate."""
    stem = _stem(found)
    first: dict[bytes, int] = {}
    twins = [first.setdefault(picture.tobytes(), i) for i, picture in enumerate(found.train.images)]
    patients = [f"{stem}-{i:06d}" for i in twins]
    test: set[str] = set()
    if found.test is None:
        for number in range(len(found.classes)):
            own = {patient for patient, i in zip(patients, twins) if found.train.labels[i] == number}
            test |= set_aside(own, TEST, seed, f"{site} test")
    valid = set_aside(set(patients) - test, VALID, seed, site)
    for i, (patient, label) in enumerate(zip(patients, found.train.labels)):
        split = "test" if patient in test else "valid" if patient in valid else "train"
        yield Case(f"{stem}-{i:06d}", patient, split, Path(f"images/{stem}.npy#{i}"), found.classes[label])
    for i, label in enumerate(found.test.labels if found.test else ()):
        yield Case(f"test-{i:06d}", f"test-{i:06d}", "test", Path(f"images/test.npy#{i}"), found.classes[label])
