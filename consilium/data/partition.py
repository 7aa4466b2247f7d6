"""Cuts one site of a classification into a federation whose sites hold different classes.

The schemes of the APPLE paper, section 4.1, and the Dirichlet draw that later work uses. One matrix of shares cuts
training and test cases alike, so that a site is tested on what it trains on.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from consilium.data.apportion import apportion
from consilium.data.formats import stack_of
from consilium.data.images import files_of
from consilium.data.new_folder import new_folder
from consilium.data.site_folder import SPLITS, Case, Federation, SiteFolder, read_federation
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.data.splits import VALID, set_aside
from consilium.errors import DataError, StudyError
from consilium.fields import nearest
from consilium.randomness import numpy_generator
from consilium.wording import are, command, counted

SCHEMES = ("pathological", "practical", "dirichlet")
REDRAWS = 200  # of a Dirichlet draw that leaves a site without cases

Holdings = Mapping[str, Mapping[str, Mapping[str, int]]]  # site, class, split


@dataclass(frozen=True)
class Cut:
    """How to cut."""

    scheme: str  # "pathological" | "practical" | "dirichlet"
    sites: int
    seed: int = 0
    classes_per_site: int | None = None  # of "pathological"; None: the paper's 2
    alpha: float | None = None  # of "dirichlet": small is uneven; None: 0.5
    share: float = 1.0  # of the cases to keep
    test_share: float | None = None  # of the test cases; None: as `share`

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise StudyError(f"there is no scheme {self.scheme!r}; {nearest(self.scheme, SCHEMES)}")
        least = 3 if self.scheme == "practical" else 2  # 80 %, 10 % and the rest
        if self.sites < least:
            raise StudyError(f"--sites {self.sites}: a {self.scheme} partition needs {least} or more.")
        for name, value, scheme in (
            ("classes-per-site", self.classes_per_site, "pathological"),
            ("alpha", self.alpha, "dirichlet"),
        ):
            if value is not None and self.scheme != scheme:
                raise StudyError(f"--{name} is only for --scheme {scheme}; leave it out.")
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise StudyError(f"--{name} {value}: it must be above zero.")
        for name, value in (("share", self.share), ("test-share", self.kept("test"))):
            if not 0 < value <= 1:
                raise StudyError(f"--{name} {value}: it must be above 0 and at most 1.")

    def kept(self, part: str) -> float:
        """The share of the cases of "test" or "training" that is kept."""
        return self.test_share if part == "test" and self.test_share is not None else self.share


def partition(source: Path, to: Path, how: Cut) -> Federation:
    """Cuts a site folder (or a federation of one site) into a new federation, whole or not at all."""
    federation, site = _one_site(Path(source))
    parts = _dealt(federation, site, how)
    digits = len(str(how.sites))  # names of one length sort as numbers do
    with new_folder(to) as folder:
        write_federation_toml(folder, federation.task, federation.labels, federation.dimensions, federation.channels)
        for number, cases in enumerate(parts, start=1):
            name = f"site{number:0{digits}d}"
            moved = _move(site, _with_valid(cases, how.seed, name), folder / name)
            said = f"{how.scheme} part {number} of {how.sites}, seed {how.seed}"
            write_site(folder, name, moved, source=f"{site.source or site.name}; {said}", licence=site.licence)
    return read_federation(Path(to))


def holdings(federation: Federation) -> Holdings:
    """Cases of every site by class and split."""
    found = {}
    for site in federation.sites.values():
        count = Counter((str(case.label), case.split) for case in site.cases)
        found[site.name] = {label: {split: count[label, split] for split in SPLITS} for label in federation.labels}
    return found


def shares(how: Cut, classes: int, draw: int = 0) -> NDArray[np.float64]:
    """The matrix (sites, classes) of who gets how much of a class; a column adds up to 1, or 0 if no one holds it."""
    generator = numpy_generator(how.seed, "partition", how.scheme, draw)
    if how.scheme == "dirichlet":
        return generator.dirichlet([0.5 if how.alpha is None else how.alpha] * how.sites, classes).T
    if how.scheme == "practical":  # twelve sites: 80 %, 10 %, and ten times 1 %
        shards = np.array([0.8, 0.1, *[0.1 / (how.sites - 2)] * (how.sites - 2)])
        return np.stack([generator.permutation(shards) for _ in range(classes)], axis=1)
    held = np.zeros((how.sites, classes))
    for site, hand in enumerate(_hands(how, classes, generator)):
        held[site, hand] = 1 - generator.random(len(hand))  # never 0
    total = held.sum(axis=0)
    return np.asarray(held / np.where(total, total, 1))


def _hands(how: Cut, classes: int, generator: np.random.Generator) -> list[list[int]]:
    """Classes dealt like cards from shuffled decks, so that all are held before one is held often; no pair twice."""
    size = 2 if how.classes_per_site is None else how.classes_per_site
    if size > classes:
        raise StudyError(f"--classes-per-site {size}: there are only {classes} classes.")
    deck: list[int] = []
    hands = []
    for _ in range(how.sites):
        hand: list[int] = []
        while len(hand) < size:
            card = next((card for card in deck if card not in hand), None)
            if card is None:
                deck += generator.permutation(classes).tolist()
            else:
                deck.remove(card)
                hand.append(card)
        hands.append(hand)
    return hands


def _one_site(source: Path) -> tuple[Federation, SiteFolder]:
    if not source.is_dir():
        raise DataError(f"{source} is not a folder; give a site's folder, for instance one that `import` made.")
    source = source.resolve()
    whole = (source / "federation.toml").exists()
    if not whole and not (source.parent / "federation.toml").exists():
        raise DataError(f"{source} is not a site of a federation: there is no federation.toml in it or beside it.")
    federation = read_federation(source if whole else source.parent)
    if federation.task != "classification":
        raise DataError(f"{federation.folder} is a segmentation; a partition is by class, so it needs class names.")
    sites = [site for site in federation.sites.values() if whole or site.folder.resolve() == source]
    if len(sites) != 1:
        raise DataError(f"{source} has {len(sites)} sites; name the folder of the one to cut.")
    (site,) = sites
    if waiting := sum(not case.split for case in site.cases):
        remedy = f"draw them with {command('check', federation.folder, '--split', '0.7,0.1,0.2')}"
        verb = "has" if waiting == 1 else "have"
        raise DataError(f"{counted(waiting, 'case')} of site {site.name!r} {verb} no split; {remedy}.")
    return federation, site


Patients = dict[tuple[str, str], list[list[Case]]]  # ("test" or "training", class): the cases of each patient


def _patients(site: SiteFolder, how: Cut) -> Patients:
    """What is dealt: whole patients, in a random order, or the share of them that is kept.

    A patient counts as the class of the first case.
    """
    cases: dict[str, list[Case]] = defaultdict(list)
    for case in site.cases:
        cases[case.patient].append(case)
    found: Patients = defaultdict(list)
    for group in cases.values():
        found["test" if group[0].split == "test" else "training", str(group[0].label)].append(group)
    for (part, label), groups in found.items():
        order = numpy_generator(how.seed, "deal", part, label).permutation(len(groups))
        found[part, label] = [groups[i] for i in order[: max(1, round(how.kept(part) * len(groups)))]]
    return found


def _dealt(federation: Federation, site: SiteFolder, how: Cut) -> list[list[Case]]:
    """The cases of every new site, in the table's order."""
    patients = _patients(site, how)
    training = sum(len(groups) for (part, _), groups in patients.items() if part == "training")
    if training < 2 * how.sites:
        raise DataError(
            f"{counted(training, 'training case')} {are(training)} too few for {counted(how.sites, 'site')}, one to "
            "train and one to validate at each; lower --sites or raise --share."
        )
    for draw in range(REDRAWS if how.scheme == "dirichlet" else 1):
        held = shares(how, len(federation.labels), draw)
        dealt, trained = _deal(patients, federation.labels, held, how)
        if min(trained) > 0:
            place = {case.name: i for i, case in enumerate(site.cases)}
            return [sorted(cases, key=lambda case: place[case.name]) for cases in dealt]
    empty = "a site would get no training case"
    if how.scheme == "dirichlet":
        raise DataError(f"{empty} in any of {REDRAWS} draws; raise --alpha or --share, or lower --sites.")
    raise DataError(f"{empty}: some classes have none; raise --share, or try another --seed.")


def _deal(
    patients: Patients, labels: Sequence[str], held: NDArray[np.float64], how: Cut
) -> tuple[list[list[Case]], list[int]]:
    """The cases of every site by a matrix of shares, and how many patients each trains on."""
    dealt: list[list[Case]] = [[] for _ in range(how.sites)]
    trained = [0] * how.sites
    promised = how.scheme != "dirichlet"  # a class to a site; Dirichlet's draws may leave out
    owed = np.zeros(how.sites)  # test cases by the shares, less those dealt
    for (part, label), groups in patients.items():
        column = held[:, labels.index(label)]
        holders = {site: float(column[site]) for site in np.flatnonzero(column).tolist()}
        if not holders:
            continue
        if promised and part == "training" and len(groups) < len(holders):
            raise DataError(
                f"class {label!r} has {counted(len(groups), 'training case')}, but {len(holders)} of {how.sites} sites "
                "are to hold it; lower --sites, or raise --share."
            )
        if promised and part == "test" and len(groups) < 2 * len(holders):  # one for each would be most of them
            counts = _carried(column * len(groups), owed)
        else:
            counts = apportion(holders, len(groups), int(promised))
        start = 0
        for site, count in counts.items():
            dealt[site] += [case for group in groups[start : start + count] for case in group]
            trained[site] += count if part == "training" else 0
            start += count
    return dealt, trained


def _carried(exact: NDArray[np.float64], owed: NDArray[np.float64]) -> dict[int, int]:
    """Whole numbers near exact ones; what rounding keeps from a site is `owed` to it, and comes with a later class."""
    counts = np.floor(exact + 1e-9).astype(int)
    owed += exact
    rest = round(exact.sum()) - int(counts.sum())
    first = sorted(np.flatnonzero(exact).tolist(), key=lambda site: counts[site] - owed[site])
    counts[first[:rest]] += 1
    owed -= counts
    return {site: int(counts[site]) for site in first}


def _with_valid(cases: Sequence[Case], seed: int, site: str) -> list[Case]:
    """The cases with `valid` drawn anew among those that are not `test`."""
    training = {case.patient for case in cases if case.split != "test"}
    valid = set_aside(training, VALID, seed, site)
    return [
        case if case.split == "test" else replace(case, split="valid" if case.patient in valid else "train")
        for case in cases
    ]


def _move(site: SiteFolder, cases: Sequence[Case], to: Path) -> list[Case]:
    """Copies the images of some cases into a new site's folder; what lay in a stack lies in a smaller one."""
    stacks: dict[Path, list[int]] = defaultdict(list)
    moved = []
    for case in cases:
        file, place = stack_of(case.image)
        inside = _relative(file, site)
        if place is None:
            for part in files_of(file):
                target = to / _relative(part, site)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(part, target)
        else:
            inside = inside.with_name(f"{inside.name}#{len(stacks[file])}")
            stacks[file].append(place)
        moved.append(replace(case, image=inside))
    for file, places in stacks.items():
        target = to / _relative(file, site)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.save(target, np.load(file, allow_pickle=False, mmap_mode="r")[places])
        except (ValueError, IndexError) as error:
            raise DataError(f"{file} cannot be cut ({error}); `consilium check` lists what is wrong with it.") from None
    return moved


def _relative(file: Path, site: SiteFolder) -> Path:
    """Where a file goes in a new site's folder: to the same place, or from the site's root into images/."""
    if site.root is not None and not file.is_relative_to(site.folder):
        return "images" / file.relative_to(site.root)
    return file.relative_to(site.folder)
