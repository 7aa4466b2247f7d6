"""A site's preprocessed cases as the cache holds them: views into its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.orientation import RADIOLOGICAL, Axes, axes_between
from consilium.data.preprocess import Undo
from consilium.data.profile import DataProfile, ImageFacts, profile_of
from consilium.data.site_folder import Case


@dataclass(frozen=True)
class SiteArrays:
    """A site's preprocessed cases, in table order."""

    cases: tuple[Case, ...]
    folder: Path
    _images: NDArray[np.float32]  # the whole of images.bin
    _masks: NDArray[np.uint8]  # the whole of masks.bin
    _index: tuple[Mapping[str, Any], ...]
    _shown: NDArray[np.uint8] | None  # mask value -> value this site may show; None: all of them
    annotated: tuple[str, ...]  # the labels that training and validation masks show
    complete: tuple[str, ...] | None = None  # the labels that test masks show; None: those annotated

    def __len__(self) -> int:
        return len(self.cases)

    def indices(self, split: str, unlabelled: bool = False) -> list[int]:
        """The cases of a split; those without a mask only where they are asked for."""
        return [i for i, c in enumerate(self.cases) if c.split == split and (unlabelled or c.label is not None)]

    def image(self, i: int) -> NDArray[np.float32]:
        """Case `i` as (channels, *spatial), a read-only view into the file."""
        return _cut(self._images, self._index[i]["image"])

    def truth(self, i: int) -> NDArray[np.uint8] | int:
        """The mask (*spatial), read-only, without the labels this site does not annotate; or the class index.

        Of a case without a mask it is empty: all is unknown in it.
        """
        entry = self._index[i]
        if "class" in entry:
            return int(entry["class"])
        if "mask" not in entry:
            return np.zeros(entry["image"]["shape"][1:], dtype=np.uint8)
        mask = _cut(self._masks, entry["mask"])
        if self._shown is None or self._is_complete(i):
            return mask
        shown: NDArray[np.uint8] = self._shown[mask]
        shown.flags.writeable = False
        return shown

    def labels(self, i: int) -> tuple[str, ...]:
        """What the truth of case `i` shows; all else is unknown in it."""
        if self.cases[i].label is None:
            return ()
        return self.complete if self.complete is not None and self._is_complete(i) else self.annotated

    def _is_complete(self, i: int) -> bool:
        return self.complete is not None and self.cases[i].split == "test"

    def spacing(self, i: int) -> tuple[float, ...] | None:
        """The size of a preprocessed voxel in mm; None if the file does not say."""
        found = self._index[i].get("spacing")
        return None if found is None else tuple(found)

    def display_axes(self, i: int, orientation: str) -> Axes:
        """How arrays of case `i` in the study's `orientation` ("": as stored) turn into the radiological one.

        () of a picture, and of a volume whose file does not say its orientation: it is shown as it is stored.
        """
        stored = str(self._index[i]["facts"]["orientation"])
        return axes_between(stored and (orientation or stored), RADIOLOGICAL)

    def profile(self, split: str) -> DataProfile | None:
        """The ranges over the cases of a split."""
        return profile_of([ImageFacts.from_json(self._index[i]["facts"]) for i in self.indices(split, unlabelled=True)])

    def undo(self, i: int) -> Undo:
        """How to go back to the picture's own grid."""
        return Undo.from_json(self._index[i]["undo"])


def _cut(whole: NDArray[Any], place: Mapping[str, Any]) -> NDArray[Any]:
    shape = place["shape"]
    start = place["start"]
    return whole[start : start + math.prod(shape)].reshape(shape)
