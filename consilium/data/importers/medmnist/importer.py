"""MedMNIST: any 2-D set with one class per picture, as its .npz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from consilium.data.importers.published import Published, PublishedSplit, joined, one_file, part, read_npz
from consilium.errors import DataError

SPLITS = ("train", "val", "test")
ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right"),
    *("liver", "lung-left", "lung-right", "pancreas", "spleen"),
)
TISSUES = (
    *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
    *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
)
# the file says numbers only; the names of the APPLE paper's two sets, by the beginning of the file's name
CLASSES = {"pathmnist": TISSUES, "organamnist": ORGANS, "organmnist_axial": ORGANS}


def read(sources: Sequence[Path]) -> Published:
    """All three splits as one: the APPLE paper draws train and test anew, because they come from different clinics."""
    path = one_file(sources, ".npz", "MedMNIST")
    arrays = read_npz(path, [f"{split}_{kind}" for split in SPLITS for kind in ("images", "labels")])
    every = joined(_split(path, arrays, split) for split in SPLITS)
    count = 1 + int(every.labels.max())
    named = next((names for start, names in CLASSES.items() if path.name.lower().startswith(start)), ())
    classes = named if len(named) == count else tuple(map(str, range(count)))
    return Published(classes, every, None, f"MedMNIST (Yang et al., 2021), {path.stem}", "see medmnist.com")


def _split(path: Path, arrays: Mapping[str, NDArray[Any]], split: str) -> PublishedSplit:
    images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise DataError(f"{path} holds pictures of shape {images.shape[1:]}; only the 2-D sets can be imported.")
    if labels.ndim == 2 and labels.shape[1] > 1:
        several = f"{labels.shape[1]} labels for each picture"
        raise DataError(f"{path} has {several}; only sets with one class per picture can be imported.")
    return part(path, images, labels.reshape(-1))
