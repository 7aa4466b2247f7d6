"""NCI-ISBI 2013: DICOM series of two collections (Prostate-3T, PROSTATE-DIAGNOSIS), masks as nrrd."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from consilium.data.dicom import dicom_files, slice_header
from consilium.data.importers.anatomy import GLAND, prostate
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder, series_under
from consilium.wording import counted

SOURCE = "NCI-ISBI 2013 Challenge (Bloch et al., The Cancer Imaging Archive, 2015)"
SITES = {"3t": "nci3t", "dx": "ncidx"}
DROPPED = {"prostatedx-01-0055": "its mask has fewer slices than its image"}  # by FedSM's authors
_PATIENT = re.compile(r"Prostate(?P<kind>3T|Dx)-\d+-\d+", re.IGNORECASE)
_SPLITS = {"training": "train", "leaderboard": "valid", "test": "test"}


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """Two sites, one of each collection; both zones are the gland."""
    root = only_folder(sources, "NCI-ISBI 2013")
    tree = files_under(root)
    cases, left_out, doubts = [], [], tree.doubts()
    scans: dict[str, list[Path]] = defaultdict(list)
    for folder, series in series_under(root, doubts).items():
        if name := _patient(folder.relative_to(root)):
            scans[name] += (
                [folder] if len(series) == 1 else [folder.with_name(f"{folder.name}#{uid}") for uid in series]
            )
    masks: dict[str, Path] = {}
    for path in sorted(tree.files, key=lambda path: ("corrected" in path.name.lower(), path)):
        if path.suffix.lower() == ".nrrd" and (fit := _PATIENT.match(path.name)):
            masks[fit[0]] = path  # a corrected one comes last and is taken
    bare = sorted(scans.keys() - masks.keys())
    if bare:
        left_out.append(f"{counted(len(bare), 'patient')} without a mask, such as {bare[0]}.")
    for name, path in sorted(masks.items()):
        if name.lower() in DROPPED and not options.all:
            left_out.append(f"{name}: {DROPPED[name.lower()]}.")
        elif len(fitting := _drawn_on(scans[name], root / path)) != 1:
            some = f"{len(fitting) or 'none'} of the {len(scans[name])} series of {name} could be"
            doubts.append(f"{root / path}: {some} the one that it was drawn on; keep that one only.")
        else:
            split = next((_SPLITS[w] for part in path.parts for w in _SPLITS if w in part.lower()), "")
            layers = {"": (Layer(root / path, GLAND),)}
            site = SITES[_PATIENT.match(name)["kind"].lower()]  # type: ignore[index]
            cases.append(RawCase(site, name, name, (fitting[0],), layers, split=split, regrid=True))
    return prostate(cases, left_out, doubts, SOURCE, "CC BY 3.0", root)


def _patient(path: Path) -> str:
    return next((part for part in path.parts if _PATIENT.fullmatch(part)), "")


def _drawn_on(series: list[Path], mask: Path) -> list[Path]:
    """Of several series of a patient those with the mask's columns, rows and slices; a patient has many sequences."""
    if len(series) < 2:
        return series
    import SimpleITK

    reader = SimpleITK.ImageFileReader()
    reader.SetFileName(str(mask))
    try:
        reader.ReadImageInformation()
    except RuntimeError:
        return series
    sizes = {one: (files := dicom_files(one), slice_header(files[0]).size[:2]) for one in series}
    return [one for one, (files, size) in sizes.items() if (*size, len(files)) == reader.GetSize()]
