"""Drishti-GS1: photographs in {Training,Test}/Images, soft maps of four experts below GT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.formats import PILLOW_SUFFIXES, suffix_of
from consilium.data.importers.anatomy import fundus
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.patterns import split_of
from consilium.data.importers.rules import AtLeast
from consilium.data.importers.sources import files_under, only_folder

SOURCE = "Drishti-GS1 (Sivaswamy et al., ISBI 2014)"
HALF = 128  # of 255: at least two of the four experts


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """101 photographs, each of a patient of its own."""
    tree = files_under(only_folder(sources, "Drishti-GS1"))
    maps = {path.name.lower(): path for path in tree.files if path.name.lower().endswith("softmap.png")}
    cases, doubts = [], tree.doubts()
    for path in tree.files:
        if "images" not in [part.lower() for part in path.parts[:-1]] or suffix_of(path) not in PILLOW_SUFFIXES:
            continue
        stem = path.name[: -len(suffix_of(path))].removesuffix("_")  # a mirror ends some names with "_"
        drawn = [maps.pop(f"{stem}_{kind}Softmap.png".lower(), None) for kind in ("ODseg", "cupseg")]
        if None in drawn:
            doubts.append(f"{tree.root / path}: there is no soft map of {'cup' if drawn[0] else 'disc'}.")
            continue
        layers = tuple(Layer(tree.root / file, AtLeast(HALF, label)) for label, file in enumerate(drawn, 1) if file)
        split = next((split_of(part) for part in path.parts if split_of(part)), "")
        cases.append(RawCase("drishti", stem, stem, (tree.root / path,), {"": layers}, split=split))
    doubts += [f"{tree.root / path}: there is no photograph of it." for path in sorted(maps.values())]
    return fundus(cases, (), doubts, SOURCE, "for research; ask the publisher", tree.root)
