"""WORD: NIfTI in imagesTr/labelsTr, imagesVal/labelsVal, imagesTs/labelsTs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.importers.anatomy import abdomen, organs
from consilium.data.importers.found import Found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder
from consilium.data.importers.volumes import numbered
from consilium.wording import counted

SOURCE = "WORD (Luo et al., Medical Image Analysis 2022)"
RULE = organs({1: "liver", 2: "spleen", 3: "kidney", 4: "kidney", 8: "pancreas"})


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """The UFPS paper has 120 volumes, those of training and validation; --all takes the test's too."""
    tree = files_under(only_folder(sources, "WORD"))
    volume = r"(?:.*/)?{}(?P<split>Tr|Val|Ts)/word_(?P<n>\d+)\.nii(?:\.gz)?"
    found = numbered(tree, "word", volume.format("images"), volume.format("labels"), RULE)
    cases = [case for case in found.cases if options.all or case.split != "test"]
    skipped = len(found.cases) - len(cases) + len(found.bare)
    left_out = [f"{counted(skipped, 'volume')} of the test, which the paper does not use."] if skipped else []
    return abdomen(
        cases, left_out, (*tree.doubts(), *found.doubts), SOURCE, "for research; ask the publisher", tree.root
    )
