"""One phantom eye: its anatomy drawn at random, then the light it returns and the mask a grader would draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.special import expit

from consilium.data.phantoms import retina_vessels
from consilium.data.phantoms.retina_sites import RetinaLook, Spread
from consilium.data.phantoms.retina_vessels import Vessel

Floats = NDArray[np.float64]
Picture = NDArray[np.float32]

PALE = np.array([0.90, 0.47, 0.22])  # light returned by a retina without melanin, red green blue
DARK = np.array([0.58, 0.24, 0.10])
BLOOD = np.array([0.38, 0.75, 0.80])  # share of the light a vessel takes from red, green, blue
FOVEA = (4.7, 0.6)  # in disc radii from the disc's centre, towards the temple and down
CELLS = (5, 11, 23, 47, 95)  # lattices of the texture, from clouds to grain


@dataclass(frozen=True)
class Outline:
    """A closed curve in eye coordinates: an ellipse with a few smooth bumps."""

    centre: Floats  # (2,)
    radii: Floats  # (2,) horizontal, vertical
    bumps: Floats  # (4, 2): cosine and sine amplitudes of the 2nd to 5th harmonic

    def reach(self, x: Floats, y: Floats) -> Floats:
        """0 at the centre, 1 on the curve, growing outwards."""
        dx, dy = (x - self.centre[0]) / self.radii[0], (y - self.centre[1]) / self.radii[1]
        distance = np.hypot(dx, dy)
        turn = (dx + 1j * dy) / np.maximum(distance, 1e-9)  # e^(i angle): its powers are the harmonics
        wave = turn**2 * np.polynomial.polynomial.polyval(turn, self.bumps[:, 0] - 1j * self.bumps[:, 1])
        return np.asarray(distance / (1 + wave.real))


@dataclass(frozen=True)
class Eye:
    """One eye as it lies in the picture; nothing here depends on the size in pixels."""

    temple: int  # +1: the temple is on the right of the picture (a left eye), -1: on the left
    centre: Floats  # (2,) disc centre in the picture, 0…1
    radius: float  # half the vertical disc diameter, share of the picture
    squeeze: float
    torsion: float  # radians
    disc: Outline
    cup: Outline
    melanin: float
    crescent: float  # width of the pale crescent beside the disc, in disc radii; 0 for none
    lattices: tuple[Floats, ...]
    vessels: list[Vessel]

    def coordinates(self, size: int) -> tuple[Floats, Floats]:
        """Eye coordinates of the pixel centres, each (size, size)."""
        at = (np.arange(size) + 0.5) / size
        u, v = np.meshgrid(at - self.centre[0], at - self.centre[1])
        x, y = self.temple * u / (self.radius * self.squeeze), v / self.radius
        c, s = np.cos(self.torsion), np.sin(self.torsion)
        return c * x + s * y, c * y - s * x

    def place(self, points: Floats) -> Floats:
        """Picture coordinates (n, 2) in 0…1 of points in eye coordinates: the inverse of `coordinates`."""
        c, s = np.cos(self.torsion), np.sin(self.torsion)
        x, y = c * points[:, 0] - s * points[:, 1], s * points[:, 0] + c * points[:, 1]
        return self.centre + self.radius * np.stack([self.temple * self.squeeze * x, y], axis=1)


def drawn(spread: Spread, rng: np.random.Generator, reach: float = 2.5) -> float:
    """A normal draw, cut at `reach` standard deviations so that no case is a freak."""
    mean, deviation = spread
    return mean + deviation * float(np.clip(rng.normal(), -reach, reach))


def draw_eye(look: RetinaLook, patient: np.random.Generator, case: np.random.Generator, fellow: bool) -> Eye:
    """An eye; what both eyes of a person share comes from `patient`, the rest from `case`."""
    melanin = float(np.clip(drawn(look.melanin, patient), 0, 1))
    ratio = drawn((look.cup[0], 0.8 * look.cup[1]), patient) + drawn((0.0, 0.6 * look.cup[1]), case)
    diameter = drawn(look.disc, patient)
    first = 1 if patient.random() < 0.5 else -1
    temple = -first if fellow else first
    disc = Outline(np.zeros(2), np.array([case.uniform(0.88, 0.99), 1.0]), _bumps(0.020, case))
    return Eye(
        temple=temple,
        centre=np.array([0.5 - temple * drawn(look.nasal, case), 0.5 + drawn(look.lower, case)]),
        radius=diameter / 2,
        squeeze=look.squeeze,
        torsion=drawn((0.0, 0.08), case),
        disc=disc,
        cup=_draw_cup(float(np.clip(ratio, 0.25, 0.85)), disc, case),
        melanin=melanin,
        crescent=case.uniform(0.12, 0.40) if case.random() < look.atrophy else 0.0,
        lattices=tuple(case.normal(size=(cells, cells)) for cells in CELLS),
        vessels=retina_vessels.grow(case),
    )


def _draw_cup(ratio: float, disc: Outline, case: np.random.Generator) -> Outline:
    room = 0.92 - ratio  # a rim is left all round
    centre = room * np.array([case.uniform(0.05, 0.45), case.uniform(-0.25, 0.25)])
    radii = ratio * np.array([disc.radii[0] * case.uniform(0.88, 1.05), 1.0])
    return Outline(centre, radii, _bumps(0.028, case))


def _bumps(largest: float, case: np.random.Generator) -> Floats:
    shrink = np.array([[1.0], [1.5], [3.0], [5.0]])  # smooth: high harmonics are small
    return np.asarray(case.normal(0, largest, (4, 2)) / shrink)


def mask(eye: Eye, look: RetinaLook, size: int) -> NDArray[np.uint8]:
    """The grader's drawing, (size, size): 0 retina, 1 rim, 2 cup."""
    x, y = eye.coordinates(size)
    inside = eye.disc.reach(x, y) < 1
    cup = inside & (eye.cup.reach(x, y) < look.generous)
    return inside.astype(np.uint8) + cup.astype(np.uint8)


def light(eye: Eye, look: RetinaLook, size: int) -> Picture:
    """The light the eye returns under even illumination, (size, size, 3), about 0…1."""
    x, y = eye.coordinates(size)
    texture = [_stretched(lattice, size) for lattice in eye.lattices]
    pixel = 1 / (size * eye.radius)  # in disc radii; no edge is sharper than this, or it would alias
    retina = _retina(eye, look, x, y, texture)
    disc = eye.disc.reach(x, y)
    retina = _with_crescent(eye, retina, x, y, disc)
    speckle = 1 + 0.05 * texture[2] + 0.05 * texture[3]
    rim = _tinted(look.rim, eye, speckle * (1 + 0.06 * np.clip(x, -1, 1)))  # the temporal rim is paler
    cup = _tinted(look.pit, eye, 1 + 0.04 * texture[3] + 0.04 * texture[4])
    depth = expit((1 - eye.cup.reach(x, y)) * eye.cup.radii[1] / max(0.5 * look.edge, 0.3 * pixel))
    inside = expit((1 - disc) / max(0.33 * look.edge, 0.3 * pixel))
    nerve = rim + depth[..., None] * (cup - rim)
    tissue = retina + inside[..., None] * (nerve - retina)
    taken = look.vessels * retina_vessels.draw(eye.vessels, eye.place, eye.radius, size)[..., None]
    return np.asarray(tissue * (1 - taken * BLOOD), dtype=np.float32)


def _retina(eye: Eye, look: RetinaLook, x: Floats, y: Floats, texture: list[Floats]) -> Floats:
    """Pigment, the choroid's clouds and stripes, the nerve fibres' sheen and the dark macula."""
    base = PALE + eye.melanin * (DARK - PALE)
    clouds = 0.07 * texture[0] + 0.07 * texture[1] + 0.035 * texture[3] + 0.03 * texture[4]
    # where a smooth field crosses zero there are long winding lines: the choroid's own vessels
    stripes = np.exp(-((texture[2] + 0.5 * texture[1]) ** 2) / 0.12) - 0.4
    shade = 1 + look.choroid * (clouds + 0.16 * (1 - 0.6 * eye.melanin) * stripes)
    sheen = 0.10 * np.exp(-(((np.abs(y) - 1.5) / 0.9) ** 2) - (x - 0.6) ** 2 / 6)
    distance = np.hypot(x - FOVEA[0], y - FOVEA[1])
    macula = 1 - 0.30 * np.exp(-((distance / 1.5) ** 2)) - 0.18 * np.exp(-((distance / 0.45) ** 2))
    colour_shift = 1 + look.choroid * 0.07 * texture[0][..., None] * np.array([-0.4, 0.6, 1.0])
    return np.asarray(base * colour_shift * (shade * macula)[..., None] + sheen[..., None] * np.array([0.6, 0.7, 0.6]))


def _with_crescent(eye: Eye, retina: Floats, x: Floats, y: Floats, disc: Floats) -> Floats:
    """Atrophy beside the temporal rim: pale like a disc, but graders leave it out."""
    if eye.crescent == 0:
        return retina
    width = eye.crescent * np.clip(np.cos(np.arctan2(y, x)), 0, None) ** 0.5 + 1e-3
    pale = 0.55 * expit((1 + width - disc) / 0.04)
    return np.asarray(retina + pale[..., None] * (np.array([0.95, 0.66, 0.42]) - retina))


def _tinted(colour: tuple[float, float, float], eye: Eye, shade: Floats) -> Floats:
    """A colour under this eye's media: darker eyes return a little less light everywhere."""
    return np.asarray(np.array(colour) * (1.06 - 0.18 * eye.melanin) * shade[..., None])


def _stretched(lattice: Floats, size: int) -> Floats:
    """A lattice of noise at a picture's size; averaged, not sampled, where the picture is the coarser one."""
    picture = Image.fromarray(lattice.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(picture, dtype=np.float64)
