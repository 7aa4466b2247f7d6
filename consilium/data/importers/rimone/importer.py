"""RIM-ONE, one of its four releases: r1, r2, r3 or DL, told apart by what the folder holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from consilium.data.formats import PILLOW_SUFFIXES, suffix_of
from consilium.data.importers.anatomy import fundus
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.patterns import split_of
from consilium.data.importers.rules import AtLeast
from consilium.data.importers.sources import SourceFiles, files_under, only_folder
from consilium.errors import DataError
from consilium.wording import counted

SOURCE = "RIM-ONE {release} (Fumero et al., CBMS 2011; Image Analysis & Stereology 2020 of DL)"
HALF = 128
_DL = re.compile(r"(?P<case>.+)-1-(?P<kind>Disc|Cup)-T", re.IGNORECASE)
_R3 = re.compile(r"(?P<case>[GNS]-\d+-[LR])-(?P<kind>Disc|Cup)-Avg", re.IGNORECASE)
_R2 = re.compile(r"(?P<case>Im\d+)-gs_mask", re.IGNORECASE)
_R1 = re.compile(r"(?P<case>Im\d+)[-_ ]*exp(?:ert)?[-_ ]*(?P<rater>\d+)", re.IGNORECASE)
_MASKS = {"DL": _DL, "r3": _R3, "r2": _R2, "r1": _R1}
_EYE = re.compile(r"[-_][LR]$", re.IGNORECASE)

Masks = dict[str, dict[str, dict[str, Path]]]  # case: rater: "disc" or "cup": file


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """One site. r1 and r2 have outlines of the disc only, so their cups are unknown."""
    tree = files_under(only_folder(sources, "RIM-ONE"))
    pictures = [path for path in tree.files if suffix_of(path) in PILLOW_SUFFIXES]
    drawn = {release: _drawn(pictures, how) for release, how in _MASKS.items()}
    there = [release for release, masks in drawn.items() if masks]
    if len(there) != 1:
        said = f"{' and '.join(there)} of RIM-ONE" if there else "no masks that RIM-ONE r1, r2, r3 or DL would have"
        raise DataError(f"{tree.root} holds {said}; give the folder of one release, with its masks.")
    (release,) = there
    cases, left_out, doubts = _cases(tree, pictures, release, drawn[release])
    found = fundus(
        cases,
        left_out,
        [*tree.doubts(), *doubts],
        SOURCE.format(release=release),
        "for research and teaching",
        tree.root,
    )
    return found if release in ("DL", "r3") else replace(found, annotated={"rimone": ("disc",)})


def _drawn(pictures: Sequence[Path], how: re.Pattern[str]) -> Masks:
    found: Masks = {}
    for path in pictures:
        if fit := how.fullmatch(_stem(path)):
            facts = fit.groupdict()
            kinds = found.setdefault(facts["case"].lower(), {}).setdefault(facts.get("rater") or "", {})
            kinds[(facts.get("kind") or "disc").lower()] = path
    return found


def _cases(
    tree: SourceFiles, pictures: Sequence[Path], release: str, drawn: Masks
) -> tuple[list[RawCase], list[str], list[str]]:
    needed = ("disc", "cup") if release in ("DL", "r3") else ("disc",)
    cases: dict[str, RawCase] = {}
    doubts, again = [], 0
    for path in sorted(pictures, key=lambda path: ("partitioned_by_hospital" in path.parts, path)):
        stem = _stem(path)
        raters = drawn.get(stem.lower())
        if raters is None or (release == "r3" and "stereo" not in path.parent.name.lower()):
            if _is_photograph(path, release):
                doubts.append(f"{tree.root / path}: there is no mask of it.")
            continue
        if stem in cases:
            again += 1  # DL ships one collection in two partitions
            continue
        if any(kind not in kinds for kinds in raters.values() for kind in needed):
            doubts.append(f"{tree.root / path}: there must be a mask of {' and of '.join(needed)}.")
            continue
        layers = {
            name: tuple(Layer(tree.root / kinds[kind], AtLeast(HALF, 1 + needed.index(kind))) for kind in needed)
            for name, kinds in sorted(raters.items())
        }
        split = next(
            (split_of(part.removesuffix("_set")) for part in path.parts if split_of(part.removesuffix("_set"))), ""
        )
        cases[stem] = RawCase(
            "rimone", stem, _EYE.sub("", stem), (tree.root / path,), layers, split=split, left_half=release == "r3"
        )
    twice = f"{counted(again, 'picture')} of the partition by hospital, the same as in the other one."
    left_out = [twice] if again else []
    return list(cases.values()), left_out, doubts


def _is_photograph(path: Path, release: str) -> bool:
    """Whether a picture without masks should have had some."""
    places = [part.lower() for part in path.parts[:-1]]
    if release == "r3":
        return "stereo" in path.parent.name.lower()
    if release == "DL":
        return any(part.startswith("partitioned") for part in places)
    return re.fullmatch(r"Im\d+", _stem(path), re.IGNORECASE) is not None


def _stem(path: Path) -> str:
    return path.name[: -len(suffix_of(path))]
