"""A site's preprocessed cases as batches for training and scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consilium.batch import Batch
from consilium.data.preprocess import shape_text
from consilium.data.site_arrays import SiteArrays
from consilium.errors import DataError
from consilium.learning.augment import augment
from consilium.randomness import derive, numpy_generator
from consilium.stopwatch import Stopwatch

Array = NDArray[Any]


@dataclass(frozen=True)
class CaseLocation:
    """Where one case lies: a site's arrays, the case's index, and of a volume taken apart the slice."""

    part: SiteArrays
    index: int
    slice: int | None = None

    @property
    def name(self) -> str:
        name = self.part.cases[self.index].name
        return name if self.slice is None else f"{name}#{self.slice:03d}"

    def image(self) -> Array:
        image = self.part.image(self.index)
        return image if self.slice is None else image[:, self.slice]

    def truth(self) -> Any:
        truth = self.part.truth(self.index)
        return truth if self.slice is None or isinstance(truth, int) else truth[self.slice]

    def spacing(self) -> tuple[float, ...] | None:
        """A slice is scored within its volume, so its spacing is the volume's."""
        return self.part.spacing(self.index)


Loaded = tuple[
    Array, Any, Array | None, CaseLocation
]  # image, truth and maps as they will be used, where they came from


@dataclass(frozen=True)
class Cases:
    """The cases of one site, or of several as one (pooled training); files were decoded when the cache was made."""

    parts: tuple[SiteArrays, ...]
    augmentations: tuple[str, ...] = ()
    patch: tuple[int, ...] = ()  # train on patches of this size; () takes whole images
    slices: bool = False  # volumes are taken apart along their first axis; training sees slices with a label only
    maps: Callable[[str], Tensor] | None = None  # by case, (maps, *spatial): cut and turned with the training images
    unlabelled: bool = False  # training cases without a mask are among them, with a truth that shows no label
    patch_around: float | str = "labels"  # every second patch; a number: around intensity above it
    stopwatch: Stopwatch = field(default_factory=Stopwatch, compare=False)  # looked at before every batch

    def __len__(self) -> int:
        return sum(map(len, self._training))

    def cases(self, split: str) -> Sequence[str]:
        return [part.cases[i].name for part in self.parts for i in part.indices(split, self.unlabelled)]

    @cached_property
    def _training(self) -> list[list[CaseLocation]]:
        """The training cases, part by part."""
        return [
            [place for i in part.indices("train", self.unlabelled) for place in self._taken_apart(part, i)]
            for part in self.parts
        ]

    def _taken_apart(self, part: SiteArrays, i: int) -> list[CaseLocation]:
        if not self.slices:
            return [CaseLocation(part, i)]
        labelled = np.asarray(part.truth(i)).any(axis=(1, 2)) | (part.labels(i) == ())
        return [CaseLocation(part, i, int(z)) for z in np.flatnonzero(labelled)]

    def batches(self, batch_size: int, epoch: int, seed: int) -> Iterator[Batch]:
        """All training cases once, in a seeded order, in batches of nearly equal size.

        Pooled sites make as many steps as they would apart: the sum of ⌈n_k / B⌉.
        """
        places = [place for part in self._training for place in part]
        count = sum(-(-len(part) // batch_size) for part in self._training)
        order = numpy_generator(seed, epoch).permutation(len(places))
        for chunk in np.array_split(order, count) if count else []:
            yield self._batch([self._training_case(places[i], seed, epoch, int(i)) for i in chunk])

    def _training_case(self, place: CaseLocation, seed: int, epoch: int, number: int) -> Loaded:
        image, truth = place.image(), place.truth()
        maps = None if self.maps is None else self.maps(place.name).numpy()
        if not (self.patch or self.augmentations):
            return image, truth, maps, place
        seed = derive(seed, epoch, number)
        mask = truth if isinstance(truth, np.ndarray) else None
        if self.patch:
            image, mask, maps = _patch(image, mask, maps, self.patch, numpy_generator(seed, "patch"), self.patch_around)
        if self.augmentations:
            image, mask, maps = augment(image, mask, self.augmentations, derive(seed, "augment"), maps)
        return image, truth if mask is None else mask, maps, place

    @cached_property
    def _by_patient(self) -> dict[str, list[tuple[int, CaseLocation]]]:
        """The training cases of every patient, with their numbers; patients of pooled sites are different people."""
        found: dict[str, list[tuple[int, CaseLocation]]] = {}
        number = 0
        for site, places in enumerate(self._training):
            for place in places:
                patient = place.part.cases[place.index].patient
                found.setdefault(f"{site}/{patient}" if len(self.parts) > 1 else patient, []).append((number, place))
                number += 1
        return found

    def patients(self) -> list[str]:
        return list(self._by_patient)

    def of_patients(self, chosen: Sequence[int], batch_size: int, seed: int | None) -> Iterator[Batch]:
        everyone = list(self._by_patient.values())
        group: list[Loaded] = []
        owners: list[int] = []
        for patient in chosen:
            for number, place in everyone[patient]:
                whole = (place.image(), place.truth(), None, place)
                case = whole if seed is None else self._training_case(place, seed, 0, number)
                if group and (len(group) == batch_size or case[0].shape != group[0][0].shape):
                    yield replace(self._batch(group), patients=tuple(owners))
                    group, owners = [], []
                group.append(case)
                owners.append(patient)
        if group:
            yield replace(self._batch(group), patients=tuple(owners))

    def with_maps(self, maps: Callable[[str], Tensor]) -> Cases:
        return replace(self, maps=maps)

    def with_unlabelled(self) -> Cases:
        return replace(self, unlabelled=True)

    def whole(self, split: str, batch_size: int) -> Iterator[Batch]:
        """Unaugmented whole cases in table order; neighbours of one shape share a batch, a volume's slices are one."""
        group: list[Loaded] = []
        for place in (CaseLocation(part, i) for part in self.parts for i in part.indices(split, self.unlabelled)):
            if self.slices:
                slices = [CaseLocation(place.part, place.index, z) for z in range(place.image().shape[1])]
                yield replace(self._batch([(s.image(), s.truth(), None, s) for s in slices]), volume=place.name)
                continue
            case = (place.image(), place.truth(), None, place)
            if group and (len(group) == batch_size or case[0].shape != group[0][0].shape):
                yield self._batch(group)
                group = []
            group.append(case)
        if group:
            yield self._batch(group)

    def _batch(self, group: Sequence[Loaded]) -> Batch:
        self.stopwatch.look()
        return _batch(group)


def _batch(cases: Sequence[Loaded]) -> Batch:
    shapes = sorted({image.shape[1:] for image, *_ in cases})
    if len(shapes) > 1:
        raise DataError(
            f"images of {shape_text(shapes[0])} and of {shape_text(shapes[-1])} cannot be in one batch; "
            "set [task] patch, [preprocess] size, or [local] batch_size = 1."
        )
    places = [place for *_, place in cases]
    maps = [beside for _, _, beside, _ in cases if beside is not None]
    return Batch(
        torch.from_numpy(np.stack([image for image, *_ in cases])),
        _truths([truth for _, truth, *_ in cases]),
        tuple(place.name for place in places),
        labels=tuple(place.part.labels(place.index) for place in places),
        spacings=tuple(place.spacing() for place in places),
        beside=torch.from_numpy(np.stack(maps)) if maps else None,
    )


def _truths(truths: Sequence[Any]) -> Tensor:
    if isinstance(truths[0], np.ndarray):
        return torch.from_numpy(np.stack(truths))
    return torch.tensor([int(truth) for truth in truths])


def _patch(
    image: Array,
    mask: Array | None,
    maps: Array | None,
    size: Sequence[int],
    generator: np.random.Generator,
    around: float | str = "labels",
) -> tuple[Array, Array | None, Array | None]:
    """A random window; small cases are padded.

    Every second time it lies around a voxel of the site's own labels, or where the first channel is above `around`.
    """
    room = image.shape[1:]
    short = [max(0, want - have) for want, have in zip(size, room)]
    if any(short):
        margins = [(gap // 2, gap - gap // 2) for gap in short]
        image = np.pad(image, [(0, 0), *margins], mode="edge")
        mask = None if mask is None else np.pad(mask, margins)
        maps = None if maps is None else np.pad(maps, [(0, 0), *margins])
        room = image.shape[1:]
    centre = [int(generator.integers(have)) for have in room]
    if mask is not None and generator.random() < 0.5:
        inside = np.flatnonzero(mask if isinstance(around, str) else image[0] > around)
        if len(inside):
            centre = [int(c) for c in np.unravel_index(inside[generator.integers(len(inside))], mask.shape)]
    corner = [min(max(0, c - want // 2), have - want) for c, want, have in zip(centre, size, room)]
    window = tuple(slice(c, c + want) for c, want in zip(corner, size))
    inner = (slice(None), *window)
    return image[inner], None if mask is None else mask[window], None if maps is None else maps[inner]
