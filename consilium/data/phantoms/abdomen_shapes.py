"""Shapes as distances: negative inside, about the millimetres to the surface outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Volume = NDArray[np.floating[Any]]  # float32, (slice, row, column), or what broadcasts to it
Point = tuple[float, float, float]  # x, y, z in mm

FAR = np.float32(99.0)


@dataclass(frozen=True)
class AbdomenGrid:
    """Where the voxels lie in a standard patient, mm: x to the left side, y backwards, z upwards; 0 is at the first
    lumbar vertebra in the middle of the abdomen. Every patient is the standard one, stretched and pushed about."""

    x: Volume
    y: Volume
    z: Volume
    edge: float  # how wide an edge is drawn

    @cached_property
    def _spans(self) -> list[tuple[Volume, Volume, int]]:
        """For x, y and z: the least and the greatest value along the array axis that carries it."""
        found = []
        for values, axis in ((self.x, 2), (self.y, 1), (self.z, 0)):
            others = tuple(other for other in range(3) if other != axis)
            found.append((values.min(axis=others), values.max(axis=others), axis))
        return found

    def around(self, points: Sequence[Point], reach: float) -> tuple[slice, slice, slice]:
        """A box of voxels that holds all within `reach` of these points."""
        corners = np.array(points)
        low, high = corners.min(axis=0) - reach, corners.max(axis=0) + reach
        spans = [slice(0, 0)] * 3
        for first, last, (least, greatest, axis) in zip(low, high, self._spans):
            hit = np.flatnonzero((greatest > first) & (least < last))
            spans[axis] = slice(int(hit[0]), int(hit[-1]) + 1) if hit.size else slice(0, 0)
        return spans[0], spans[1], spans[2]

    def cut(self, box: tuple[slice, slice, slice]) -> AbdomenGrid:
        return AbdomenGrid(self.x[box], self.y[box], self.z[box], self.edge)


def ellipsoid(grid: AbdomenGrid, centre: Point, half: Point, turn: float = 0.0, tilt: float = 0.0) -> Volume:
    """`turn` is in the axial plane, `tilt` in the coronal one, in radians."""
    dx, dy, dz = grid.x - centre[0], grid.y - centre[1], grid.z - centre[2]
    if turn:
        dx, dy = math.cos(turn) * dx + math.sin(turn) * dy, math.cos(turn) * dy - math.sin(turn) * dx
    if tilt:
        dx, dz = math.cos(tilt) * dx + math.sin(tilt) * dz, math.cos(tilt) * dz - math.sin(tilt) * dx
    away = np.sqrt((dx / half[0]) ** 2 + (dy / half[1]) ** 2 + (dz / half[2]) ** 2)
    return np.asarray((away - 1) * min(half), dtype=np.float32)


def column(grid: AbdomenGrid, x: Volume | float, y: Volume | float, rx: Volume | float, ry: Volume | float) -> Volume:
    """An ellipse in every slice; centre and radii may change with z."""
    away = np.hypot((grid.x - x) / rx, (grid.y - y) / ry)
    return np.asarray((away - 1) * np.minimum(rx, ry), dtype=np.float32)


def tube(grid: AbdomenGrid, points: Sequence[Point], radii: Sequence[float]) -> Volume:
    """A chain of round pieces whose thickness changes evenly from point to point."""
    distance = np.full(grid.x.shape, FAR, dtype=np.float32)
    for (ax, ay, az), (bx, by, bz), ra, rb in zip(points, points[1:], radii, radii[1:]):
        vx, vy, vz = bx - ax, by - ay, bz - az
        length = max(vx * vx + vy * vy + vz * vz, 1e-6)
        dx, dy, dz = grid.x - ax, grid.y - ay, grid.z - az
        along = np.clip((dx * vx + dy * vy + dz * vz) / length, 0, 1)
        gap = np.sqrt((dx - along * vx) ** 2 + (dy - along * vy) ** 2 + (dz - along * vz) ** 2)
        np.minimum(distance, gap - (ra + along * (rb - ra)), out=distance)
    return distance


def melted(a: Volume, b: Volume, width: float) -> Volume:
    """The union of two shapes, with the crease between them filled."""
    overlap = np.maximum(width - np.abs(a - b), 0) / width
    return np.asarray(np.minimum(a, b) - 0.25 * width * overlap * overlap, dtype=np.float32)


def lay(picture: Volume, distance: Volume, value: Volume | float, edge: float) -> None:
    """Puts a tissue over what is drawn, in place; its edge mixes both."""
    share = np.clip(0.5 - distance / edge, 0, 1)
    picture += share * (value - picture)
