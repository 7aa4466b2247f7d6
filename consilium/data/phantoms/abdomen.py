"""The abdomen phantom: computed tomographies of four sites that annotate different organs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter1d

from consilium.data.apportion import apportion
from consilium.data.phantoms import abdomen_body
from consilium.data.phantoms.abdomen_organs import LABELS, draw_patient
from consilium.data.phantoms.abdomen_shapes import Volume
from consilium.data.phantoms.abdomen_sites import DIVISIONS, LOOKS, AbdomenLook
from consilium.data.phantoms.tables import (
    PhantomFederation,
    all_splits,
    checked,
    numbered,
    scaled,
    write_federation,
    write_home,
)
from consilium.data.phantoms.volumes import Rendered, drawn, save_case
from consilium.errors import StudyError

SIZE = 64  # rows and columns; there are three slices for every four of them
SMALLEST, LARGEST = 24, 512
FIRST_UNLABELLED = 300_000  # behind those of all splits

FEDERATION = PhantomFederation(task="segmentation", labels=LABELS, dimensions=3, channels=1, contains={})


def write(
    folder: Path,
    cases: int | None,
    size: int | None,
    seed: int,
    division: int = 1,
    unlabelled: int = 0,
    tests: int = 0,
) -> None:
    """Writes the federation into an existing empty folder; `cases` counts the volumes of all sites and splits.

    `unlabelled` more for training have no mask. They are other patients, and change nothing in the rest. `tests` takes
    the place of the number of test volumes: they cost no training, and few of them tell nothing.
    """
    size = checked(SIZE if size is None else size, SMALLEST, LARGEST, "rows", seed)
    if division not in DIVISIONS:
        raise StudyError(f"division {division} is not one of the paper's; choose {', '.join(map(str, DIVISIONS))}.")
    if unlabelled < 0:
        raise StudyError(f"unlabelled {unlabelled} is negative; choose 0 or more.")
    counts = cases_per_site(cases)
    if tests:
        shares = apportion({site: look.sizes[2] for site, look in LOOKS.items()}, tests)
        counts = {site: {**by, "test": shares[site]} for site, by in counts.items()}
    more = apportion({site: look.sizes[0] for site, look in LOOKS.items() if look.sizes[0]}, unlabelled, least=0)
    write_federation(folder, FEDERATION)
    for site, look in LOOKS.items():
        extra = numbered(site, "train", FIRST_UNLABELLED, more.get(site, 0), ".nii.gz")
        rows = all_splits(site, counts[site], ".nii.gz") + [(index, replace(case, label="")) for index, case in extra]
        source = f"{look.source}; shows no real patient; masks hold all labels"
        write_home(folder / site, rows, partial(_save, site, size, seed), source, DIVISIONS[division].get(site, LABELS))


def _save(site: str, size: int, seed: int, index: int, image: Path, label: Path | None) -> None:
    save_case(render(site, index, size, seed), image, label)


def cases_per_site(cases: int | None = None) -> dict[str, dict[str, int]]:
    """Volumes by site and split: the paper's, or its proportions scaled to `cases` in all. BTCV has test cases only."""
    return scaled({site: look.sizes for site, look in LOOKS.items()}, cases)


def render(site: str, index: int, size: int, seed: int) -> Rendered:
    """The volume in HU and the mask of one case, each (slice, row, column) from below upwards, and the spacing in mm.

    The size changes neither the patient nor the field of view, only the voxels in it.
    """
    look = LOOKS[site]
    patient_rng, scanner, pixels = (
        np.random.default_rng([seed, list(LOOKS).index(site), index, purpose]) for purpose in range(3)
    )
    patient = draw_patient(patient_rng, drawn(look.girth, scanner), drawn(look.fat, scanner))
    slices = round(0.75 * size)
    field, span = 2.0 * round(drawn(look.field, scanner) / 2), 2.0 * round(drawn(look.span, scanner) / 2)
    grid = patient.grid(slices, size, field, span, drawn(look.middle, scanner))
    hu = abdomen_body.tissues(max(0.0, drawn(look.arterial, scanner)), max(0.0, drawn(look.venous, scanner)))
    hu["liver"] -= (scanner.random() < look.fatty_liver) * scanner.uniform(15, 40)
    picture, mask = abdomen_body.draw(patient, grid, hu)
    _draw_table(picture, look, field, patient.stretch[1] * (107 + patient.fat) + patient.place[1])
    return _scan(picture, look, field / size, scanner, pixels), mask, (span / slices, field / size, field / size)


def _draw_table(picture: Volume, look: AbdomenLook, field: float, back: float) -> None:
    """A thin shell under the patient, where there is air."""
    if not look.table:
        return
    size = picture.shape[-1]
    y, x = np.mgrid[:size, :size] * (field / size) - field / 2
    under = back + 4 - (0.0016 * x**2 if look.table == "curved" else 0)
    shell = np.clip(1 - np.abs(y - under - 3) / max(4.0, field / size), 0, 1) * (np.abs(x) < 205)
    picture += np.where(picture < -900, 900 * shell, 0).astype(np.float32)


def _scan(
    picture: Volume, look: AbdomenLook, pixel: float, scanner: np.random.Generator, pixels: np.random.Generator
) -> NDArray[np.int16]:
    """What the site's scanner stores: blur, noise, and values that are a little off."""
    for axis in (1, 2):
        picture = gaussian_filter1d(picture, look.blur / pixel, axis=axis)
    # noise is grainy: a voxel's is shared with its neighbours in the slice
    noise = pixels.standard_normal(picture.shape, dtype=np.float32)
    noise = noise + 0.35 * (np.roll(noise, 1, axis=1) + np.roll(noise, 1, axis=2))
    strength = max(3.0, drawn(look.noise, scanner)) / 1.11
    air = np.clip((picture + 1000) / 300, 0.35, 1)  # less noise in air than in the body
    stored = (picture + strength * air * noise + 1000) * drawn(look.gain, scanner) - 1000 + drawn(look.offset, scanner)
    return np.asarray(np.clip(np.rint(stored), -1024, 2000), dtype=np.int16)
