"""The tables of a federation on disk: federation.toml, and per site site.toml and cases.csv.

Reading them opens no image. Every fault is collected, so that none hides behind the first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilium.data.case_files import CaseFiles
from consilium.data.case_table import COLUMNS, CaseTable, read_table
from consilium.errors import DataError, TableFaults
from consilium.fields import NAME, nearest, to_toml

TASKS = ("segmentation", "classification")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Case:
    """One image of one patient, and its truth."""

    name: str
    patient: str
    split: str  # "train" | "valid" | "test" | "" (not drawn yet)
    image: Path
    label: Path | str | None  # the mask's path, or the class name; None: it has no mask


@dataclass(frozen=True)
class SiteFolder:
    """One hospital's cases, in the order of its table."""

    name: str
    folder: Path
    annotated: tuple[str, ...]  # the labels this site draws; what it does not draw is unknown, not absent
    source: str
    licence: str
    cases: tuple[Case, ...]
    root: Path | None = None  # the one folder outside `folder` where images may lie


@dataclass(frozen=True)
class Federation:
    """All sites, sorted by name, and what they have in common."""

    folder: Path
    task: str  # "segmentation" | "classification"
    labels: tuple[str, ...]  # mask values 1, 2, … in this order, or the classes 0, 1, …
    dimensions: int
    channels: int
    contains: Mapping[str, tuple[str, ...]]  # a label's region includes the regions of these labels
    sites: Mapping[str, SiteFolder]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong; `case` and `site` are empty where the fault is not theirs."""

    site: str
    case: str
    file: str  # relative to the federation's folder
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}{f', case {self.case!r}' if self.case else ''}: {self.sentence}"


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used as a case, and those of its files that are there and can still be looked at."""

    site: str
    name: str
    image: Path | None
    label: Path | None


@dataclass(frozen=True)
class Survey:
    """What the tables say: the sound part, every fault, and the rows that are not in the sound part."""

    federation: Federation | None  # None: federation.toml says too little to read on
    faults: tuple[Fault, ...]
    rejected: tuple[Rejected, ...]


def read_federation(folder: Path) -> Federation:
    """The federation in a folder; its tables are read and checked, its images are not opened."""
    found = survey(folder)
    try:
        refuse(found.faults, f"the tables of the federation {folder}")
    except DataError as error:
        raise TableFaults(str(error), folder) from None
    assert found.federation is not None  # without it there is a fault
    return found.federation


def read_own_site(
    folder: Path,
    task: str,
    labels: Sequence[str],
    dimensions: int,
    channels: int,
    contains: Mapping[str, Sequence[str]],
) -> Federation:
    """A hospital's own site folder; of the federation around it only the facts are known."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the one that holds site.toml and cases.csv.")
    inside = {outer: tuple(inner) for outer, inner in contains.items()}
    federation = Federation(folder.parent, task, tuple(labels), dimensions, channels, inside, {})
    faults: list[Fault] = []
    site = _read_site(federation, folder, faults, [])
    refuse(faults, f"the tables of the site {folder}")
    assert site is not None  # without it there is a fault
    return replace(federation, sites={site.name: site})


def refuse(faults: Sequence[Fault], what: str) -> None:
    """Raises one DataError that lists every fault, if there is any."""
    if faults:
        count = "One fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise DataError(f"{count} in {what}; nothing was done.\n{lines}")


def survey(folder: Path) -> Survey:
    """Reads all tables of a federation as far as they can be read; raises nothing."""
    folder = Path(folder)
    faults: list[Fault] = []
    rejected: list[Rejected] = []
    federation = _read_head(folder, faults)
    if federation is None:
        return Survey(None, tuple(faults), ())
    sites: dict[str, SiteFolder] = {}
    for place in _site_places(folder):
        site = _read_site(federation, place, faults, rejected)
        if site is None:
            continue
        if site.name in sites:
            sentence = f"name {site.name!r} is also the name of {sites[site.name].folder.name}/; give each its own."
            faults.append(Fault(site.name, "", f"{place.name}/site.toml", sentence))
            rejected += [_reject(site.name, case) for case in site.cases]
        else:
            sites[site.name] = site
    if not sites and not faults:
        sentence = "no site was found; a site is a folder with site.toml and cases.csv in it."
        faults.append(Fault("", "", str(folder), sentence))
    return Survey(replace(federation, sites=dict(sorted(sites.items()))), tuple(faults), tuple(rejected))


def inside_of(outer: str, contains: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Every label whose region lies in the region of `outer`, at any depth."""
    seen: set[str] = set()
    todo = list(contains.get(outer, ()))
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += contains.get(name, ())
    return seen


SITE_NAME = re.compile(NAME)
_HEAD_KEYS = {"task": str, "labels": list, "dimensions": int, "channels": int, "contains": dict}
_SITE_KEYS = {"name": str, "annotated": list, "source": str, "licence": str, "root": str}
_KINDS = {str: "text in quotes", list: "a list of texts", int: "a whole number", dict: "a table of lists"}


def _site_places(folder: Path) -> list[Path]:
    places = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return [p for p in places if (p / "site.toml").exists() or (p / "cases.csv").exists()]


def _read_head(folder: Path, faults: list[Fault]) -> Federation | None:
    """Everything of federation.toml; its sites come later."""
    if not folder.is_dir():
        faults.append(Fault("", "", str(folder), "is not a folder; give the folder that holds federation.toml."))
        return None
    if not (folder / "federation.toml").exists() and (near := _federation_near(folder)):
        faults.append(Fault("", "", "federation.toml", f"is not here but in {near}; give that folder."))
        return None
    wrong: list[str] = []
    facts = _read_toml(folder / "federation.toml", _HEAD_KEYS, ("task", "labels", "dimensions", "channels"), wrong)
    if "task" in facts and facts["task"] not in TASKS:
        wrong.append(f"task {facts['task']!r} is unknown; {nearest(facts['task'], TASKS)}")
    labels = tuple(facts.get("labels", ()))
    if "labels" in facts:
        wrong += _label_faults(labels, facts.get("task", ""))
    if "dimensions" in facts and facts["dimensions"] not in (2, 3):
        wrong.append(f"dimensions is {facts['dimensions']}; it is 2 for pictures or 3 for volumes.")
    if "channels" in facts and facts["channels"] < 1:
        wrong.append(f"channels is {facts['channels']}; it is 1 for grey images, 3 for colour.")
    contains = {outer: tuple(inner) for outer, inner in facts.get("contains", {}).items()}
    wrong += _contains_faults(contains, labels, facts.get("task", ""))
    faults += [Fault("", "", "federation.toml", sentence) for sentence in wrong]
    if not _is_enough(facts, labels):
        return None
    return Federation(folder, facts["task"], labels, facts["dimensions"], facts["channels"], contains, {})


def _federation_near(folder: Path) -> Path | None:
    """Where a site's folder was given, or the folder of several federations: the federation that may be meant."""
    places = [folder.absolute().parent] if (folder / "site.toml").exists() else sorted(folder.glob("*/"))
    return next((place for place in places if (place / "federation.toml").exists()), None)


def _is_enough(facts: Mapping[str, Any], labels: tuple[str, ...]) -> bool:
    """Whether the sites can be looked at, even if something else in federation.toml is wrong."""
    sound = facts.get("task") in TASKS and facts.get("dimensions") in (2, 3) and facts.get("channels", 0) > 0
    return sound and bool(labels)


def _label_faults(labels: tuple[str, ...], task: str) -> list[str]:
    wrong = []
    if not labels:
        wrong.append("labels is empty; name at least one.")
    if len(set(labels)) < len(labels) or "" in labels:
        wrong.append("labels has an empty or repeated name; give each label its own.")
    if task == "segmentation" and "background" in labels:
        wrong.append("labels has 'background'; leave it out, it is always mask value 0.")
    if task == "segmentation" and "mean" in labels:
        wrong.append("labels has 'mean', which is the name of the mean over labels; give the label another name.")
    if task == "segmentation" and len(labels) > 255:
        wrong.append(f"labels has {len(labels)} names; a mask has room for 255.")
    return wrong


def _contains_faults(contains: Mapping[str, tuple[str, ...]], labels: tuple[str, ...], task: str) -> list[str]:
    if contains and task == "classification":
        return ["contains is for masks; leave it out of a classification."]
    named = sorted({name for outer, inner in contains.items() for name in (outer, *inner)} - set(labels))
    if named and labels:
        return [f"contains names {name!r}, which is not in labels; {nearest(name, labels)}" for name in named]
    around = [outer for outer in contains if outer in inside_of(outer, contains)]
    return [f"contains puts {around[0]!r} inside itself; say only what lies inside what."] if around else []


def _read_site(federation: Federation, place: Path, faults: list[Fault], rejected: list[Rejected]) -> SiteFolder | None:
    """A site with its sound cases, or None where its tables cannot be used at all."""
    wrong: list[str] = []
    facts = _read_toml(place / "site.toml", _SITE_KEYS, ("name",), wrong)
    name = facts.get("name", place.name)
    if not SITE_NAME.fullmatch(name):
        wrong.append(f"name {name!r} cannot be used; write letters, digits, '-', '_' or '.', a letter or digit first.")
    annotated = tuple(facts.get("annotated", federation.labels))
    if not annotated:
        wrong.append("annotated is empty; leave it out if all labels are drawn, or name those that are.")
    wrong += [
        f"annotated names {label!r}, which is not in federation.toml; {nearest(label, federation.labels)}"
        for label in annotated
        if label not in federation.labels
    ]
    root = Path(facts["root"]) if "root" in facts else None
    if root is not None and not (root.is_absolute() and root.is_dir()):
        wrong.append(f"root {str(root)!r} is not a folder; write its whole path, from / on.")
    faults += [Fault(name, "", f"{place.name}/site.toml", sentence) for sentence in wrong]
    try:
        table = read_table(place / "cases.csv")
    except FileNotFoundError:
        faults.append(Fault(name, "", f"{place.name}/cases.csv", f"is missing; write {','.join(COLUMNS)} per case."))
        return None
    except OSError as error:
        faults.append(Fault(name, "", f"{place.name}/cases.csv", f"cannot be read: {error.strerror}."))
        return None
    except DataError as error:
        faults.append(Fault(name, "", f"{place.name}/cases.csv", str(error)))
        return None
    files = CaseFiles(place, root)
    cases = _read_cases(federation, files, name, table, "annotated" in facts, faults, rejected)
    if wrong:
        rejected += [_reject(name, case) for case in cases]
        return None
    ordered = tuple(label for label in federation.labels if label in annotated)
    return SiteFolder(name, place, ordered, facts.get("source", ""), facts.get("licence", ""), cases, root)


def _reject(site: str, case: Case) -> Rejected:
    return Rejected(site, case.name, case.image, case.label if isinstance(case.label, Path) else None)


def _read_cases(
    federation: Federation,
    files: CaseFiles,
    site: str,
    table: CaseTable,
    maskless: bool,
    faults: list[Fault],
    rejected: list[Rejected],
) -> tuple[Case, ...]:
    """The sound cases; every fault of every row is added to `faults`, and the row to `rejected`.

    `maskless`: a case may be without a mask, since the site says what its masks show.
    """
    file = f"{files.place.name}/cases.csv"
    if not table.rows:
        faults.append(Fault(site, "", file, "has no case; write one line per case."))
    masks = federation.task == "segmentation"
    seen: set[str] = set()
    split_of: dict[str, str] = {}
    cases = []
    for number, row in enumerate(table.rows, start=1):
        name, patient, split = row["case"], row["patient"], row["split"]
        wrong = _row_faults(row, seen, split_of, number)
        seen.add(name)
        if split in SPLITS:
            split_of.setdefault(patient, split)
        image_fault = files.fault("image", row["image"])
        if masks and not row["label"]:
            label_fault = _maskless_fault(split, maskless)
        else:
            label_fault = files.fault("label", row["label"]) if masks else _class_fault(row["label"], federation.labels)
        wrong += [sentence for sentence in (image_fault, label_fault) if sentence]
        image, mask = files.path(row["image"]), files.path(row["label"]) if masks and row["label"] else None
        if wrong:
            faults += [Fault(site, name, file, sentence) for sentence in wrong]
            rejected.append(Rejected(site, name, None if image_fault else image, None if label_fault else mask))
        else:
            cases.append(Case(name, patient, split, image, mask if masks else row["label"]))
    return tuple(cases)


def _maskless_fault(split: str, allowed: bool) -> str:
    if not allowed:
        return (
            "label is missing; write the mask's path relative to the site's folder. Cases without a mask are for "
            "sites whose site.toml says with `annotated` what their masks show."
        )
    if split in ("valid", "test"):
        return f"label is missing, so nothing can be scored on this {split} case; make it train."
    return ""


def _class_fault(name: str, labels: tuple[str, ...]) -> str:
    return "" if name in labels else f"class {name!r} is not in federation.toml; {nearest(name, labels)}"


def _row_faults(row: Mapping[str, str], seen: set[str], split_of: Mapping[str, str], number: int) -> list[str]:
    name, patient, split = row["case"], row["patient"], row["split"]
    wrong = []
    if not name:
        wrong.append(f"case row {number} has no case name; give it one of its own.")
    elif name in seen:
        wrong.append("this case name is there twice; give each case its own.")
    if not name.isprintable() or "/" in name or "\\" in name:
        wrong.append("this case name cannot name a file; leave out '/', '\\' and control characters.")
    if "" in row:
        wrong.append(f"the cells {row['']!r} have no column; put quotes around a cell that contains a comma.")
    if not patient:
        wrong.append("the patient is missing; repeat the case name if nothing is known.")
    if split and split not in SPLITS:
        wrong.append(f"split {split!r} is unknown; use train, valid or test, or leave it empty.")
    elif split and patient and split_of.get(patient, split) != split:
        wrong.append(f"patient {patient!r} is in two splits, {split_of[patient]} and {split}; keep a patient in one.")
    return wrong


def _read_toml(path: Path, keys: Mapping[str, type], required: Sequence[str], wrong: list[str]) -> dict[str, Any]:
    """The keys of the right type; everything else is a sentence in `wrong`."""
    try:
        facts = tomllib.loads(path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n"))
    except FileNotFoundError:
        wrong.append(
            f"is missing; write a file with {', '.join(required)} in it, or let `consilium import` make the folder."
        )
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        wrong.append(f"is not readable TOML ({error}); see docs/data.md for an example.")
        return {}
    wrong += [f"key {key!r} is unknown; {nearest(key, keys)}" for key in facts if key not in keys]
    wrong += [f"key {key!r} is missing; it is {_KINDS[keys[key]]}." for key in required if key not in facts]
    good = {}
    for key in keys.keys() & facts.keys():
        if _is_a(facts[key], keys[key]):
            good[key] = facts[key]
        else:
            wrong.append(f"{key} is {to_toml(facts[key])}; it must be {_KINDS[keys[key]]}.")
    return good


def _is_a(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_is_a(item, list) for item in value.values())
    return isinstance(value, kind) and not isinstance(value, bool)
