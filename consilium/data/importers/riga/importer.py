"""RIGA: photographs `imageNprime`, and for each of six graders a copy with outlines (or a mask) `imageN-R`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from consilium.data.formats import PILLOW_SUFFIXES, suffix_of
from consilium.data.importers.anatomy import fundus
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.outlines import Outlines
from consilium.data.importers.sources import files_under, only_folder
from consilium.wording import counted

SOURCE = "RIGA (Almazroa et al., SPIE Medical Imaging 2018)"
SITES = {"binrushed": "binrushed", "magrab": "magrabia", "messidor": "messidor"}
_PHOTO = re.compile(r"image\s*(\d+)\s*prime", re.IGNORECASE)
_GRADED = re.compile(r"image\s*(\d+)\s*-\s*(\d+)", re.IGNORECASE)


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """Three sites by where the photographs were taken; graders vote."""
    tree = files_under(only_folder(sources, "RIGA"))
    photos: dict[tuple[str, str, int], Path] = {}
    graded: dict[tuple[str, str, int], dict[str, Path]] = defaultdict(dict)
    left_out, doubts = [], tree.doubts()
    corrected = any("BinRushed1-Corrected" in path.parts for path in tree.files)
    replaced = 0
    for path in tree.files:
        site = next(
            (name for part in (tree.root.name, *path.parts) for word, name in SITES.items() if word in part.lower()), ""
        )
        stem = path.name[: -len(suffix_of(path))] if suffix_of(path) in PILLOW_SUFFIXES else ""
        if not site or not stem:
            continue
        if corrected and path.parent.name == "BinRushed1":
            replaced += 1
            continue
        group = path.parent.name
        if fit := _PHOTO.fullmatch(stem):
            photos[site, group, int(fit[1])] = path
        elif fit := _GRADED.fullmatch(stem):
            graded[site, group, int(fit[1])][fit[2]] = path
    if replaced:
        left_out.append(f"{counted(replaced, 'file')} of BinRushed1, which BinRushed1-Corrected replaces.")
    most = max(map(len, graded.values()), default=0)
    cases = []
    for key, path in sorted(photos.items()):
        site, group, number = key
        raters = {name: (Layer(tree.root / file, Outlines()),) for name, file in sorted(graded.pop(key, {}).items())}
        if not raters:
            doubts.append(f"{tree.root / path}: no grader's picture belongs to it.")
            continue
        if len(raters) < most:
            missing = f"{most - len(raters)} of {most} graders of {path.as_posix()}"
            left_out.append(f"{missing}: there is no picture of theirs; the others vote.")
        name = f"image{number}" if group.lower() == site else f"{group}-image{number}"
        cases.append(RawCase(site, name, name, (tree.root / path,), raters))
    doubts += [f"{tree.root / next(iter(files.values()))}: there is no photograph of it." for files in graded.values()]
    return fundus(cases, left_out, doubts, SOURCE, "CC BY-NC 4.0", tree.root)
