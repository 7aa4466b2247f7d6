"""The papers' whole federations, from the folders of their sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from consilium.data.importers.abdomenct1k import importer as abdomenct1k
from consilium.data.importers.amos import importer as amos
from consilium.data.importers.btcv import importer as btcv
from consilium.data.importers.drishti import importer as drishti
from consilium.data.importers.found import Found
from consilium.data.importers.i2cvb import importer as i2cvb
from consilium.data.importers.layouts import need_cases
from consilium.data.importers.msd_prostate import importer as msd_prostate
from consilium.data.importers.nci_isbi import importer as nci_isbi
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.promise12 import importer as promise12
from consilium.data.importers.prostatex import importer as prostatex
from consilium.data.importers.refuge import importer as refuge
from consilium.data.importers.riga import importer as riga
from consilium.data.importers.rimone import importer as rimone
from consilium.data.importers.word import importer as word
from consilium.errors import StudyError

Finder = Callable[[Sequence[Path], ImportOptions], Found]

DATASETS: dict[str, Finder] = {
    **{"drishti": drishti.find, "riga": riga.find, "rimone": rimone.find, "refuge": refuge.find},
    **{"i2cvb": i2cvb.find, "msd-prostate": msd_prostate.find, "nci-isbi": nci_isbi.find},
    **{"promise12": promise12.find, "prostatex": prostatex.find},
    **{"word": word.find, "abdomenct1k": abdomenct1k.find, "amos": amos.find, "btcv": btcv.find},
}
FEDERATIONS: dict[str, tuple[str, ...]] = {
    "fedsm-retina": ("drishti", "riga", "rimone", "refuge"),
    "fedsm-prostate": ("i2cvb", "msd-prostate", "nci-isbi", "promise12", "prostatex"),
    "ufps-abdomen": ("word", "abdomenct1k", "amos", "btcv"),
}
# What each hospital annotates in the UFPS paper's first division; BTCV, outside the federation, has all labels.
ANNOTATED = {"word": ("kidney",), "abdomenct1k": ("spleen", "pancreas"), "amos": ("liver",)}


def find_federation(name: str, folders: Mapping[str, Path], options: ImportOptions) -> list[Found]:
    """What each source holds; a source that is not given is left out, but one at least is needed."""
    members = FEDERATIONS[name]
    for given in folders:
        if given not in members:
            raise StudyError(
                f"--{given} is no source of {name}; its sources are {', '.join(f'--{m}' for m in members)}."
            )
    if not folders:
        raise StudyError(
            f"`import {name}` needs the folders of its sources: {', '.join(f'--{m} DIR' for m in members)}."
        )
    parts = [_part(member, folders[member], options) for member in members if member in folders]
    if name == "ufps-abdomen":
        parts = [replace(part, annotated=ANNOTATED) for part in parts]
    missing = [member for member in members if member not in folders]
    if missing:
        parts[0] = replace(parts[0], left_out=(*parts[0].left_out, f"{', '.join(missing)}: no folder was given."))
    return parts


def _part(member: str, folder: Path, options: ImportOptions) -> Found:
    """What one source holds. A folder without cases is a mistake: its hospital would be missing without a word."""
    found = DATASETS[member]([folder], options)
    need_cases(member, found, folder)
    return replace(found, left_out=tuple(f"{member}: {line}" for line in found.left_out))
