"""MedNIST: a folder per class with pictures in it, or one .npz with `images`, `labels` and `classes`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from consilium.data.formats import PILLOW_SUFFIXES, suffix_of
from consilium.data.images import read_image
from consilium.data.importers.published import Published, files_in, one_file, part, read_npz
from consilium.errors import DataError
from consilium.wording import counted

SOURCE = "MedNIST (Erickson et al., from TCIA, RSNA and NIH collections)"
LICENCE = "CC-BY-SA-4.0"


def read(sources: Sequence[Path]) -> Published:
    """Published without a split, so the test cases are drawn."""
    if len(sources) == 1 and sources[0].is_dir() and not any(sources[0].glob("*.npz")):
        return _folders(sources[0])
    path = one_file(sources, ".npz", "MedNIST, or one folder of class folders")
    arrays = read_npz(path, ["images", "labels", "classes"])
    names = tuple(str(name) for name in arrays["classes"])
    images = arrays["images"]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise DataError(f"{path} holds pictures of shape {images.shape[1:]}; they must be grey or RGB, 2-D.")
    return Published(names, part(path, images, arrays["labels"].reshape(-1), len(names)), None, SOURCE, LICENCE)


def _folders(folder: Path) -> Published:
    files = [path for path in files_in([folder]) if suffix_of(path) in PILLOW_SUFFIXES]
    files = [path for path in files if len(path.relative_to(folder).parts) == 2]
    classes = sorted({path.parent.name for path in files})
    if len(classes) < 2:
        raise DataError(
            f"{folder} has pictures in {counted(len(classes), 'folder')}; there must be a folder for each class."
        )
    pictures = [read_image(path, 2, 1).array[0] for path in files]
    sizes = sorted({picture.shape for picture in pictures})
    if len(sizes) > 1:
        raise DataError(
            f"{folder} has pictures of {len(sizes)} sizes, such as {sizes[0]} and {sizes[1]}; give one size."
        )
    labels = np.array([classes.index(path.parent.name) for path in files])
    return Published(tuple(classes), part(folder, np.stack(pictures), labels), None, SOURCE, LICENCE)
