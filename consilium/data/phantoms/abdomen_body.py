"""One phantom abdomen: what each voxel is to a perfect scanner in HU, and the mask that a perfect grader draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label

from consilium.data.phantoms.abdomen_organs import (
    LABELS,
    Patient,
    cavity,
    diaphragm,
    kidneys,
    liver,
    pancreas,
    pancreas_course,
    spleen,
)
from consilium.data.phantoms.abdomen_shapes import AbdomenGrid, Point, Volume, column, ellipsoid, lay, tube

# HU without contrast medium, and what the arterial and the portal venous phase add at their height.
TISSUES: dict[str, tuple[float, float, float]] = {
    "fat": (-108, 0, 0),
    "skin": (20, 5, 10),
    "muscle": (52, 4, 12),
    "lung": (-830, 10, 15),
    "marrow": (165, 10, 20),
    "cortex": (520, 0, 0),
    "canal": (22, 0, 0),
    "disc": (85, 0, 0),
    "liver": (57, 14, 54),
    "spleen": (47, 75, 72),
    "renal cortex": (33, 170, 135),
    "renal medulla": (31, 45, 125),
    "pancreas": (40, 62, 50),
    "artery": (42, 270, 110),
    "vein": (42, 35, 118),
    "heart": (42, 170, 105),
    "bowel wall": (36, 30, 42),
    "fluid": (12, 0, 0),
    "stool": (-20, 0, 0),
    "contrast": (190, 0, 0),  # swallowed
    "gas": (-980, 0, 0),
    "bile": (8, 0, 0),
}


def tissues(arterial: float, venous: float) -> dict[str, float]:
    """HU of every tissue at a moment after the injection."""
    return {name: plain + arterial * early + venous * late for name, (plain, early, late) in TISSUES.items()}


def draw(patient: Patient, grid: AbdomenGrid, hu: dict[str, float]) -> tuple[Volume, NDArray[np.uint8]]:
    """The picture (slice, row, column) in HU, and the mask."""
    fine, coarse = patient.texture(grid), patient.texture(grid, 3.0)
    picture = np.full(grid.x.shape, -1000.0, dtype=np.float32)
    inside, above = cavity(grid), diaphragm(grid)
    _draw_trunk(picture, patient, grid, hu, inside, fine, coarse)
    _draw_spine(picture, grid, hu, fine)
    _draw_chest(picture, patient, grid, hu, above, fine)
    room = np.maximum(inside, above)
    beans, bed, hila = kidneys(patient, grid)
    wedge, orange = liver(patient, grid, bed, room), spleen(patient, grid, bed, room)
    gland = pancreas(patient, grid, fine)
    _draw_hollow_organs(picture, patient, grid, hu, fine, room)
    _draw_vessels(picture, patient, grid, hu)
    edge = grid.edge
    lay(picture, bed, hu["fat"] + 6 * fine, edge)
    gland = np.maximum(gland, np.maximum(-bed, -np.minimum(wedge, orange) + 2))
    lay(picture, gland, hu["pancreas"] + 12 * fine, edge)
    _draw_liver(picture, patient, grid, hu, wedge, fine, coarse)
    lay(picture, orange, hu["spleen"] + 5 * fine + (hu["artery"] > 180) * 14 * coarse, edge)
    lay(picture, beans, hu["renal cortex"] + 5 * fine, edge)
    pyramids = np.maximum(beans + 6.5 + 2.5 * fine, -hila - 1)
    lay(picture, pyramids, hu["renal medulla"], edge)
    lay(picture, hila, hu["fat"] + 60 + 40 * fine, edge)
    mask = np.zeros(picture.shape, dtype=np.uint8)
    for shape, name in ((gland, "pancreas"), (wedge, "liver"), (orange, "spleen"), (beans, "kidney")):
        mask[shape < 0] = LABELS.index(name) + 1
    return picture, _in_one_piece(mask)


def _in_one_piece(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Without crumbs that a coarse grid breaks off: each organ's largest piece, of the kidneys the two largest."""
    whole = np.zeros_like(mask)
    for value, name in enumerate(LABELS, start=1):
        pieces, count = label(mask == value)
        if count:
            sizes = np.bincount(pieces.ravel())[1:]
            kept = np.argsort(-sizes, kind="stable")[: 2 if name == "kidney" else 1] + 1
            whole[np.isin(pieces, kept)] = value
    return whole


def _lay_tube(
    picture: Volume,
    grid: AbdomenGrid,
    points: Sequence[Point],
    radii: Sequence[float],
    layers: Sequence[tuple[float, Volume | float]],
    within: Volume | None = None,
) -> None:
    """Lays a tube's layers, each (mm under its surface, value), where `within` is negative."""
    box = grid.around(points, max(radii) + 12)
    if picture[box].size == 0:
        return
    distance = tube(grid.cut(box), points, radii)
    if within is not None:
        distance = np.maximum(distance, within[box])
    for depth, value in layers:
        lay(picture[box], distance + depth, value if isinstance(value, float) else value[box], grid.edge)


def _draw_trunk(
    picture: Volume,
    patient: Patient,
    grid: AbdomenGrid,
    hu: dict[str, float],
    inside: Volume,
    fine: Volume,
    coarse: Volume,
) -> None:
    """Skin, fat, the wall's muscles, the muscles of the back and the fat inside."""
    edge = grid.edge
    waist = 1 - 0.06 * np.exp(-(((grid.z + 70) / 50) ** 2))
    across = np.abs(grid.x / (141 * waist)) ** 2.3 + np.abs((grid.y - 2) / (105 * waist)) ** 2.3
    wall = np.asarray((across ** (1 / 2.3) - 1) * 105, dtype=np.float32)
    thick = patient.fat * (
        1 + 0.25 * np.clip(-grid.z / 120, -1, 1.2) + 0.25 * np.sign(grid.y) * np.clip(np.abs(grid.y) / 100, 0, 1)
    )
    skin = wall - thick
    lay(picture, skin, hu["skin"], edge)
    lay(picture, skin + 2.5, hu["fat"] + 5 * fine + 7 * np.clip(coarse - 1, 0, None), edge)
    flesh = hu["muscle"] + 5 * fine - 40 * np.clip(coarse - 1.3, 0, 1)
    lay(picture, wall, flesh, edge)
    lay(picture, np.abs(wall + 9 + 1.5 * coarse) - 0.7, hu["fat"] + 60, edge)  # between the wall's layers
    mesentery = hu["fat"] + 6 * fine + 55 * np.clip(fine - 1.6, 0, 1) + 4 * coarse
    lay(picture, np.where(grid.y > 58, np.maximum(inside, 0.6 * (grid.y - 68)), inside), mesentery, edge)
    lay(picture, column(grid, 0.0, 66.0, 78.0, 34.0), hu["fat"] + 50, edge)
    x = np.abs(grid.x)
    aside = AbdomenGrid(x, grid.y, grid.z, edge)
    low = np.clip(-grid.z / 120, -0.2, 1)
    for shape in (
        column(aside, 33.0, 88.0, 25.0, 16.0),  # erector spinae
        column(aside, 60.0, 68.0, 17.0, 11.0),  # quadratus lumborum
        column(
            aside, 33.0 + 10 * low, 48.0 - 6 * low, 6 + 14 * np.clip(low + 0.3, 0, 1), 7 + 13 * np.clip(low + 0.3, 0, 1)
        ),
    ):  # and psoas, larger below
        lay(picture, shape + 1.5 * fine, flesh, edge)


def _draw_spine(picture: Volume, grid: AbdomenGrid, hu: dict[str, float], fine: Volume) -> None:
    """Vertebrae with discs between them, the canal, the processes; the hip bones at the bottom."""
    edge = grid.edge
    along = (grid.z / 34.0) % 1.0
    body = column(grid, 0.0, 50.0, 21.0 + 1.5 * np.cos(2 * np.pi * along), 16.5)
    disc = np.abs(along - 0.5) > 0.40
    lay(picture, body, np.where(disc, hu["disc"], 0.6 * hu["cortex"]), edge)
    lay(picture, body + 3.5, np.where(disc, hu["disc"], hu["marrow"] + 22 * fine), edge)
    level = np.abs(along - 0.5) * 34 - 11
    x = np.abs(grid.x)
    aside = AbdomenGrid(x, grid.y, grid.z, edge)
    arch = np.abs(column(grid, 0.0, 73.0, 14.0, 11.0)) - 3.5
    spine = column(grid, 0.0, 94.0, 3.5, 13.0)
    wings = _bar(aside, (14.0, 70.0), (42.0, 76.0), 4.0)
    for shape in (np.maximum(arch, 0.4 * level), np.maximum(spine, level), np.maximum(wings, level + 4)):
        lay(picture, shape, 0.75 * hu["cortex"] + 30 * fine, edge)
    lay(picture, column(grid, 0.0, 73.0, 10.0, 8.0), hu["canal"], edge)
    wing = ellipsoid(aside, (88.0, 42.0, -196.0), (58.0, 62.0, 78.0), 0.35)
    plate = np.maximum(np.abs(wing) - 5, np.maximum(8 - grid.y, 45 - x))
    lay(picture, plate, hu["cortex"], edge)
    lay(picture, plate + 3, hu["marrow"], edge)


def _bar(grid: AbdomenGrid, start: tuple[float, float], stop: tuple[float, float], radius: float) -> Volume:
    """A bar in every slice."""
    (ax, ay), (bx, by) = start, stop
    length = (bx - ax) ** 2 + (by - ay) ** 2
    along = np.clip(((grid.x - ax) * (bx - ax) + (grid.y - ay) * (by - ay)) / length, 0, 1)
    return np.asarray(np.hypot(grid.x - ax - along * (bx - ax), grid.y - ay - along * (by - ay)) - radius)


def _draw_chest(
    picture: Volume, patient: Patient, grid: AbdomenGrid, hu: dict[str, float], above: Volume, fine: Volume
) -> None:
    """Lungs over the diaphragm, the heart on it, ribs that slope forwards and down."""
    edge = grid.edge
    dome = np.maximum(column(grid, 0.0, -4.0, 127.0, 88.0) + 3, -above)
    middle = np.minimum(column(grid, 4.0, 26.0, 20.0, 44.0), column(grid, 0.0, 66.0, 27.0, 40.0))
    lungs = np.maximum(dome, -middle)
    lay(picture, np.maximum(dome, grid.y - 44), hu["muscle"] - 40, edge)
    branches = 420 * np.clip(fine - 1.5, 0, 1)
    lay(picture, lungs, hu["lung"] + 25 * fine + branches, edge)
    part = patient.parts["heart"]
    pump = ellipsoid(
        grid, (18 + part.shift[0], -34 + part.shift[1], 134 + 0.5 * part.shift[2]), (58, 46, 44), -0.5, 0.2
    )
    lay(picture, np.maximum(pump - 4, -above), hu["fat"], edge)
    lay(picture, np.maximum(pump, -above), hu["heart"] + 8 * fine, edge)
    cage = np.abs(column(grid, 0.0, -2.0, 133.0, 95.0)) - 3.5
    slope = 0.42 * (70 - grid.y) + 0.10 * np.abs(grid.x)
    ring = np.abs(((grid.z + slope) / 27.0) % 1.0 - 0.5) * 27 - 5.5
    margin = -(
        grid.z + 30 + 0.75 * np.minimum(grid.y - 60, 0) + 70 * np.clip(1 - np.abs(grid.x) / 60, 0, 1) * (grid.y < 0)
    )
    ribs = np.maximum(np.maximum(cage, ring), np.maximum(margin * 0.6, 26 - np.abs(grid.x)))
    lay(picture, ribs, 0.8 * hu["cortex"], edge)
    lay(picture, ribs + 2.5, hu["marrow"], edge)


def _draw_hollow_organs(
    picture: Volume, patient: Patient, grid: AbdomenGrid, hu: dict[str, float], fine: Volume, room: Volume
) -> None:
    """Small bowel, colon, duodenum and stomach; gas gathers in front, because the patient lies on the back."""
    edge, wall = grid.edge, hu["bowel wall"]
    for loop, radius, content in patient.bowels:
        _lay_tube(picture, grid, loop, [radius] * 4, [(0.0, wall), (3.5, hu[content] + 12 * fine)], room + 3)
    gas = patient.gas
    colon: list[tuple[list[Point], float, float]] = [
        ([(-100, 6, -200), (-103, 8, -120), (-98, 2, -62), (-80, -38, -52)], 21.0, 0.35 * gas),
        ([(-80, -50, -52), (-40, -74, -66), (10, -78, -60), (60, -70, -38), (94, -40, -2)], 17.0, 0.8 * gas),
        ([(98, -22, 6), (108, 18, -40), (108, 22, -120), (96, 14, -200)], 14.0, 0.4 * gas),
    ]
    for points, radius, air in colon:
        box = grid.around(points, radius + 12)
        part, grain = grid.cut(box), fine[box]
        bulges = radius * (1 + 0.14 * np.sin(0.35 * (part.z + part.x)))
        gut = np.maximum(tube(part, points, [0.0] * len(points)) - bulges, room[box] + 3)
        lay(picture[box], gut, wall, edge)
        _fill(picture[box], gut + 3, hu["stool"] + 45 * grain, hu["gas"], grain - 2.2 + 3.2 * air, edge)
    duodenum: list[Point] = [(-14, -44, 4), (-46, -22, 0), (-56, -4, -24), (-48, 6, -60), (-6, 4, -66), (26, -4, -50)]
    _lay_tube(picture, grid, duodenum, [12.0] * 6, [(0.0, wall), (4.0, hu["fluid"] + 15 * fine)])
    part_of = patient.parts["stomach"]
    swell, (right, behind, up) = part_of.size[0] * part_of.size[1], part_of.shift
    course = [(54, 14, 76), (58, -14, 56), (54, -46, 22), (30, -60, 0), (-8, -52, 4)]
    points = [(x + right, y + behind, z + 0.5 * up) for x, y, z in course]
    box = grid.around(points, 45)
    part, grain = grid.cut(box), fine[box]
    bag = tube(part, points, [30 * swell, 31 * swell, 25 * swell, 20 * swell, 13.0])
    bag = np.maximum(bag, room[box] + 3)
    lay(picture[box], bag, wall, edge)
    level = points[2][1] - 6 - 16 * (1 - gas) - part.y  # in front of it is air
    _fill(picture[box], bag + 4.5, hu["fluid"] + 20 + 20 * grain, hu["gas"], level, edge)


def _fill(picture: Volume, inside: Volume, content: Volume, gas: float, where: Volume, edge: float) -> None:
    """Content, and gas where `where` is positive."""
    lay(picture, inside, content, edge)
    lay(picture, np.maximum(inside, -where), gas, edge)


def _draw_vessels(picture: Volume, patient: Patient, grid: AbdomenGrid, hu: dict[str, float]) -> None:
    """Aorta and vena cava beside the spine, the vessels of kidneys, spleen and gut."""
    edge = grid.edge
    low = np.clip((-grid.z - 110) / 60, 0, 1)
    for side in (-1, 1):  # they part above the pelvis
        lay(
            picture, column(grid, 7.0 + side * 16 * low, 22.0 + 6 * low, 11 - 3 * low, 11 - 3 * low), hu["artery"], edge
        )
        lay(
            picture,
            column(grid, -22.0 + side * 14 * low, 28.0 + 4 * low, 12.5 - 3 * low, 10 - 2 * low),
            hu["vein"],
            edge,
        )
    points, _ = pancreas_course(patient)
    vessels: list[tuple[list[Point], float, str]] = [
        ([(x, y + 11, z + 3) for x, y, z in points[2:]], 5.5, "vein"),  # the spleen's, behind the pancreas
        ([(2, -12, 0), (4, -22, -40), (8, -30, -110)], 4.5, "artery"),  # the gut's
        ([(-14, -12, 2), (-10, -24, -40), (-6, -32, -110)], 6.5, "vein"),
        ([(-10, 24, -32), (-42, 30, -32)], 4.5, "vein"),  # the kidneys'
        ([(10, 24, -18), (42, 30, -18)], 4.5, "vein"),
    ]
    for course, radius, name in vessels:
        _lay_tube(picture, grid, course, [radius] * len(course), [(0.0, hu[name])])


def _draw_liver(
    picture: Volume,
    patient: Patient,
    grid: AbdomenGrid,
    hu: dict[str, float],
    wedge: Volume,
    fine: Volume,
    coarse: Volume,
) -> None:
    """The liver with its veins, and the gall bladder under it."""
    edge = grid.edge
    lay(picture, wedge, hu["liver"] + 4 * fine + 2 * coarse, edge)
    porta: list[list[Point]] = [
        [(-18, -10, 12), (-38, -16, 28), (-74, -8, 34), (-108, 4, 24)],
        [(-38, -16, 28), (-70, -30, 52), (-100, -34, 60)],
        [(-38, -16, 28), (-10, -40, 52), (20, -52, 66)],
        [(-20, 20, 88), (-58, 0, 80), (-96, -10, 70)],  # hepatic veins
        [(-20, 20, 88), (-42, -26, 78), (-56, -60, 60)],
    ]
    for points in porta:
        _lay_tube(picture, grid, points, [6.5, *[4.5] * (len(points) - 2), 2.0], [(0.0, hu["vein"])], wedge)
    if patient.gallbladder:
        at = (-50.0, -42.0, -14.0)
        box = grid.around([at], 40)
        bag = np.maximum(ellipsoid(grid.cut(box), at, (13.0, 16.0, 25.0), 0.2, 0.3), -wedge[box])
        lay(picture[box], bag, hu["bowel wall"], edge)
        lay(picture[box], bag + 2, hu["bile"], edge)
