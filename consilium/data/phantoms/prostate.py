"""The prostate phantom: pelves scanned at six sites that differ as the paper's sources do, mostly in brightness."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from consilium.data.phantoms import prostate_pelvis
from consilium.data.phantoms.prostate_gland import ProstateGrid, Volume
from consilium.data.phantoms.prostate_pelvis import Pelvis, rectum_at
from consilium.data.phantoms.prostate_sites import LOOKS, ProstateLook
from consilium.data.phantoms.prostate_tissue import signals
from consilium.data.phantoms.tables import PhantomFederation, all_splits, checked, scaled, write_federation, write_home
from consilium.data.phantoms.volumes import Rendered, drawn, save_case

SIZE = 256  # pixels
SMALLEST, LARGEST = 32, 1024

FEDERATION = PhantomFederation(task="segmentation", labels=("prostate",), dimensions=3, channels=1, contains={})


def write(folder: Path, cases: int | None, size: int | None, seed: int) -> None:
    """Writes the federation into an existing empty folder; `cases` counts the volumes of all sites and splits."""
    size = checked(SIZE if size is None else size, SMALLEST, LARGEST, "pixels", seed)
    counts = cases_per_site(cases)
    write_federation(folder, FEDERATION)
    for site, look in LOOKS.items():
        rows = all_splits(site, counts[site], ".nii.gz")
        write_home(folder / site, rows, partial(_save, site, size, seed), f"{look.source}; shows no real patient")


def _save(site: str, size: int, seed: int, index: int, image: Path, label: Path | None) -> None:
    save_case(render(site, index, size, seed), image, label)


def cases_per_site(cases: int | None = None) -> dict[str, dict[str, int]]:
    """Volumes by site and split: the paper's table 8, or its proportions scaled to `cases` in all."""
    return scaled({site: look.sizes for site, look in LOOKS.items()}, cases)


def render(site: str, index: int, size: int, seed: int) -> Rendered:
    """The volume and the mask of one case, each (slice, row, column) from below upwards, and the spacing in mm.

    The size changes neither patient nor slices nor the field of view, only the pixels in it.
    """
    look = LOOKS[site]
    patient, scanner, pixels = (
        np.random.default_rng([seed, list(LOOKS).index(site), index, purpose]) for purpose in range(3)
    )
    field, thickness = 2.0 * round(drawn(look.field, scanner) / 2), round(drawn(look.thickness, scanner), 1)
    coil = scanner.random() < look.endorectal
    pelvis = prostate_pelvis.draw_pelvis(patient, thickness, coil)
    grid = pelvis.grid(size, field, thickness)
    image = _scan(pelvis, look, grid, coil, scanner, pixels)
    return image, prostate_pelvis.mask(pelvis, grid), (thickness, field / size, field / size)


def _scan(
    pelvis: Pelvis,
    look: ProstateLook,
    grid: ProstateGrid,
    coil: bool,
    scanner: np.random.Generator,
    pixels: np.random.Generator,
) -> NDArray[np.int16]:
    """What the site's scanner stores: the sequence's contrast, the coils' brightness, blur, noise, gamma and gain."""
    tissue = signals(drawn(look.echo, scanner), drawn(look.repetition, scanner), look.strength)
    picture = prostate_pelvis.signal(pelvis, tissue, grid) * _bias(pelvis, look, grid, coil, scanner)
    for axis in (1, 2):
        picture = gaussian_filter1d(picture, look.blur / grid.pixel, axis=axis)
    noise = max(0.01, drawn(look.noise, scanner)) * pixels.standard_normal((2, *picture.shape), dtype=np.float32)
    picture = np.hypot(picture + noise[0], noise[1])  # the magnitude of a complex signal: Rician
    stored = np.minimum(picture ** drawn(look.gamma, scanner), look.ceiling) * drawn(look.gain, scanner)
    return np.asarray(np.rint(stored), dtype=np.int16)


def _bias(pelvis: Pelvis, look: ProstateLook, grid: ProstateGrid, coil: bool, scanner: np.random.Generator) -> Volume:
    """The coils' brightness: smooth and random, stronger towards the skin, glaring around a coil in the rectum."""
    x, y, z = grid.x / 80, grid.y / 80, grid.z / 40
    waves = scanner.normal(0, look.uneven, 7)
    smooth = sum(w * part for w, part in zip(waves, (x, y, z, x * y, x * x - 0.3, y * y - 0.3, y * z)))
    field = np.exp(smooth) * (1 + max(0.0, drawn(look.surface, scanner)) * (y * y + 0.4 * x * x))
    if coil:
        back, radius = rectum_at(pelvis, grid.z)
        away = np.maximum(np.hypot(grid.x, grid.y - back) - radius, 0)
        field = field * (0.55 + scanner.uniform(2.0, 3.2) * np.exp(-away / 20))
    return np.asarray(field, dtype=np.float32)
