"""What `predict` writes beside a mask: maps of probabilities, and a picture with the mask's outlines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consilium.data.formats import suffix_of
from consilium.data.images import ImageArray, orientation
from consilium.data.orientation import RADIOLOGICAL, affine_of, axes_between, turned
from consilium.reports.style import INK, as_picture, label_colour, outline, sheet, to_bytes

MAPS, OVERLAY = ("probabilities.npy", "probabilities.nii.gz"), "overlay.png"  # endings of files beside a mask


def beside(mask: Path, ending: str) -> Path:
    """A file beside a mask: eye-overlay.png of eye.png."""
    return mask.with_name(f"{mask.name.removesuffix(suffix_of(mask))}-{ending}")


def write_probabilities(chances: NDArray[np.float32], picture: ImageArray, mask: Path) -> Path:
    """One map per label, (labels, *spatial): a 4-D NIfTI where the image has a place in the patient, else npy."""
    affine = affine_of(picture.geometry)
    path = beside(mask, MAPS[affine is not None])
    if affine is None:
        np.save(path, chances)
        return path
    import nibabel

    nibabel.save(nibabel.Nifti1Image(np.transpose(chances, (3, 2, 1, 0)), affine), path)
    return path


def write_overlay(mask: NDArray[Any], picture: ImageArray, labels: Sequence[str], written: Path) -> Path:
    """The image with the outlines of every label; of a volume the slice that shows most of them."""
    image, seen = picture.array, mask
    if mask.ndim == 3:
        axes = axes_between(orientation(picture), RADIOLOGICAL)
        image, seen = turned(image, axes), turned(mask, axes)
        place = int((seen > 0).sum(axis=(1, 2)).argmax()) if seen.any() else len(seen) // 2
        image, seen = image[:, place], seen[place]
    height, width = seen.shape
    with sheet(height=4.6 * height / width + 0.5, width=4.6) as figure:
        panel = figure.subplots()
        panel.imshow(
            as_picture(np.moveaxis(image, 0, -1) if len(image) == 3 else image[0]), cmap="gray", vmin=0, vmax=1
        )
        for value, _ in enumerate(labels, start=1):
            outline(panel, seen == value, label_colour(value - 1))
        panel.set_axis_off()
        for i, label in enumerate(labels):
            colour = label_colour(i)
            left = 0.03 + 0.94 * i / len(labels)
            figure.text(left, 0.02, label, color=colour, fontsize=9, va="bottom", backgroundcolor=INK)  # bright on dark
    path = beside(written, OVERLAY)
    path.write_bytes(to_bytes(figure, "png"))
    return path
