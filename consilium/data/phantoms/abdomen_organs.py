"""The patients of the abdomen phantom: their build drawn at random, and where the organs with a label lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, map_coordinates

from consilium.data.phantoms.abdomen_shapes import FAR, AbdomenGrid, Point, Volume, column, ellipsoid, melted, tube

LABELS = ("kidney", "liver", "spleen", "pancreas")
TILE = 40  # cells per side of the texture's lattice
TILE_SIZE = 240.0  # mm after which the texture repeats


@dataclass(frozen=True)
class OrganVariation:
    """How one organ differs from the standard patient's."""

    shift: Point  # mm
    size: Point
    turn: float  # radians


@dataclass(frozen=True)
class Patient:
    """One patient; nothing here depends on the size in voxels."""

    stretch: Point  # the patient's size over the standard one's, along x, y, z
    place: Point  # of the patient in the field, mm
    roll: float  # radians
    fat: float  # under the skin, mm
    parts: dict[str, OrganVariation]
    waves: NDArray[np.float64]  # (3, waves, 5): what pushes every point about: wave vector, phase, reach
    tile: NDArray[np.float32]  # (TILE, TILE, TILE), repeats
    bowels: tuple[tuple[tuple[Point, ...], float, str], ...]  # loops: points, radius, content
    gas: float  # how much air the hollow organs hold, 0 to 1
    gallbladder: bool

    def grid(self, slices: int, size: int, field: float, span: float, middle: float) -> AbdomenGrid:
        """Where the voxels of a scan lie in the standard patient."""
        up = ((np.arange(slices) + 0.5) / slices - 0.5) * span + middle - self.place[2]
        at = ((np.arange(size) + 0.5) / size - 0.5) * field
        w, v, u = np.meshgrid(up, at - self.place[1], at - self.place[0], indexing="ij")
        c, s = math.cos(self.roll), math.sin(self.roll)
        straight = (c * u + s * v, c * v - s * u, w)
        x, y, z = (np.asarray(axis / by, dtype=np.float32) for axis, by in zip(straight, self.stretch))
        px, py, pz = (_push(waves, x, y, z) for waves in self.waves)
        return AbdomenGrid(x + px, y + py, z + pz, max(field / size, span / slices, 1.2))

    def texture(self, grid: AbdomenGrid, grain: float = 1.0) -> Volume:
        """Clouds of unit deviation, a few mm wide; a larger grain has larger clouds."""
        scale = TILE / TILE_SIZE / grain
        at = np.stack([axis * scale for axis in (grid.z, grid.y, grid.x)])
        return np.asarray(map_coordinates(self.tile, at, order=1, mode="grid-wrap"), dtype=np.float32)


def _push(waves: NDArray[np.float64], x: Volume, y: Volume, z: Volume) -> Volume:
    total = np.zeros_like(x)
    for kx, ky, kz, phase, reach in waves.astype(np.float32):
        total += reach * np.sin(kx * x + ky * y + kz * z + phase)
    return total


def draw_patient(rng: np.random.Generator, girth: float, fat: float) -> Patient:
    """A patient of a given girth; tall ones are not wide."""
    tall = float(np.clip(rng.normal(1.0, 0.05), 0.9, 1.1))
    deep = girth * float(np.clip(rng.normal(1.0, 0.04), 0.92, 1.08))
    parts = {}
    for name in ("right kidney", "left kidney", "liver", "left lobe", "spleen", "pancreas", "stomach", "heart"):
        shift, size = np.clip(rng.normal(0, 1, (2, 3)), -2, 2)
        parts[name] = OrganVariation(
            tuple(4.0 * shift), tuple(1 + 0.07 * size), 0.10 * float(np.clip(rng.normal(), -2, 2))
        )
    direction = rng.normal(size=(3, 5, 3))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    number = 2 * math.pi / rng.uniform(70, 190, (3, 5, 1))
    phase, reach = rng.uniform(0, 2 * math.pi, (3, 5, 1)), rng.uniform(0.8, 2.6, (3, 5, 1))
    cloud = gaussian_filter(rng.normal(size=(TILE, TILE, TILE)), 0.8, mode="wrap")
    return Patient(
        stretch=(girth, deep, tall),
        place=(rng.normal(0, 5), rng.normal(2, 5), rng.normal(0, 5)),
        roll=rng.normal(0, 0.04),
        fat=max(4.0, fat),
        parts=parts,
        waves=np.concatenate([direction * number, phase, reach], axis=-1),
        tile=np.asarray(cloud / cloud.std(), dtype=np.float32),
        bowels=tuple(_draw_loop(rng) for _ in range(int(rng.integers(15, 22)))),
        gas=rng.uniform(0.1, 0.9),
        gallbladder=rng.random() < 0.85,
    )


def _draw_loop(rng: np.random.Generator) -> tuple[tuple[Point, ...], float, str]:
    """A piece of small bowel: a few turns in the front of the lower abdomen."""
    at = np.array([rng.uniform(-80, 80), rng.uniform(-72, -18), rng.uniform(-190, -38)])
    points = []
    for _ in range(4):
        points.append((float(at[0]), float(at[1]), float(at[2])))
        at = np.clip(at + rng.normal(0, 1, 3) * (24, 13, 17), (-88, -74, -200), (88, -5, -36))
    content = str(rng.choice(["fluid", "contrast", "gas"], p=[0.7, 0.15, 0.15]))
    return tuple(points), float(rng.uniform(9, 14)), content


def cavity(grid: AbdomenGrid) -> Volume:
    """What the muscles of the wall enclose; narrower at the waist and under the domes of the diaphragm."""
    waist = 1 - 0.07 * np.exp(-(((grid.z + 70) / 45) ** 2))
    return column(grid, 0.0, -10.0, 126 * waist, 82 * waist)


def diaphragm(grid: AbdomenGrid) -> Volume:
    """The height over the diaphragm's two domes, negative below it: the lungs reach down along the ribs."""
    right = 108 - 62 * (((grid.x + 62) / 72) ** 2 + ((grid.y + 8) / 78) ** 2)
    left = 98 - 62 * (((grid.x - 66) / 66) ** 2 + ((grid.y + 4) / 76) ** 2)
    middle = 84 - 30 * ((grid.y + 30) / 70) ** 2 - 0.02 * grid.x**2
    return np.asarray(grid.z - np.maximum(np.maximum(right, left), middle), dtype=np.float32)


def _placed(patient: Patient, name: str, centre: Point, half: Point) -> tuple[Point, Point, float]:
    part = patient.parts[name]
    x, y, z = (c + s for c, s in zip(centre, part.shift))
    a, b, c = (h * s for h, s in zip(half, part.size))
    return (x, y, z), (a, b, c), part.turn


def kidneys(patient: Patient, grid: AbdomenGrid) -> tuple[Volume, Volume, Volume]:
    """Both kidneys, the fat capsule around them, and their hilum with its fat."""
    shapes, capsules, hila = [], [], []
    for name, side, height in (("right kidney", -1, -34.0), ("left kidney", 1, -20.0)):
        centre, half, turn = _placed(patient, name, (side * 66.0, 40.0, height), (27.0, 24.0, 52.0))
        tilt, turn = side * 0.20, side * (0.55 + turn)  # upper poles towards the spine, hilum forwards
        bean = ellipsoid(grid, centre, half, turn, tilt)
        hilum = (centre[0] - side * 25, centre[1] - 12, centre[2] + 2)
        notch = ellipsoid(grid, hilum, (17.0, 10.0, 19.0), turn, tilt)
        shapes.append(np.maximum(bean, -notch))
        capsules.append(ellipsoid(grid, centre, (half[0] + 8, half[1] + 7, half[2] + 9), turn, tilt))
        hila.append(np.maximum(notch - 6, bean))
    return np.minimum(*shapes), np.minimum(*capsules), np.minimum(*hila)


def liver(patient: Patient, grid: AbdomenGrid, bed: Volume, room: Volume) -> Volume:
    """A wedge under the right dome, a thin lobe across the middle; hollow underneath, where `bed` and bowel lie."""
    centre, half, turn = _placed(patient, "liver", (-66.0, -10.0, 36.0), (86.0, 90.0, 94.0))
    right = ellipsoid(grid, centre, half, turn)
    across, thin, turn = _placed(patient, "left lobe", (2.0, -50.0, 62.0), (72.0, 34.0, 36.0))
    left = ellipsoid(grid, across, thin, turn - 0.12, 0.20)
    # the lower face rises from the right flank to the left, and to the back of the middle
    lower = 0.80 * (-72 + 0.62 * (grid.x + 110) + 0.16 * (grid.y + 20) - grid.z)
    medial = 0.85 * (grid.x + 10 + 0.22 * (grid.y + 40) - 0.28 * (grid.z - 40))
    body = melted(np.maximum(right, np.maximum(lower, medial)), left, 18)
    groove = column(grid, -22.0, 30.0, 15.0, 15.0)  # the vena cava's
    behind = np.minimum(grid.x + 88, grid.y - 44)  # nothing of it lies behind the kidney
    return np.maximum(np.maximum(body, room + 4), np.maximum(np.maximum(-bed, -groove), behind))


def spleen(patient: Patient, grid: AbdomenGrid, bed: Volume, room: Volume) -> Volume:
    """A slice of orange against the left ribs behind, hollowed by the stomach and the kidney."""
    centre, half, turn = _placed(patient, "spleen", (90.0, 28.0, 46.0), (38.0, 50.0, 56.0))
    orange = ellipsoid(grid, centre, half, turn + 0.45, -0.15)
    hollow = ellipsoid(grid, (centre[0] - 46, centre[1] - 24, centre[2]), (38.0, 40.0, 60.0), 0.3)
    return np.maximum(np.maximum(orange, room + 4), np.maximum(-hollow, -bed))


def pancreas_course(patient: Patient) -> tuple[list[Point], list[float]]:
    """Head in the duodenum's arm, body over the spine, tail towards the spleen."""
    part = patient.parts["pancreas"]
    rise = 60 * part.turn
    course = [
        *((-34, -2, -34), (-36, -6, -14), (-16, -22, -2), (8, -30, 6)),
        *((34, -20, 14 + rise), (58, -2, 22 + rise), (78, 14, 30 + rise)),
    ]
    radii = [11.0, 15.0, 10.5, 10.0, 11.5, 11.0, 8.5]
    thick = (part.size[0] * part.size[1] * part.size[2]) ** 0.8
    points: list[Point] = [(x + part.shift[0], y + part.shift[1], z + part.shift[2]) for x, y, z in course]
    return points, [thick * radius for radius in radii]


def pancreas(patient: Patient, grid: AbdomenGrid, texture: Volume) -> Volume:
    """Lobulated: its surface follows the texture."""
    points, radii = pancreas_course(patient)
    shape = np.full(grid.x.shape, FAR, dtype=np.float32)
    box = grid.around(points, 40)
    shape[box] = tube(grid.cut(box), points, radii) + 1.6 * texture[box]
    return shape
