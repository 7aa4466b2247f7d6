"""PROMISE12: CaseNN.mhd with CaseNN_segmentation.mhd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.importers.anatomy import GLAND, prostate
from consilium.data.importers.found import Found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder
from consilium.data.importers.volumes import numbered
from consilium.wording import counted

SOURCE = "PROMISE12 (Litjens et al., Medical Image Analysis 2014)"


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """The 50 cases of the training parts; those of the test part have no masks."""
    tree = files_under(only_folder(sources, "PROMISE12"))
    image, mask = (rf"(?:.*/)?Case(?P<n>\d+){end}\.mhd" for end in ("", "_segmentation"))
    found = numbered(tree, "promise12", image, mask, GLAND, unlabelled="test")
    left_out = [f"{counted(len(found.bare), 'case')} of the test, without masks."] if found.bare else []
    return prostate(
        found.cases, left_out, (*tree.doubts(), *found.doubts), SOURCE, "see the challenge's rules", tree.root
    )
