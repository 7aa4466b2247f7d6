"""The vessel tree of a phantom eye: grown in eye coordinates, drawn once on a fine canvas, averaged down to any size.

Eye coordinates: the disc's centre is the origin, its mean radius is 1, +x points to the temple and +y down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Floats = NDArray[np.float64]

CANVAS = 1024  # pixels; the same drawing for every image size, so the same case shows the same vessels
STEP = 0.14  # disc radii between two points of a path
VEIN, ARTERY, REFLEX = (
    255,
    195,
    120,
)  # how much light a vessel takes, of 255; an artery has a bright line along its middle


@dataclass(frozen=True)
class Vessel:
    """One unbranched piece: points (n, 2), heading (n,) in radians, width (n,) in disc radii."""

    points: Floats
    heading: Floats
    width: Floats
    artery: bool


def grow(rng: np.random.Generator) -> list[Vessel]:
    """Four arcades, each an artery beside a vein, with their branches, and a few fine vessels from the rim."""
    trunks = [
        _trunk(rng, upper, temporal, artery)
        for upper in (True, False)
        for temporal in (True, False)
        for artery in (True, False)
    ]
    small = [_rim_vessel(rng) for _ in range(int(rng.integers(4, 8)))]
    branches = [branch for trunk in trunks for branch in _branches(rng, trunk, rate=0.75)]
    twigs = [twig for branch in branches for twig in _branches(rng, branch, rate=0.7)]
    return [*twigs, *branches, *small, *trunks]  # thick vessels are drawn last, over the thin ones


def draw(vessels: list[Vessel], place: Callable[[Floats], Floats], radius: float, size: int) -> Floats:
    """How much light the vessels take, (size, size) in 0…1; `place` maps eye to picture coordinates in 0…1."""
    canvas = Image.new("L", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(canvas)
    for vessel in vessels:
        points = place(vessel.points) * CANVAS
        width = vessel.width * radius * CANVAS
        _stroke(pen, points, width, ARTERY if vessel.artery else VEIN)
        if vessel.artery:
            _stroke(pen, points, np.where(width > 5, width / 3, 0), REFLEX)
    small = canvas.resize((size, size), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255


def _stroke(pen: ImageDraw.ImageDraw, points: Floats, width: Floats, fill: int) -> None:
    for start in range(0, len(points) - 1, 3):  # three steps at one width: a taper without a call per step
        if width[start] > 0 and points[start].min() > -50 and points[start].max() < CANVAS + 50:
            piece = [(float(x), float(y)) for x, y in points[start : start + 4]]
            pen.line(piece, fill=fill, width=max(1, round(float(width[start]))), joint="curve")


def _trunk(rng: np.random.Generator, upper: bool, temporal: bool, artery: bool) -> Vessel:
    """An arcade: up or down out of the disc, then round the macula or, on the nose's side, outwards."""
    start = np.array([rng.normal(-0.15, 0.07) + (0.12 if artery else -0.06), rng.normal(0.0, 0.08)])
    if temporal:
        heading, turn, length = rng.normal(-1.60, 0.16), rng.uniform(0.20, 0.32), rng.uniform(8.5, 11.0)
    else:
        heading, turn, length = rng.normal(-1.85, 0.18), -rng.uniform(0.10, 0.26), rng.uniform(5.0, 7.5)
    width = rng.uniform(0.09, 0.12) if artery else rng.uniform(0.12, 0.16)
    vessel = _path(rng, start, heading, turn, length, width if temporal else 0.8 * width, artery)
    return vessel if upper else _flipped(vessel)


def _rim_vessel(rng: np.random.Generator) -> Vessel:
    angle = rng.uniform(-np.pi, np.pi)
    start = 0.75 * np.array([np.cos(angle), np.sin(angle)])
    return _path(rng, start, angle, rng.normal(0, 0.15), rng.uniform(1.5, 3.5), rng.uniform(0.03, 0.06), True)


def _branches(rng: np.random.Generator, parent: Vessel, rate: float) -> Iterator[Vessel]:
    """Side branches, `rate` for each disc radius of length, alternating sides as real ones do."""
    steps = len(parent.points)
    side = 1 if rng.random() < 0.5 else -1
    at = 5 if parent.width[0] > 0.08 else 2  # trunks do not branch inside the disc
    while (at := at + 1 + int(rng.exponential(1 / (rate * STEP)))) < steps - 4:
        heading = parent.heading[at] + side * rng.uniform(0.45, 1.05)
        length = (steps - at) * STEP * rng.uniform(0.35, 0.75)
        width = parent.width[at] * rng.uniform(0.5, 0.75)
        yield _path(rng, parent.points[at], heading, -side * rng.uniform(0.0, 0.25), length, width, parent.artery)
        side = -side


def _path(
    rng: np.random.Generator, start: Floats, heading: float, turn: float, length: float, width: float, artery: bool
) -> Vessel:
    """A wandering path: `turn` is the mean change of heading per disc radius, `width` the one at the start."""
    steps = max(4, int(length / STEP))
    wander = np.convolve(rng.normal(0, 0.20, steps + 4), np.full(5, 0.2), mode="valid")
    headings = heading + turn * STEP * np.arange(steps) + np.cumsum(wander) * 0.6
    moves = STEP * np.stack([np.cos(headings), np.sin(headings)], axis=1)
    points = start + np.concatenate([np.zeros((1, 2)), np.cumsum(moves, axis=0)[:-1]])
    return Vessel(points, headings, width * np.linspace(1.0, 0.4, steps), artery)


def _flipped(vessel: Vessel) -> Vessel:
    return Vessel(vessel.points * np.array([1.0, -1.0]), -vessel.heading, vessel.width, vessel.artery)
