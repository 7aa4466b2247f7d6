"""PROSTATEx: the NIfTI release of masks (Cuocolo), or DICOM series with a DICOM SEG (PROSTATEx-Seg-Zones)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from consilium.data.dicom import is_segmentation, require_dicom
from consilium.data.importers.anatomy import prostate
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.rules import ByValue
from consilium.data.importers.sources import SourceFiles, files_under, only_folder, series_under
from consilium.data.importers.volumes import numbered

SOURCE = "PROSTATEx (Litjens et al., The Cancer Imaging Archive), masks of {of}"
LICENCE = "images CC BY-NC 3.0 (TCIA), masks CC BY 4.0; see licence.txt"
ZONES = ByValue(dict.fromkeys(range(1, 9), 1))  # all segments together are the gland
_PATIENT = re.compile(r"ProstateX-(\d+)", re.IGNORECASE)


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """One case per patient: the axial T2 volume that was drawn on."""
    tree = files_under(only_folder(sources, "PROSTATEx"))
    segs = [path for path in tree.files if path.suffix.lower() in (".dcm", "") and is_segmentation(tree.root / path)]
    if segs:
        return _dicom(tree, segs)
    image = r"(?:.*/)?(?!mask)[^/]*/ProstateX-(?P<n>\d+)_t2[^/]*\.nii(?:\.gz)?"
    label = r"(?:.*/)?mask_prostate/ProstateX-(?P<n>\d+)[^/]*\.nii(?:\.gz)?"
    found = numbered(tree, "prostatex", image, label, ByValue({1: 1}), name="ProstateX-")
    said = SOURCE.format(of="Cuocolo et al., European Journal of Radiology 2021")
    return prostate(found.cases, (), (*tree.doubts(), *found.doubts), said, LICENCE, tree.root)


def _dicom(tree: SourceFiles, segs: Sequence[Path]) -> Found:
    require_dicom()
    from pydicom import dcmread

    cases, doubts = {}, tree.doubts()
    places = {uid: (folder, len(all_) > 1) for folder, all_ in series_under(tree.root, doubts).items() for uid in all_}
    for path in segs:
        number = next((fit[1] for part in path.parts if (fit := _PATIENT.search(part))), "")
        try:
            head = dcmread(tree.root / path, stop_before_pixels=True)
        except Exception as error:  # pydicom raises whatever it likes at a damaged file
            doubts.append(f"{tree.root / path}: cannot be read ({error}); copy it again from its source.")
            continue
        wanted = [str(item.SeriesInstanceUID) for item in head.get("ReferencedSeriesSequence", ())]
        there = [uid for uid in wanted if uid in places]
        if not number or len(there) != 1:
            doubts.append(
                f"{tree.root / path}: there must be one series that it was drawn on, but there are {len(there)}."
            )
            continue
        folder, several = places[there[0]]
        image = folder.with_name(f"{folder.name}#{there[0]}") if several else folder
        name = f"ProstateX-{int(number):04d}"
        layers = {"": (Layer(tree.root / path, ZONES),)}
        cases[f"{name} {path}"] = RawCase("prostatex", name, name, (image,), layers, regrid=True)
    said = SOURCE.format(of="Meyer et al., PROSTATEx-Seg-Zones")
    return prostate(cases.values(), (), doubts, said, LICENCE, tree.root)
