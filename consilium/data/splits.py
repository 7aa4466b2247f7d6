"""Draws train, valid and test where a table leaves the split empty."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from consilium.data.case_table import read_table
from consilium.data.check import counts
from consilium.data.site_folder import SPLITS, SiteFolder, read_federation
from consilium.data.site_writing import write_table
from consilium.errors import DataError

VALID = 0.15  # of a site's training patients, where a published dataset has no validation cases


def draw_splits(
    federation_folder: Path, shares: tuple[float, float, float], seed: int
) -> Mapping[str, Mapping[str, int]]:
    """Fills the empty splits of every site's table, patient by patient, and returns the cases per site and split.

    What is already assigned stays. A new case of a known patient joins that patient's split; every other patient goes
    where the site's patients so far fall furthest short of the shares (train, valid, test). Patients with a case that
    has no mask are for training; those with no other case are not counted in the shares.
    """
    if len(shares) != 3 or not all(share >= 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise DataError(f"the shares {shares} are not train,valid,test that add up to 1; try 0.5,0.25,0.25.")
    federation = read_federation(Path(federation_folder))
    for site in federation.sites.values():
        if any(not case.split for case in site.cases):
            _write(site, _assign(site, shares, seed))
    return counts(read_federation(Path(federation_folder)))


def _assign(site: SiteFolder, shares: tuple[float, float, float], seed: int) -> dict[str, str]:
    """The split of every patient of a site."""
    split_of = {case.patient: case.split for case in site.cases if case.split}
    bare = {case.patient for case in site.cases if case.label is None}
    for patient in sorted(bare):
        if split_of.setdefault(patient, "train") != "train":
            raise DataError(
                f"{site.folder.name}/cases.csv: patient {patient!r} is in {split_of[patient]} and has a case without a "
                "mask, which is of use in training only; take it out, or write train for the patient's other cases."
            )
    drawn = {case.patient for case in site.cases if case.label is not None}
    new = drawn - split_of.keys()
    wanted = {split: share * len(drawn) for split, share in zip(SPLITS, shares, strict=True)}
    got = Counter(split for patient, split in split_of.items() if patient in drawn)
    for patient in _shuffled(new, seed, site.name):
        split = max(SPLITS, key=lambda split: wanted[split] - got[split])
        split_of[patient] = split
        got[split] += 1
    return split_of


def set_aside(patients: Iterable[str], share: float, seed: int, site: str) -> frozenset[str]:
    """A random share of a site's patients, rounded, and at least one of two or more."""
    names = _shuffled(patients, seed, site)
    return frozenset(names[: max(round(share * len(names)), int(len(names) > 1))])


def _shuffled(patients: Iterable[str], seed: int, site: str) -> list[str]:
    """A hash orders the patients: the draw depends neither on the table's order nor on a library's generator."""
    return sorted(patients, key=lambda name: hashlib.sha256(f"{seed}\n{site}\n{name}".encode()).digest())


def _write(site: SiteFolder, split_of: Mapping[str, str]) -> None:
    path = site.folder / "cases.csv"
    table = read_table(path)
    rows = tuple({**row, "split": row["split"] or split_of[row["patient"]]} for row in table.rows)
    write_table(path, replace(table, rows=rows))
