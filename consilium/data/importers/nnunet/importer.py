"""nnU-Net's layout, versions 1 and 2, and the Medical Segmentation Decathlon's: dataset.json, imagesTr, labelsTr."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from consilium.data.formats import PILLOW_SUFFIXES, suffix_of
from consilium.data.importers.found import HALVES, Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.rules import ByValue
from consilium.data.importers.sources import SourceFiles, files_under, only_folder
from consilium.errors import DataError
from consilium.wording import counted

OPTIONS = ("site",)
_CHANNEL = re.compile(r"(.+)_(\d{4})")
_PARTS = {"Tr": "", "Ts": "test"}  # of the first some are drawn for validation


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """Cases of labelsTr for training, of labelsTs (where there are labels) for testing; patients are not known."""
    tree = files_under(only_folder(sources, "a dataset of nnU-Net"))
    facts = _facts(tree.root / "dataset.json")
    labels, values, contains = regions(facts["labels"])
    channels = len(facts.get("channel_names") or facts.get("modality") or {"0": ""})
    site = options.site or re.sub(r"[^A-Za-z0-9._-]+", "-", tree.root.resolve().name).lstrip("-._") or "nnunet"
    cases, left_out, doubts = [], [], tree.doubts()
    for part, split in _PARTS.items():
        images, drawn = _images(tree, f"images{part}"), _labels(tree, f"labels{part}")
        if not drawn and images:
            left_out.append(f"{counted(len(images), 'image')} of images{part}, without labels.")
            continue
        for name, files in sorted(images.items()):
            if name not in drawn:
                doubts.append(f"{tree.root / files[0]}: there is no labels{part}/{name}.")
                continue
            layer = Layer(tree.root / drawn.pop(name), ByValue(values))
            cases.append(RawCase(site, name, name, tuple(tree.root / f for f in files), {"": (layer,)}, split=split))
        doubts += [f"{tree.root / path}: there is no image of it." for path in sorted(drawn.values())]
    if not cases:
        raise DataError(f"{tree.root} has no pairs in imagesTr and labelsTr; give the folder that holds dataset.json.")
    dimensions = 2 if suffix_of(cases[0].images[0]) in PILLOW_SUFFIXES else 3
    tested = sum(case.split == "test" for case in cases) / len(cases)
    told = [str(facts.get(key) or "") for key in ("name", "reference", "licence", "license")]
    return Found(
        "segmentation", labels, dimensions, channels, tuple(cases), tuple(left_out), tuple(doubts), contains,
        source=" ".join(filter(None, told[:2])), licence=told[2] or told[3], root=tree.root,
        published_splits=True, shares=(0.8 * (1 - tested), 0.2 * (1 - tested), tested) if tested else HALVES,
    )  # fmt: skip


def regions(labels: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[int, int], dict[str, tuple[str, ...]]]:
    """Names in order, stored value → label number, and what lies inside what.

    Version 1 writes {"1": "liver"}, version 2 {"liver": 1}, or {"tumour": [1, 2], "core": [2]} where regions overlap.
    """
    by_name: dict[str, frozenset[int]] = {}
    for key, value in labels.items():
        name, numbers = (str(value), key) if str(key).isdecimal() else (str(key), value)
        try:
            stored = frozenset(int(n) for n in (numbers if isinstance(numbers, list) else [numbers]))
        except (TypeError, ValueError):
            raise DataError(
                f"dataset.json says that {name!r} has the value {numbers!r}; write whole numbers."
            ) from None
        if name == "ignore":
            raise DataError(
                "dataset.json has an ignore label, which has no place in a site folder; draw it or leave it out."
            )
        if stored != {0}:
            by_name[name] = stored
    names = sorted(by_name, key=lambda name: (-len(by_name[name]), min(by_name[name])))
    for one in names:
        for two in names:
            if by_name[one] & by_name[two] and not (by_name[one] <= by_name[two] or by_name[two] <= by_name[one]):
                raise DataError(f"dataset.json has regions that overlap without nesting, {one} and {two}.")
    values = {stored: 1 + names.index(name) for name in names for stored in sorted(by_name[name])}  # the inner one last
    inside = {one: tuple(two for two in names if by_name[two] < by_name[one]) for one in names}
    return tuple(names), values, {outer: inner for outer, inner in inside.items() if inner}


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(facts["labels"], dict):
            raise TypeError("labels is not a table")
        return dict(facts)
    except FileNotFoundError:
        raise DataError(f"there is no {path}; give the folder that holds dataset.json.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not nnU-Net's ({error}); it must be JSON with labels.") from None


def _images(tree: SourceFiles, folder: str) -> dict[str, list[Path]]:
    """By case, the files of its channels in order."""
    found: dict[str, list[Path]] = defaultdict(list)
    stems = {path: path.name[: -len(suffix_of(path))] for path in tree.files if _lies_in(path, folder)}
    for path, stem in sorted(stems.items()):
        channel = _CHANNEL.fullmatch(stem)
        found[channel[1] if channel else stem].append(path)
    return found


def _labels(tree: SourceFiles, folder: str) -> dict[str, Path]:
    return {path.name[: -len(suffix_of(path))]: path for path in tree.files if _lies_in(path, folder)}


def _lies_in(path: Path, folder: str) -> bool:
    return path.parts[:-1] == (folder,) and bool(suffix_of(path))
