"""Folders of volumes and label volumes with numbers in their names, as most CT and MR collections are published."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from consilium.data.formats import suffix_of
from consilium.data.importers.found import Layer, RawCase
from consilium.data.importers.patterns import split_of
from consilium.data.importers.rules import Rule
from consilium.data.importers.sources import SourceFiles


@dataclass(frozen=True)
class Numbered:
    """Cases found by number, and what has no partner."""

    cases: tuple[RawCase, ...]
    numbers: dict[str, int]  # by case name
    doubts: tuple[str, ...]
    bare: tuple[Path, ...]  # images of parts that have no labels at all, such as a challenge's test set


def numbered(
    tree: SourceFiles,
    site: str,
    image: str,
    label: str,
    rule: Rule,
    channel: int | None = None,
    name: str = "",
    unlabelled: str = "",
) -> Numbered:
    """Pairs files whose whole paths fit two regular expressions with a group `n` (and perhaps `split`).

    The number is compared as a number. An image and a label belong together if number and split agree.
    Images in a folder whose name has the word `unlabelled` in it need no label.
    """
    images, labels = _found(tree, image), _found(tree, label)
    drawn = {split for split, _ in labels}
    cases, doubts, numbers = [], [], {}
    bare: list[Path] = []
    for (split, number), paths in sorted(images.items()):
        alone = [path for path in paths if unlabelled and _apart(path, unlabelled, labels.get((split, number), []))]
        paths = [path for path in paths if path not in alone]
        bare += alone
        if not paths:
            continue
        if split == "test" and split not in drawn:
            bare += paths
        elif (split, number) not in labels:
            doubts.append(f"{tree.root / paths[0]}: there is no label file of the number {number}.")
        elif len(paths) > 1 or len(labels[split, number]) > 1:
            several = ", ".join(path.as_posix() for path in (*paths, *labels[split, number]))
            doubts.append(f"{tree.root}: several files have the number {number}: {several}.")
        else:
            stem = paths[0].name[: -len(suffix_of(paths[0]))]
            case = f"{name}{number:04d}" if name else stem
            layer = Layer(tree.root / labels[split, number][0], rule)
            numbers[case] = number
            path = (tree.root / paths[0],)
            cases.append(RawCase(site, case, case, path, {"": (layer,)}, split=split, channel=channel, regrid=True))
    for key in sorted(labels.keys() - images.keys()):
        doubts.append(f"{tree.root / labels[key][0]}: there is no image of the number {key[1]}.")
    return Numbered(tuple(cases), numbers, tuple(doubts), tuple(bare))


def _apart(image: Path, word: str, labels: list[Path]) -> bool:
    """Whether an image lies in a folder of the name, and none of its number's labels with it: a test counts anew."""
    named = any(word in part.lower() for part in image.parts[:-1])
    return named and all(label.parent != image.parent for label in labels)


def _found(tree: SourceFiles, expression: str) -> dict[tuple[str, int], list[Path]]:
    pattern = re.compile(expression, re.IGNORECASE)
    found: dict[tuple[str, int], list[Path]] = {}
    for path in tree.files:
        if fit := pattern.fullmatch(path.as_posix()):
            split = split_of(fit.groupdict().get("split") or "")
            found.setdefault((split, int(fit["n"])), []).append(path)
    return found
