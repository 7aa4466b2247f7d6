"""Batches of a site's cases, and the data they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A few cases, augmented."""

    images: Tensor  # (batch, channels, *spatial)
    truth: Tensor  # segmentation: (batch, *spatial) integers; classification: (batch,)
    cases: tuple[str, ...]
    volume: str = ""  # the images are all slices of this volume, in order; empty: separate cases
    labels: tuple[tuple[str, ...], ...] | None = None  # those each truth shows; 0: background or unknown. None: all
    spacings: tuple[tuple[float, ...] | None, ...] | None = None  # of each case's voxels, mm; None: not known
    beside: Tensor | None = None  # (batch, maps, *spatial): a method's values for every voxel
    patients: tuple[int, ...] | None = None  # the patient of each case, as an index in `SiteData.patients`

    def labels_of(self, i: int) -> tuple[str, ...] | None:
        """The labels that are annotated in case `i`; all other labels are unknown there, not absent."""
        return None if self.labels is None else self.labels[i]

    @property
    def bare(self) -> Tensor:
        """Boolean, (batch,): cases without a mask."""
        return torch.tensor([self.labels_of(i) == () for i in range(len(self.cases))], device=self.images.device)

    def spacing_of(self, i: int) -> tuple[float, ...] | None:
        return None if self.spacings is None else self.spacings[i]

    def only(self, i: int) -> Batch:
        """Case `i` alone."""
        return self.part(slice(i, i + 1))

    def part(self, rows: slice) -> Batch:
        """A range of cases."""
        return replace(
            self,
            images=self.images[rows],
            truth=self.truth[rows],
            cases=self.cases[rows],
            labels=None if self.labels is None else self.labels[rows],
            spacings=None if self.spacings is None else self.spacings[rows],
            beside=None if self.beside is None else self.beside[rows],
            patients=None if self.patients is None else self.patients[rows],
        )


class SiteData(Protocol):
    """The cases of one site, preprocessed."""

    def batches(self, batch_size: int, epoch: int, seed: int) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...
    def cases(self, split: str) -> Sequence[str]: ...
    def whole(self, split: str, batch_size: int) -> Iterator[Batch]: ...

    def patients(self) -> Sequence[str]:
        """The patients with training cases."""
        ...

    def of_patients(self, chosen: Sequence[int], batch_size: int, seed: int | None) -> Iterator[Batch]:
        """All training cases of some patients, given as indices in `patients`; a patient's cases are consecutive.

        They are cut and augmented as in training, by `seed`; None: they stay whole. `batch.patients` gives
        their patients. A batch holds images of one shape, up to a maximum number.
        """
        ...

    def with_unlabelled(self) -> SiteData:
        """The same cases and those without a mask, in which `batch.labels` is empty."""
        ...

    def with_maps(self, maps: Callable[[str], Tensor]) -> SiteData:
        """The same cases, with maps (maps, *spatial) of each beside it in training batches."""
        ...
