"""Medical Segmentation Decathlon, Task05_Prostate: NIfTI of two channels (T2, ADC) and two zones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consilium.data.importers.anatomy import GLAND, prostate
from consilium.data.importers.found import Found
from consilium.data.importers.options import ImportOptions
from consilium.data.importers.sources import files_under, only_folder
from consilium.data.importers.volumes import numbered
from consilium.wording import counted

SOURCE = "Medical Segmentation Decathlon, Task05 Prostate (Antonelli et al., Nature Communications 2022)"


def find(sources: Sequence[Path], options: ImportOptions) -> Found:
    """The T2 channel; both zones are the gland."""
    tree = files_under(only_folder(sources, "Task05_Prostate"))
    volume = r"(?:.*/)?{}(?P<split>Tr|Ts)/prostate_(?P<n>\d+)\.nii(?:\.gz)?"
    found = numbered(tree, "msd", volume.format("images"), volume.format("labels"), GLAND, channel=0)
    left_out = [f"{counted(len(found.bare), 'volume')} without labels, of the challenge's test."] if found.bare else []
    return prostate(found.cases, left_out, (*tree.doubts(), *found.doubts), SOURCE, "CC BY-SA 4.0", tree.root)
