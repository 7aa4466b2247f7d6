"""Scores of a predicted mask against the true one, and the clean-up of predicted masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
SCORES = (
    *("dice", "jaccard", "sensitivity", "specificity", "volume_error", "volume_error_abs", "missed"),
    *("hd", "hd95", "hd_mm", "hd95_mm", "false_positive_volume"),
)  # that `overlap` may give beside "empty"
SMALL = 0.2  # a piece below this share of its label's largest is dropped


def overlap(predicted: Mask, true: Mask, full: bool, spacing: Sequence[float] | None = None) -> dict[str, float]:
    """Scores of one mask; an empty truth is counted, not scored. `full` adds all scores beside Dice."""
    both, either = int((predicted & true).sum()), int((predicted | true).sum())
    size, found = int(true.sum()), int(predicted.sum())
    if not size:
        return {"empty": 1.0, "false_positive_volume": float(found)} if full else {"empty": 1.0}
    scores = {"dice": 2 * both / (size + found)}
    if not full:
        return scores
    outside = true.size - size
    scores["jaccard"] = both / either
    scores["sensitivity"] = both / size
    if outside:
        scores["specificity"] = (outside - (found - both)) / outside
    scores["volume_error"] = (found - size) / size
    scores["volume_error_abs"] = abs(found - size) / size
    if not found:
        return {**scores, "missed": 1.0}  # an empty prediction has no distance: it is counted
    scores["hd"], scores["hd95"] = surface_distances(predicted, true)
    if spacing is not None:
        scores["hd_mm"], scores["hd95_mm"] = surface_distances(predicted, true, spacing)
    return scores


def surface_distances(predicted: Mask, true: Mask, spacing: Sequence[float] | None = None) -> tuple[float, float]:
    """The Hausdorff distance and its 95th percentile, the larger of both directions; in voxels, or by `spacing`."""
    from scipy.ndimage import distance_transform_edt

    box = _box(predicted | true)  # all surfaces lie in it
    edges = [_edge(mask[box]) for mask in (predicted, true)]
    ways = [
        distance_transform_edt(~there, sampling=None if spacing is None else list(spacing))[here]
        for here, there in (edges, reversed(edges))
    ]
    return max(float(way.max()) for way in ways), max(float(np.percentile(way, 95)) for way in ways)


def _box(mask: Mask) -> tuple[slice, ...]:
    box = []
    for axis in range(mask.ndim):
        hit = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        box.append(slice(int(hit[0]), int(hit[-1]) + 1))
    return tuple(box)


def _edge(mask: Mask) -> Mask:
    """The voxels of a mask that touch a voxel outside it; beyond the image's border is outside."""
    from scipy.ndimage import binary_erosion

    edge: Mask = mask & ~binary_erosion(mask)
    return edge


def cleaned(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """An integer mask with every label's holes filled and its small pieces dropped.

    A hole is filled only where nothing else was predicted, so labels never take each other's voxels.
    """
    from scipy.ndimage import binary_fill_holes, generate_binary_structure, label

    clean = np.zeros_like(mask)
    touching: Any = generate_binary_structure(mask.ndim, mask.ndim)  # also over edges and corners
    for value in np.unique(mask[mask > 0]):
        filled = binary_fill_holes(mask == value) & np.isin(mask, (0, value))
        pieces, _ = label(filled, touching)
        sizes = np.bincount(pieces.ravel())
        sizes[0] = 0
        clean[np.isin(pieces, np.flatnonzero(sizes >= SMALL * sizes.max())) & (pieces > 0)] = value
    return clean
