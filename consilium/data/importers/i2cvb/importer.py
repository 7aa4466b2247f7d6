"""I2CVB: DICOM series {GE,Siemens}/Patient N/T2W, with the gland as a series in GT/prostate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from consilium.data.importers.anatomy import prostate
from consilium.data.importers.found import Found, Layer, RawCase
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.rules import Foreground
from consilium.data.importers.sources import only_folder, series_under

SOURCE = "I2CVB (Lemaître et al., Computers in Biology and Medicine 2015)"
DROPPED = {428260: "a slice of its mask is missing"}  # by FedSM's authors
_PATIENT = re.compile(r"patient[ _-]*(\d+)", re.IGNORECASE)


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """Both scanners are one site."""
    root = only_folder(sources, "I2CVB")
    scans: dict[int, Path] = {}
    glands: dict[int, Path] = {}
    cases, left_out, doubts = [], [], list[str]()
    for folder in series_under(root, doubts):
        parts = folder.relative_to(root).parts
        numbers = [int(fit[1]) for part in parts if (fit := _PATIENT.fullmatch(part))]
        words = [part.lower() for part in parts]
        if numbers and words[-1] == "prostate" and "gt" in words:
            glands[numbers[0]] = folder
        elif numbers and words[-1] == "t2w":
            scans[numbers[0]] = folder
    for number, folder in sorted(scans.items()):
        gland = glands.pop(number, None)
        if number in DROPPED and not options.all:
            left_out.append(f"patient {number}: {DROPPED[number]}.")
        elif gland is None:
            doubts.append(f"{folder}: there is no GT/prostate beside it.")
        else:
            name = f"patient{number}"
            layers = {"": (Layer(gland, Foreground(1)),)}
            cases.append(RawCase("i2cvb", name, name, (folder,), layers, regrid=True))
    doubts += [
        f"{folder}: there is no T2W beside it." for number, folder in sorted(glands.items()) if number not in DROPPED
    ]
    return prostate(cases, left_out, doubts, SOURCE, "CC BY 4.0", root)
