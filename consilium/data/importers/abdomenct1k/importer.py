"""AbdomenCT-1K: images Case_NNNNN_0000.nii.gz in some folders, masks Case_NNNNN.nii.gz in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.importers.anatomy import abdomen, organs
from consilium.data.importers.found import Found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder
from consilium.data.importers.volumes import numbered
from consilium.wording import counted

SOURCE = "AbdomenCT-1K (Ma et al., IEEE TPAMI 2022)"
RULE = organs({1: "liver", 2: "kidney", 3: "spleen", 4: "pancreas"})
LARGE = 30_000_000  # bytes: the UFPS paper's code takes the files below it, 266 volumes


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """The volumes whose files are below 30 MB, as the UFPS paper takes them; --all takes every one."""
    tree = files_under(only_folder(sources, "AbdomenCT-1K"))
    image, label = (rf"(?:.*/)?Case_(?P<n>\d+){end}\.nii(?:\.gz)?" for end in ("_0000", ""))
    found = numbered(tree, "abdomenct1k", image, label, RULE)
    small = [case for case in found.cases if options.all or case.images[0].stat().st_size < LARGE]
    skipped = len(found.cases) - len(small)
    large = f"{counted(skipped, 'volume')} of 30 MB or more, which the paper does not use (--all takes them)."
    left_out = [large] if skipped else []
    return abdomen(small, left_out, (*tree.doubts(), *found.doubts), SOURCE, "CC BY 4.0", tree.root)
