"""AMOS22: NIfTI in imagesTr/labelsTr and imagesVa/labelsVa; numbers above 500 are MR."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.importers.anatomy import abdomen, organs
from consilium.data.importers.found import Found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder
from consilium.data.importers.volumes import numbered
from consilium.wording import counted

SOURCE = "AMOS22 (Ji et al., NeurIPS 2022)"
RULE = organs({1: "spleen", 2: "kidney", 3: "kidney", 6: "liver", 10: "pancreas"})
LAST_CT = 500


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """CT only. The UFPS paper has 200 volumes, those of training; --all takes the validation's too."""
    tree = files_under(only_folder(sources, "AMOS22"))
    volume = r"(?:.*/)?{}(?P<split>Tr|Va|Ts)/amos_(?P<n>\d+)\.nii(?:\.gz)?"
    found = numbered(tree, "amos", volume.format("images"), volume.format("labels"), RULE)
    ct = [case for case in found.cases if found.numbers[case.name] <= LAST_CT]
    cases = [case for case in ct if options.all or case.split == "train"]
    left_out = []
    if len(found.cases) > len(ct):
        left_out.append(f"{counted(len(found.cases) - len(ct), 'volume')} with a number above {LAST_CT}: MR.")
    if len(ct) > len(cases):
        skipped = counted(len(ct) - len(cases), "volume")
        left_out.append(f"{skipped} of the validation, which the paper does not use (--all takes them).")
    if found.bare:
        left_out.append(f"{counted(len(found.bare), 'volume')} without labels, of the challenge's test.")
    return abdomen(cases, left_out, (*tree.doubts(), *found.doubts), SOURCE, "CC BY-NC-SA 4.0", tree.root)
