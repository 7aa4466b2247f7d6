"""What the phantoms of volumes share: draws that are never freaks, and NIfTI files that say where they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Spread = tuple[float, float]  # mean and standard deviation over cases

Rendered = tuple[NDArray[np.int16], NDArray[np.uint8], tuple[float, float, float]]  # image, mask, spacing in mm


def drawn(spread: Spread, rng: np.random.Generator) -> float:
    """A normal draw, cut at two standard deviations so that no case is a freak."""
    mean, deviation = spread
    return mean + deviation * float(np.clip(rng.normal(), -2, 2))


def save_case(case: Rendered, image: Path, label: Path | None) -> None:
    volume, mask, spacing = case
    save_volume(volume, spacing, image)
    if label is not None:
        save_volume(mask, spacing, label)


def save_volume(volume: NDArray[np.int16] | NDArray[np.uint8], spacing: tuple[float, float, float], path: Path) -> None:
    """Writes a NIfTI file whose columns run to the patient's left, rows backwards and slices upwards."""
    import nibabel

    shape = np.array(volume.shape[::-1])
    steps = np.array([-1, -1, 1]) * spacing[::-1]  # NIfTI counts towards right, front and up
    affine = np.diag([*steps, 1.0])
    affine[:3, 3] = -steps * (shape - 1) / 2
    image = nibabel.Nifti1Image(volume.T, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)
