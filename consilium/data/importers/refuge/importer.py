"""REFUGE: jpg photographs, and bmp masks in which 0 is the cup, 128 the disc and 255 background."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.formats import suffix_of
from consilium.data.importers.anatomy import fundus
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.rules import ByValue
from consilium.data.importers.sources import files_under, only_folder
from consilium.wording import counted

SOURCE = "REFUGE (Orlando et al., Medical Image Analysis 2020)"
RULE = ByValue({0: 2, 128: 1, 255: 0})
_PARTS = {"train": "train", "valid": "valid", "val": "valid", "test": "test"}  # how the words in folders begin


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """The FedSM paper has 800 photographs, those of training and validation; --all takes the 400 of the test too."""
    tree = files_under(only_folder(sources, "REFUGE"))
    photos: dict[tuple[str, str], Path] = {}
    masks: dict[tuple[str, str], Path] = {}
    for path in tree.files:
        if any("illustration" in part.lower() for part in path.parts):
            continue
        key = (_split(path), path.name[: -len(suffix_of(path)) or None].lower())
        if suffix_of(path) in (".jpg", ".jpeg"):
            photos[key] = path
        elif suffix_of(path) in (".bmp", ".png"):
            masks[key] = path
    cases, doubts, skipped = [], tree.doubts(), 0
    for key, path in sorted(photos.items()):
        mask = masks.pop(key, None)
        if key[0] == "test" and not options.all:
            skipped += 1
        elif mask is None:
            doubts.append(f"{tree.root / path}: there is no mask of it.")
        else:
            name = path.name[: -len(suffix_of(path))]
            layer = Layer(tree.root / mask, RULE)
            cases.append(RawCase("refuge", name, name, (tree.root / path,), {"": (layer,)}, split=key[0]))
    doubts += [f"{tree.root / path}: there is no photograph of it." for path in sorted(masks.values())]
    tested = f"{counted(skipped, 'photograph')} of the test, which the paper does not use (--all takes them)."
    left_out = [tested] if skipped else []
    return fundus(cases, left_out, doubts, SOURCE, "CC BY-NC-ND 4.0", tree.root)


def _split(path: Path) -> str:
    """From folders such as REFUGE-Validation400-GT, Training400, Annotation-Training400 or test."""
    for part in path.parts[:-1]:
        for word in part.lower().replace("_", "-").split("-"):
            for start, split in _PARTS.items():
                if word.startswith(start):
                    return split
    return ""
