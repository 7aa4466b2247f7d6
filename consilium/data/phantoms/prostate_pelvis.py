"""One phantom pelvis: its anatomy drawn at random, then the signal each voxel would give to a perfect scanner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter1d

from consilium.data.phantoms.prostate_gland import Gland, ProstateGrid, Volume, draw_gland

GLAND_REACH = 48.0  # mm: no gland with its veins reaches further from its axis
CELLS = (5, 14, 34, 80)  # lattices of the texture, from clouds to grain


@dataclass(frozen=True)
class Pelvis:
    """One patient on the table; nothing here depends on the size in pixels."""

    gland: Gland
    shift: tuple[float, float]  # of the gland's centre from the picture's, mm, to the right and down
    roll: float  # radians
    slices: int
    lowest: float  # z of the first slice, mm
    girth: tuple[float, float]  # half width and half depth of the body
    fat: float  # thickness of the fat under the skin in front
    muscles: float  # size of the muscles, about 1
    hips: float  # half distance of the hip joints
    bladder: tuple[float, float, float]  # half width, half depth, half height
    rectum: float  # half width
    content: str
    marbling: float  # fat inside muscles
    vessels: tuple[tuple[float, float, float], ...]  # x, y and radius of vessels in the fat
    lattices: tuple[NDArray[np.float32], ...]  # (slice, cell, cell)
    bends: tuple[NDArray[np.float32], NDArray[np.float32]]  # lattices by which muscles and bones are pushed about

    def grid(self, size: int, field: float, thickness: float) -> ProstateGrid:
        at = ((np.arange(size) + 0.5) / size - 0.5) * field
        u, v = np.meshgrid(at - self.shift[0], at - self.shift[1])
        c, s = np.cos(self.roll), np.sin(self.roll)
        z = self.lowest + thickness * np.arange(self.slices)
        x, y, z = (np.asarray(a, dtype=np.float32) for a in (c * u + s * v, c * v - s * u, z))
        return ProstateGrid(x[None], y[None], z[:, None, None], field / size)


def draw_pelvis(rng: np.random.Generator, thickness: float, coil: bool) -> Pelvis:
    """A patient; `thickness` decides how many slices cover the gland, with a few to spare at both ends."""
    gland = draw_gland(rng)
    below, above = rng.integers(2, 4, 2)
    span = 0.97 * gland.half[2]
    slices = int(np.clip(np.ceil(2 * span / thickness) + below + above, 12, 24))
    content = str(rng.choice(["air", "stool", "gel", "stool"]))
    return Pelvis(
        gland=gland,
        shift=(rng.normal(0, 3.0), rng.normal(-3.0, 4.0)),
        roll=rng.normal(0, 0.035),
        slices=slices,
        lowest=-span - (below - rng.uniform(0.2, 0.8)) * thickness,
        girth=(rng.normal(122, 6), rng.normal(87, 4)),
        fat=rng.uniform(10, 24),
        muscles=rng.uniform(0.85, 1.12),
        hips=rng.normal(76, 3),
        bladder=(rng.uniform(30, 44), rng.uniform(20, 30), rng.uniform(18, 34)),
        rectum=rng.uniform(16, 20) if coil else rng.uniform(9, 17),
        content="air" if coil else content,
        marbling=rng.uniform(0.4, 1.3),
        vessels=tuple(_draw_vessel(rng) for _ in range(10)),
        lattices=tuple(_lattice(rng, slices, cells, thickness) for cells in CELLS),
        bends=(_lattice(rng, slices, 8, thickness), _lattice(rng, slices, 8, thickness)),
    )


def _draw_vessel(rng: np.random.Generator) -> tuple[float, float, float]:
    side = 1 if rng.random() < 0.5 else -1
    return side * rng.uniform(28, 46), rng.uniform(-30, 45), rng.uniform(1.2, 2.6)


def _lattice(rng: np.random.Generator, slices: int, cells: int, thickness: float) -> NDArray[np.float32]:
    """Noise of unit deviation whose clouds reach as far from slice to slice as within one."""
    smooth = gaussian_filter1d(rng.normal(size=(slices, cells, cells)), 0.4 * 160 / cells / thickness, axis=0)
    return np.asarray(smooth / smooth.std(), dtype=np.float32)


def signal(pelvis: Pelvis, tissue: Mapping[str, float], grid: ProstateGrid) -> Volume:
    """What a perfect scanner would measure, (slice, row, column), fat being about 1."""
    texture = [_stretched(lattice, grid.x.shape[-1]) for lattice in pelvis.lattices]
    picture = np.zeros_like(texture[0])
    bent = _bent(pelvis, grid)
    _draw_body(picture, pelvis, tissue, bent, texture)
    _draw_bones(picture, pelvis, tissue, bent, texture)
    box = grid.near(60)
    near, close = grid.cut(box), [layer[box] for layer in texture]
    _draw_hollow_organs(picture[box], pelvis, tissue, near, close)
    _draw_below_the_apex(picture[box], pelvis, tissue, near)
    box = grid.near(GLAND_REACH)
    _draw_gland(picture[box], pelvis.gland, tissue, grid.cut(box), [layer[box] for layer in texture])
    return picture


def mask(pelvis: Pelvis, grid: ProstateGrid) -> NDArray[np.uint8]:
    """The grader's drawing, (slice, row, column): 1 is the whole gland."""
    drawing = np.zeros(np.broadcast_shapes(grid.x.shape, grid.z.shape), dtype=np.uint8)
    box = grid.near(GLAND_REACH)
    drawing[box] = pelvis.gland.reach(grid.cut(box)) < 1
    return drawing


def rectum_at(pelvis: Pelvis, z: Volume) -> tuple[Volume, Volume]:
    """The y of the rectum's centre and its half depth in every slice: behind the gland, narrower below it."""
    gland = pelvis.gland
    along = np.clip(z / gland.half[2], -1.4, 1.4)
    radius = pelvis.rectum * np.clip(0.92 + 0.18 * along, 0.62, 1.1)
    back = gland.middle(z) + gland.half[1] * np.maximum(gland.scale(z), 0.72) * (1 - gland.indent)
    return back + radius + 3.5, radius


def _bent(pelvis: Pelvis, grid: ProstateGrid) -> ProstateGrid:
    """The grid as if all that is not near the gland were pushed about a little: no muscle is an ellipse."""
    size = grid.x.shape[-1]
    give = 3.5 * np.clip(np.hypot(grid.x, grid.y) / 25 - 1.2, 0, 1)
    return ProstateGrid(
        grid.x + give * _stretched(pelvis.bends[0], size),
        grid.y + give * _stretched(pelvis.bends[1], size),
        grid.z,
        grid.pixel,
    )


def _draw_body(
    picture: Volume, pelvis: Pelvis, tissue: Mapping[str, float], grid: ProstateGrid, texture: list[Volume]
) -> None:
    """Skin, fat, and the muscles of hip, buttock and thigh on both sides."""
    x, y, pixel = np.abs(grid.x), grid.y + 4, grid.pixel
    across, deep = pelvis.girth
    skin = ((np.abs(x / across) ** 2.6 + np.abs(y / deep) ** 2.6) ** (1 / 2.6) - 1) * deep
    cleft = _ellipse(x, y, 0, deep + 6, 3.5, 24)
    lobules = 1 + 0.05 * texture[1] + 0.04 * texture[2] - 0.13 * np.clip(texture[3] - 0.8, 0, None)  # and its septa
    _lay(picture, np.maximum(skin, -cleft), tissue["fat"] * lobules, pixel)
    _lay(picture, np.abs(skin + 1) - 1.0, tissue["muscle"] * 1.3, pixel)
    streaks = pelvis.marbling * (0.10 * texture[2] + 0.30 * np.clip(texture[3] - 0.3, 0, None))
    flesh = tissue["muscle"] * (1 + streaks)
    m, depth = pelvis.muscles, skin + pelvis.fat
    rise = np.clip(grid.z / 25, -1.2, 1.2)
    muscles: list[tuple[Volume | float, Volume | float, float, float, float]] = [
        (64, 52 + 2 * rise, 50 * m, 19 * m, -0.35),  # gluteus maximus
        (78, 24, 24 * m, 13 * m, 0.15),  # gemelli and quadratus femoris
        (51 + 2 * rise, 0, 10.5 * m, 32 * m, -0.14),  # obturator internus
        (47, -56 - 2 * rise, 29 * m, 14 * m, 0.30),  # pectineus and obturator externus
        (84, -46, 25 * m, 18 * m, 0.10),  # iliopsoas
        (13, -70, 13 * m, 6 * m, 0.10),  # rectus abdominis
    ]
    for cx, cy, rx, ry, turn in muscles:
        _lay(picture, np.maximum(_ellipse(x, grid.y, cx, cy, rx, ry, turn), depth), flesh, pixel)
    for right, behind, radius in pelvis.vessels:
        _lay(picture, _ellipse(grid.x, grid.y, right, behind, radius, radius), tissue["vein"] * 0.6, pixel)


def _draw_bones(
    picture: Volume, pelvis: Pelvis, tissue: Mapping[str, float], grid: ProstateGrid, texture: list[Volume]
) -> None:
    """Hip joint above, sitting bone below; the pubic bones in front; the tail bone behind."""
    x, y, pixel = np.abs(grid.x), grid.y, grid.pixel
    marrow = tissue["marrow"] * (1 + 0.07 * texture[1] + 0.06 * texture[3])
    up = np.clip(0.5 + 0.5 * grid.z / pelvis.gland.half[2], 0, 1)
    low = np.clip(1.2 - up, 0.2, 1)
    hip = _ellipse(x, y, pelvis.hips - 8 * (1 - up), -8 + 20 * (1 - up), 14 + 12 * up, 18 + 10 * up, -0.15)
    joint = np.maximum(np.abs(_ellipse(x, y, pelvis.hips + 2, -9, 20.0, 20.0)) - 1.2, (0.35 - up) * 60)
    pubis = _ellipse(x, y, 16 + 9 * up, -46 - 4 * up, 8 + 12 * low, 4 + 6 * low, 0.45)
    tail = _ellipse(x, y, 0, 66, 4 + 5 * up, 3 + 3 * up)
    for bone in (hip, pubis, tail):
        _lay(picture, bone, tissue["cortex"], pixel)
        _lay(picture, bone + 2.2, marrow, pixel)
    _lay(picture, joint, tissue["cortex"], pixel)
    _lay(picture, _ellipse(x, y, 0, -45, 3.5, 4 + 7 * low), tissue["cartilage"], pixel)


def _draw_hollow_organs(
    picture: Volume, pelvis: Pelvis, tissue: Mapping[str, float], grid: ProstateGrid, texture: list[Volume]
) -> None:
    """Levator, seminal vesicles, bladder and rectum."""
    gland, x, y, z, pixel = pelvis.gland, np.abs(grid.x), grid.y, grid.z, grid.pixel
    top, middle = 0.9 * gland.half[2], gland.middle(z)
    back, radius = rectum_at(pelvis, z)
    side = np.maximum(gland.half[0] * gland.scale(z) + 5, np.maximum(1.12 * radius + 5, 18))
    sling = _ellipse(x, y, 0, middle + 14, side, 36.0)
    levator = np.maximum(np.abs(sling) - 1.9, np.maximum(9 - x, middle - 8 - y))
    _lay(picture, levator, tissue["muscle"] * (1 + 0.15 * texture[3]), pixel)
    horns = _ellipse(x, y, 18, middle + 0.62 * gland.half[1], 17, 6.5, -0.25)
    tubules = tissue["seminal fluid"] * (0.55 + 0.45 * np.abs(texture[3]))
    _lay(picture, np.maximum(horns, np.maximum(top - 3 - z, z - top - 14)), tubules, pixel)
    rx, ry, rz = pelvis.bladder
    belly = np.sqrt(1 - np.clip((z - top + 2 - rz) / rz, -1, 1) ** 2)
    bladder = _ellipse(x, y, 0, middle - 0.45 * gland.half[1], rx * belly + 0.1, ry * belly + 0.1)
    _lay(picture, np.where(belly > 0, bladder - 3, bladder), tissue["wall"], pixel)
    _lay(picture, bladder, tissue["urine"], pixel)
    tube = _ellipse(grid.x, y, 0, back, 1.12 * radius, radius)
    _lay(picture, tube - 3, tissue["wall"] * (1 + 0.12 * texture[2]), pixel)
    _lay(picture, tube, tissue[pelvis.content] * (1 + 0.18 * texture[2]), pixel)


def _draw_below_the_apex(picture: Volume, pelvis: Pelvis, tissue: Mapping[str, float], grid: ProstateGrid) -> None:
    """The sphincter around the urethra, then the bulb: round and in the middle like the apex, but no gland."""
    below = (grid.z + 0.95 * pelvis.gland.half[2]) / 1.5
    middle = pelvis.gland.middle(grid.z)
    for cy, rx, ry, start, name, gain in (
        (middle, 9.5, 8.5, below, "muscle", 1.0),
        (middle, 4.5, 4.0, below, "wall", 1.4),
        (middle + 6, 13, 9, below + 4.5, "bulb", 1.0),
    ):
        shape = _ellipse(grid.x, grid.y, 0, cy, rx, ry)
        _lay(picture, np.maximum(shape, start), tissue[name] * gain, grid.pixel)


def _draw_gland(
    picture: Volume, gland: Gland, tissue: Mapping[str, float], grid: ProstateGrid, texture: list[Volume]
) -> None:
    """Veins around it, capsule, peripheral zone, transition zone with nodules, the stroma in front, the urethra."""
    size, middle, pixel = np.maximum(gland.scale(grid.z), 0.3), gland.middle(grid.z), grid.pixel
    narrow = gland.half[1] * size
    shell = (gland.reach(grid) - 1) * narrow
    plexus = np.maximum(shell - 5 - 1.5 * texture[2], 0.7 * (grid.y - middle + 0.35 * narrow))
    _lay(picture, plexus, tissue["vein"] * (0.70 + 0.16 * texture[2] + 0.14 * texture[3]), pixel)
    _lay(picture, shell, tissue["stroma"], pixel)
    mottled = 1 + gland.speckle * (0.10 * texture[1] + 0.10 * texture[2] + 0.08 * texture[3])
    _lay(picture, shell + 1.3, tissue["peripheral zone"] * mottled, pixel)
    inner = np.maximum((gland.core(grid) - 1) * narrow * gland.inner + 0.8 * texture[2], shell + 2.5)
    _lay(picture, inner, tissue["stroma"], pixel)
    whorls = 1 + 0.14 * texture[1] + 0.16 * texture[2] + 0.10 * texture[3]
    _lay(picture, inner + 1.2, tissue["transition zone"] * whorls, pixel)
    for nodule in gland.nodules:
        cx, cy, cz = (c * h for c, h in zip(nodule.centre, gland.half))
        ball = np.sqrt((grid.x - cx) ** 2 + (grid.y - middle - cy) ** 2 + (grid.z - cz) ** 2) - nodule.radius
        if nodule.tissue != "lesion":
            _lay(picture, np.maximum(ball, shell + 3), tissue["stroma"], pixel)
        _lay(picture, np.maximum(ball + 0.9, shell + 1.5), tissue[nodule.tissue] * (1 + 0.12 * texture[3]), pixel)
    apron = _ellipse(grid.x, grid.y, 0, middle - 0.88 * narrow, 0.38 * gland.half[0] * size, 0.24 * narrow)
    _lay(picture, np.maximum(apron, shell), tissue["stroma"] * (1 + 0.08 * texture[2]), pixel)
    duct = _ellipse(grid.x, grid.y, 0, middle + 0.05 * narrow, 2.6, 2.2)
    _lay(picture, np.maximum(duct, shell + 2), tissue["vein"], pixel)


def _ellipse(
    x: Volume,
    y: Volume,
    cx: Volume | float,
    cy: Volume | float,
    rx: Volume | float,
    ry: Volume | float,
    turn: float = 0.0,
) -> Volume:
    """About the distance in mm from an ellipse in every slice, negative inside; `turn` in radians."""
    dx, dy = x - cx, y - cy
    if turn:
        c, s = math.cos(turn), math.sin(turn)
        dx, dy = c * dx + s * dy, c * dy - s * dx
    dx, dy = dx / rx, dy / ry
    return np.asarray((np.sqrt(dx * dx + dy * dy) - 1) * np.minimum(rx, ry), dtype=np.float32)


def _lay(picture: Volume, distance: Volume, value: Volume | float, pixel: float) -> None:
    """Puts a tissue over what is drawn, in place, where `distance` is negative; edges are a pixel or 0.8 mm wide."""
    share = np.clip(0.5 - distance / max(pixel, 0.8), 0, 1)
    picture += share * (value - picture)


def _stretched(lattice: NDArray[np.float32], size: int) -> Volume:
    """A lattice at the volume's size; averaged, not sampled, where the volume is the coarser one."""
    slices = [Image.fromarray(cells).resize((size, size), Image.Resampling.BICUBIC) for cells in lattice]
    return np.stack([np.asarray(one, dtype=np.float32) for one in slices])
