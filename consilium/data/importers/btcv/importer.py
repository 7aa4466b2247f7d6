"""BTCV: NIfTI img/img0001.nii.gz and label/label0001.nii.gz of the 30 training volumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from consilium.data.importers.anatomy import abdomen, organs
from consilium.data.importers.found import Found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder
from consilium.data.importers.volumes import numbered
from consilium.wording import counted

SOURCE = "BTCV, Beyond the Cranial Vault (Landman et al., MICCAI workshop 2015)"
RULE = organs({1: "spleen", 2: "kidney", 3: "kidney", 6: "liver", 11: "pancreas"})


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """All volumes are test cases: in the UFPS paper this hospital is outside the federation."""
    tree = files_under(only_folder(sources, "BTCV"))
    image, label = (rf"(?:.*/)?{start}(?P<n>\d+)\.nii(?:\.gz)?" for start in ("img", "label"))
    found = numbered(tree, "btcv", image, label, RULE, unlabelled="test")
    left_out = [f"{counted(len(found.bare), 'volume')} of the challenge's test, without labels."] if found.bare else []
    cases = [replace(case, split="test") for case in found.cases]
    made = abdomen(cases, left_out, (*tree.doubts(), *found.doubts), SOURCE, "see the challenge's rules", tree.root)
    return replace(made, published_splits=True)
