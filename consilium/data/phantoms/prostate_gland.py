"""The gland of the prostate phantom: its shape from apex to base, its zones and nodules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Volume = NDArray[np.floating[Any]]  # float32, (slice, row, column), or what broadcasts to it

SMALLEST = 0.3  # a section narrower than this share of the widest is no longer drawn as gland


@dataclass(frozen=True)
class ProstateGrid:
    """Where the voxels lie in the patient, mm from the gland's centre: x to the left side, y backwards, z upwards."""

    x: Volume  # (1, row, column), as y; or every slice has its own
    y: Volume
    z: Volume  # (slice, 1, 1)
    pixel: float

    def near(self, reach: float) -> tuple[slice, slice, slice]:
        """The smallest box of voxels that holds all within `reach` of the central axis."""
        inside = (np.abs(self.x[0]) < reach) & (np.abs(self.y[0]) < reach)
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        return slice(None), slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)

    def cut(self, box: tuple[slice, slice, slice]) -> ProstateGrid:
        return ProstateGrid(self.x[:, *box[1:]], self.y[:, *box[1:]], self.z, self.pixel)


@dataclass(frozen=True)
class Nodule:
    """A ball in the transition zone, or a lesion in the peripheral zone."""

    centre: tuple[float, float, float]  # in half lengths of the gland
    radius: float  # mm
    tissue: str


@dataclass(frozen=True)
class Gland:
    """The whole gland; nothing here depends on the size in pixels."""

    half: tuple[float, float, float]  # half width, half depth, half length
    lean: float  # how far the base lies behind the apex, mm
    indent: float  # how deep the rectum presses into the back, share of the radius
    bumps: NDArray[np.float64]  # (2, 4, 2): at the middle and their change towards the base; harmonics 2…5
    inner: float  # size of the transition zone, of the gland's
    nodules: tuple[Nodule, ...]
    speckle: float  # unevenness of the peripheral zone

    def scale(self, z: Volume) -> Volume:
        """A section's size, 1 in the middle; the apex is pointed, the base blunt."""
        s = np.clip(z / self.half[2], -1, 1)
        apex, base = (1 - np.abs(s) ** 2.2) ** 0.55, (1 - np.abs(s) ** 5) ** 0.5
        return np.asarray(np.where(s < 0, apex, base), dtype=np.float32)

    def middle(self, z: Volume) -> Volume:
        """The y of a section's centre."""
        return np.asarray(self.lean * np.clip(z / self.half[2], -1.3, 1.3), dtype=np.float32)

    def reach(self, grid: ProstateGrid) -> Volume:
        """0 on the axis, 1 on the surface, growing outwards within a slice; large in slices without gland."""
        scale = self.scale(grid.z)
        size = np.maximum(scale, SMALLEST)
        dx, dy = grid.x / (self.half[0] * size), (grid.y - self.middle(grid.z)) / (self.half[1] * size)
        distance = np.sqrt(dx * dx + dy * dy)
        turn = (dx + 1j * dy) / np.maximum(distance, 1e-6)  # e^(i angle): its powers are the harmonics
        along = np.clip(grid.z / self.half[2], -1, 1)
        still, drift = (self.bumps[..., 0] - 1j * self.bumps[..., 1]).astype(np.complex64)
        wave = np.zeros_like(turn)
        for one, change in zip(still[::-1], drift[::-1]):
            wave = wave * turn + (one + change * along)
        wave *= turn * turn
        pressed = self.indent * np.clip((turn.imag - 0.8) / 0.2, 0, 1) ** 2
        reach = distance / (1 + wave.real - pressed)
        return np.asarray(np.where(scale < SMALLEST, reach + 9, reach), dtype=np.float32)

    def core(self, grid: ProstateGrid) -> Volume:
        """`reach` of the transition zone: in front of the middle, small at the apex."""
        scale = np.maximum(self.scale(grid.z), SMALLEST)
        along = np.clip(grid.z / self.half[2], -1, 1)
        size = self.inner * scale * np.clip(0.85 + 0.55 * along, 0.35, 1.1)
        dy = grid.y - self.middle(grid.z) + 0.20 * self.half[1] * scale
        return np.asarray(np.hypot(grid.x / (self.half[0] * size), dy / (self.half[1] * size)), dtype=np.float32)


def draw_gland(rng: np.random.Generator) -> Gland:
    """A gland; large ones have more nodules, as in life."""
    growth = float(np.clip(rng.normal(0, 1), -1.8, 2.2))
    half = (
        27.0 + 2.6 * growth + rng.uniform(-1.5, 1.5),
        20.5 + 2.3 * growth + rng.uniform(-1.5, 1.5),
        24.5 + 1.5 * growth + rng.uniform(-1.0, 1.0),
    )
    shrink = np.array([[1.0], [1.4], [2.5], [4.0]])  # smooth: high harmonics are small
    bumps = rng.normal(0, 0.030, (2, 4, 2)) / shrink
    bumps[:, 1, 1] += np.array([0.025, 0.0])  # broader behind than in front
    nodules = [_draw_nodule(rng) for _ in range(int(rng.integers(4, 9) + 2 * max(0.0, growth)))]
    if rng.random() < 0.45:
        side = 1 if rng.random() < 0.5 else -1
        centre = (side * rng.uniform(0.25, 0.6), rng.uniform(0.45, 0.65), rng.uniform(-0.6, 0.5))
        nodules.append(Nodule(centre, rng.uniform(3.0, 6.0), "lesion"))
    return Gland(
        half=half,
        lean=rng.uniform(1.0, 6.0),
        indent=rng.uniform(0.02, 0.14),
        bumps=bumps,
        inner=float(np.clip(0.68 + 0.05 * growth + rng.normal(0, 0.03), 0.58, 0.80)),
        nodules=tuple(nodules),
        speckle=rng.uniform(0.5, 1.2),
    )


def _draw_nodule(rng: np.random.Generator) -> Nodule:
    angle, out = rng.uniform(-math.pi, math.pi), 0.45 * math.sqrt(rng.random())
    centre = (out * math.cos(angle), -0.2 + out * math.sin(angle), rng.uniform(-0.45, 0.85))
    return Nodule(centre, rng.uniform(2.5, 7.5), str(rng.choice(["glandular nodule", "stromal nodule"])))
