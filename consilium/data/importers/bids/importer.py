"""BIDS: images sub-X[/ses-Y]/…/sub-X…_SUFFIX.nii.gz, masks …_dseg or …_mask below derivatives."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.rules import ByValue, Foreground
from consilium.data.importers.sources import SourceFiles, files_under, only_folder
from consilium.errors import DataError, StudyError

OPTIONS = ("images", "labels", "site")
_NAME = re.compile(r"(?P<entities>sub-[^_]+(?:_[a-z]+-[^_]+)*)_(?P<suffix>[A-Za-z0-9]+)\.nii(?:\.gz)?")
_SHARED = ("sub", "ses", "run")  # a mask belongs to the image with which it agrees in these


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """One case per image; a subject is a patient. Several pipelines below derivatives are several raters."""
    tree = files_under(only_folder(sources, "a BIDS dataset"))
    raw = {path: fit for path in tree.files if path.parts[0].startswith("sub-") and (fit := _NAME.fullmatch(path.name))}
    suffixes = sorted({fit["suffix"] for fit in raw.values()})
    wanted = options.images or (suffixes[0] if len(suffixes) == 1 else "")
    if wanted not in suffixes:
        there = ", ".join(suffixes) or "none; give the folder that holds sub-…"
        raise StudyError(f"say with --images which images to take; {tree.root} has {there}.")
    masks = _masks(tree)
    labels = options.labels or tuple(
        sorted({name for drawn in masks.values() for _, _, names in drawn for name in names.values()})
    )
    if not labels:
        raise DataError(f"no mask was found below {tree.root}/derivatives; masks end in _dseg.nii.gz or _mask.nii.gz.")
    cases, doubts = [], tree.doubts()
    for path, fit in sorted(raw.items()):
        if fit["suffix"] != wanted:
            continue
        entities = _entities(fit["entities"])
        drawn = masks.get(_key(entities), [])
        raters = _raters(tree, drawn, labels)
        if not raters:
            doubts.append(f"{tree.root / path}: no mask below derivatives belongs to it.")
            continue
        cases.append(
            RawCase(options.site or "bids", fit["entities"], f"sub-{entities['sub']}", (tree.root / path,), raters)
        )
    others = [suffix for suffix in suffixes if suffix != wanted]
    left_out = [f"images of other kinds: {', '.join(others)}."] if others else []
    return Found("segmentation", labels, 3, 1, tuple(cases), tuple(left_out), tuple(doubts), root=tree.root)


Drawn = tuple[Path, str, Mapping[int, str]]  # a mask file, its pipeline, and its values' names


def _masks(tree: SourceFiles) -> dict[tuple[str, ...], list[Drawn]]:
    found: dict[tuple[str, ...], list[Drawn]] = defaultdict(list)
    for path in tree.files:
        fit = _NAME.fullmatch(path.name)
        if (
            path.parts[0] != "derivatives"
            or len(path.parts) < 3
            or fit is None
            or fit["suffix"] not in ("dseg", "mask")
        ):
            continue
        entities = _entities(fit["entities"])
        names = {1: entities.get("label", "mask")} if fit["suffix"] == "mask" else _dseg_names(tree, path)
        found[_key(entities)].append((path, path.parts[1], names))
    return found


def _raters(tree: SourceFiles, drawn: Sequence[Drawn], labels: tuple[str, ...]) -> dict[str, tuple[Layer, ...]]:
    raters: dict[str, list[Layer]] = defaultdict(list)
    for path, pipeline, names in drawn:
        known = {value: 1 + labels.index(name) for value, name in names.items() if name in labels}
        if path.name.split(".")[0].endswith("_mask"):
            raters[pipeline] += [Layer(tree.root / path, Foreground(number)) for number in known.values()]
        else:
            numbers = known or {value: value for value in range(1, len(labels) + 1)}
            raters[pipeline].append(Layer(tree.root / path, ByValue(numbers, others=bool(names))))
    return {name: tuple(layers) for name, layers in sorted(raters.items()) if layers}


def _dseg_names(tree: SourceFiles, path: Path) -> dict[int, str]:
    """From the table beside the mask, or the nearest one above it: columns index and name."""
    own = tree.root / path.with_name(path.name.split(".")[0] + ".tsv")
    tables = [
        own,
        *(tree.root / place / "dseg.tsv" for place in path.parents),
        *sorted((tree.root / path.parents[-3]).glob("*dseg.tsv")),
    ]
    for table in tables:
        if table.is_file():
            try:
                with table.open(encoding="utf-8-sig", newline="") as file:
                    rows = list(csv.DictReader(file, delimiter="\t"))
                return {int(row["index"]): row["name"] for row in rows if int(row["index"])}
            except (KeyError, ValueError, UnicodeDecodeError):
                raise DataError(f"{table} must have the columns index and name, separated by tabs.") from None
    return {}


def _entities(text: str) -> dict[str, str]:
    return dict(part.split("-", 1) for part in text.split("_"))


def _key(entities: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(entities.get(name, "") for name in _SHARED)
