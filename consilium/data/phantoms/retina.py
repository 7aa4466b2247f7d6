"""The retina phantom: eyes photographed at six sites that differ as the paper's retinal sources do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.special import expit

from consilium.data.phantoms import retina_eye
from consilium.data.phantoms.retina_eye import Picture, drawn
from consilium.data.phantoms.retina_sites import LOOKS, PARTNERS, RetinaLook, with_camera_of
from consilium.data.phantoms.tables import (
    FIRST_INDEX,
    PhantomFederation,
    all_splits,
    checked,
    scaled,
    write_federation,
    write_home,
)
from consilium.errors import StudyError

SIZE = 256  # pixels
SMALLEST, LARGEST = 16, 1024
PAIRED = 6  # of six cases, the last is the fellow eye of the one before it

FEDERATION = PhantomFederation(
    task="segmentation", labels=("disc", "cup"), dimensions=2, channels=3, contains={"disc": ("cup",)}
)


def write(folder: Path, cases: int | None, size: int | None, seed: int, alike: float = 0.0) -> None:
    """Writes the federation into an existing empty folder; `cases` counts all sites and splits.

    `alike`: the share of every site's patients who are photographed with its partner's camera, 0 to 0.5.
    """
    if not 0 <= alike <= 0.5:
        raise StudyError(f"alike = {alike}: it is a share of the patients, from 0 to 0.5.")
    size = checked(SIZE if size is None else size, SMALLEST, LARGEST, "pixels", seed)
    counts = cases_per_site(cases)
    write_federation(folder, FEDERATION)
    for site, look in LOOKS.items():
        rows = all_splits(site, counts[site], ".png", lambda index: _patient(index)[0])
        write_home(folder / site, rows, partial(_save, site, size, seed, alike), f"{look.source}; shows no real eye")


def _save(site: str, size: int, seed: int, alike: float, index: int, image: Path, label: Path | None) -> None:
    photograph, mask = render(site, index, size, seed, alike)
    Image.fromarray(photograph).save(image)
    if label is not None:
        Image.fromarray(mask).save(label)


def cases_per_site(cases: int | None = None) -> dict[str, dict[str, int]]:
    """Cases by site and split: the paper's table 1, or its proportions scaled to `cases` in all."""
    return scaled({site: look.sizes for site, look in LOOKS.items()}, cases)


def render(
    site: str, index: int, size: int, seed: int, alike: float = 0.0
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The photograph (size, size, 3) and the mask (size, size; 1 rim, 2 cup) of one case; the size changes no eye.

    A case with the site's own camera is the same for every `alike`.
    """
    patient, fellow = _patient(index)
    look = LOOKS[site]
    if borrows_camera(site, patient, seed, alike):
        look = with_camera_of(LOOKS[PARTNERS[site]], look)
    shared, own, camera, pixels = (
        np.random.default_rng([seed, list(LOOKS).index(site), number, purpose])
        for purpose, number in enumerate((patient, index, index, index))
    )
    eye = retina_eye.draw_eye(look, shared, own, fellow)
    image = _photograph(retina_eye.light(eye, look, size), look, eye.temple, camera, pixels)
    return image, retina_eye.mask(eye, look, size)


def borrows_camera(site: str, patient: int, seed: int, alike: float) -> bool:
    """Whether a patient is photographed with the partner site's camera; both eyes are, and a larger share adds more."""
    draw = np.random.default_rng([seed, list(LOOKS).index(site), patient, 4])  # 0 to 3 are the eye's and the picture's
    return bool(draw.random() < alike)


def _patient(index: int) -> tuple[int, bool]:
    """The index of a patient's first case, and whether this one is the fellow eye."""
    within = index % FIRST_INDEX["valid"]
    fellow = within % PAIRED == PAIRED - 1
    return index - fellow, fellow


def _photograph(
    light: Picture, look: RetinaLook, temple: int, camera: np.random.Generator, pixels: np.random.Generator
) -> NDArray[np.uint8]:
    """What the site's camera makes of the eye's light: illumination, stray light, optics, field, colour, noise."""
    size = len(light)
    at = (np.arange(size) + 0.5) / size - 0.5
    u, v = np.meshgrid(at, at)
    radius = drawn(look.field, camera)
    du, dv = u - camera.normal(0, 0.008), v - camera.normal(0, 0.008)
    outwards = np.hypot(du / look.squeeze, dv) / radius  # 1 on the field's edge
    lit = light * _illumination(look, u, v, outwards, camera)[..., None]
    haze = max(0.0, drawn(look.haze, camera))
    lit = lit * (1 - haze) + haze * np.array([0.85, 0.75, 0.62])
    lit = gaussian_filter(lit, (look.blur * size, look.blur * size, 0))
    seen = _field(look, outwards, du, dv, temple, radius)[..., None]
    colour = _recorded(lit * drawn(look.exposure, camera), look, camera)
    picture = seen * colour + (1 - seen) * np.array(look.border)
    grain = pixels.normal(size=picture.shape) * (0.7 * np.sqrt(np.clip(picture, 0, 1)) + 0.3)
    noisy = picture + look.noise * camera.uniform(0.7, 1.3) * grain
    return np.asarray(np.clip(np.rint(noisy * 255), 0, 255), dtype=np.uint8)


def _illumination(
    look: RetinaLook,
    u: NDArray[np.float64],
    v: NDArray[np.float64],
    outwards: NDArray[np.float64],
    camera: np.random.Generator,
) -> NDArray[np.float64]:
    """Vignetting, a tilt of the lamp, and sometimes a pale crescent of reflected light at the field's edge."""
    tilt = camera.normal(0, 0.16, 2)
    falloff = 1 - look.vignette * camera.uniform(0.7, 1.3) * np.clip(outwards, 0, 1.2) ** 2
    angle = camera.uniform(-np.pi, np.pi)
    glare = camera.choice([0.0, 0.0, 0.25]) * expit((outwards - 0.95) / 0.04)
    facing = np.clip(np.cos(np.arctan2(v, u) - angle), 0, 1) ** 2
    return np.asarray(falloff * (1 + tilt[0] * u + tilt[1] * v) + glare * facing)


def _field(
    look: RetinaLook,
    outwards: NDArray[np.float64],
    du: NDArray[np.float64],
    dv: NDArray[np.float64],
    temple: int,
    radius: float,
) -> NDArray[np.float64]:
    """How much of each pixel lies in the field of view, 0…1."""
    soft = max(0.004, 0.35 / len(outwards))  # no sharper than a pixel
    seen = expit((1 - outwards) * radius / soft) * expit((look.cut - np.abs(dv)) / soft)
    if look.notch:
        tab = (np.abs(dv + 0.20) < 0.018) & (np.abs(du - temple * 0.405) < 0.04)
        seen = np.maximum(seen, tab)
    return np.asarray(seen)


def _recorded(lit: NDArray[np.float64], look: RetinaLook, camera: np.random.Generator) -> NDArray[np.float64]:
    """The camera's colours: channels mixed, white balance a little off, highlights rolled off, a curve per channel."""
    mixed = lit @ np.array(look.mixing).T * (1 + camera.normal(0, 0.03, 3))
    rolled = 1.25 * (1 - np.exp(-1.1 * np.clip(mixed, 0, None)))
    return np.asarray(np.clip(rolled, 0, 1.05) ** np.array(look.gamma))
