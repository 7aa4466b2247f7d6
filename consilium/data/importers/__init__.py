"""Published datasets, each in its own layout, become a site folder: one file for each, with `read(sources)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from consilium.data.importers import cifar10, medmnist, mednist, mnist
from consilium.data.importers.published import Published
from consilium.data.new_folder import new_folder
from consilium.data.site_folder import (
    SITE_NAME,
    Case,
    Federation,
    read_federation,
    write_federation_toml,
    write_site,
)
from consilium.data.splits import VALID, set_aside
from consilium.errors import StudyError
from consilium.fields import nearest

IMPORTERS: dict[str, Callable[[Sequence[Path]], Published]] = {
    "mnist": mnist.read,
    "cifar10": cifar10.read,
    "medmnist": medmnist.read,
    "mednist": mednist.read,
}
TEST = 0.2  # of every class, where test cases are drawn (APPLE, appendix B.4)


def import_dataset(name: str, sources: Sequence[Path], to: Path, site: str | None = None, seed: int = 0) -> Federation:
    """Writes a federation of one site with the pictures of a published dataset, whole or not at all."""
    if name not in IMPORTERS:
        raise StudyError(f"there is no importer {name!r}; {nearest(name, IMPORTERS)}")
    site = name if site is None else site
    if not SITE_NAME.fullmatch(site):
        raise StudyError(f"--site {site!r}: write letters, digits, '-', '_' or '.', a letter or digit first.")
    with new_folder(to) as folder:
        found = IMPORTERS[name](sources)
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
