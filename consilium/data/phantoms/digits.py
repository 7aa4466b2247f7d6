"""The digits phantom: ten classes of small grey pictures, at sites that see two classes each."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.ndimage import gaussian_filter
from scipy.special import expit

from consilium.data.apportion import apportion
from consilium.data.partition import Cut, shares
from consilium.data.phantoms.digits_strokes import DIGITS
from consilium.data.phantoms.tables import SPLITS, PhantomCase, PhantomFederation, write_federation, write_site
from consilium.errors import StudyError

SIZE, CASES, SITES = 28, 7000, 12
SMALLEST, LARGEST = 8, 512
SHARES = {"train": 0.85 * 6 / 7, "valid": 0.15 * 6 / 7, "test": 1 / 7}  # six to one, as MNIST
FIRST_INDEX = {"train": 0, "valid": 1_000_000, "test": 2_000_000}
ALONE = "digits"  # the one site's name
STEPS = 10  # of the pen from point to point; twice as many where a stroke is straight

FEDERATION = PhantomFederation(task="classification", labels=tuple(DIGITS), dimensions=2, channels=1, contains={})


def write(folder: Path, cases: int | None, size: int | None, seed: int, sites: int | None = None) -> None:
    """Writes the federation into an existing empty folder; `cases` counts all sites and splits."""
    size = SIZE if size is None else size
    if not SMALLEST <= size <= LARGEST:
        raise StudyError(f"size {size} is not possible; choose {SMALLEST} to {LARGEST} pixels.")
    if seed < 0:
        raise StudyError(f"seed {seed} is negative; choose 0 or more.")
    plan = cases_per_site(cases, sites)
    write_federation(folder, FEDERATION)
    for number, (site, splits) in enumerate(plan.items()):
        home = folder / site
        (home / "images").mkdir(parents=True)
        rows: list[PhantomCase] = []
        images: list[NDArray[np.uint8]] = []
        for split, labels in splits.items():
            for label, count in labels.items():
                for index in range(FIRST_INDEX[split], FIRST_INDEX[split] + count):
                    name = f"{site}-{label}-{index:07d}"
                    rows.append(PhantomCase(name, name, split, f"images/digits.npy#{len(images)}", label))
                    images.append(render(label, number, index, size, seed))
        np.save(home / "images" / "digits.npy", np.stack(images))
        write_site(home, source="synthetic phantom; no one wrote these digits", rows=rows)


def cases_per_site(cases: int | None = None, sites: int | None = None) -> dict[str, dict[str, dict[str, int]]]:
    """Cases by site, split and class: two random classes at every site in random shares; all at a single site."""
    sites = SITES if sites is None else sites
    if sites < 1:
        raise StudyError(f"{sites} sites are not possible; choose 1 or more.")
    names = [ALONE] if sites == 1 else [f"site{i + 1:02d}" for i in range(sites)]
    # of one seed, so that another seed of the phantom draws other digits at the same sites
    held = np.ones((1, len(DIGITS))) if sites == 1 else shares(Cut("pathological", sites, seed=0), len(DIGITS))
    table = {(i, split): held[i].sum() * share for i in range(sites) for split, share in SHARES.items()}
    scaled = apportion(table, CASES if cases is None else cases)
    return {name: {split: _by_class(held[i], scaled[i, split]) for split in SPLITS} for i, name in enumerate(names)}


def _by_class(held: NDArray[np.float64], count: int) -> dict[str, int]:
    own = {label: float(share) for label, share in zip(DIGITS, held) if share}
    return apportion(own, count, least=int(count >= len(own)))


def render(label: str, site: int, index: int, size: int, seed: int) -> NDArray[np.uint8]:
    """One picture (size, size), bright on dark; the size changes no digit."""
    writer, pixels = (np.random.default_rng([seed, int(label), site, index, purpose]) for purpose in range(2))
    path = _written(label, writer)
    width, soft = writer.uniform(0.025, 0.065), writer.uniform(0.008, 0.03)
    at = (np.arange(size) + 0.5) / size
    u, v = at[None, :], at[:, None]
    nearest = np.full((size, size), np.inf)
    for across, down in zip((at - path[:, :1]) ** 2, (at - path[:, 1:]) ** 2):
        np.minimum(nearest, across + down[:, None], out=nearest)
    ink = expit((width - np.sqrt(nearest)) / max(soft, 0.25 / size))
    bright, ground = writer.uniform(0.55, 1.0), writer.uniform(0.0, 0.12)
    tilt = writer.normal(0, 0.06, 2)
    paper = ground + tilt[0] * (u - 0.5) + tilt[1] * (v - 0.5)
    stains = gaussian_filter(pixels.normal(size=(size, size)), 0.06 * size, mode="wrap") * 0.06 * size * 3.5
    noise = writer.uniform(0.02, 0.10) * pixels.normal(size=(size, size))
    picture = paper + (bright - paper) * ink + writer.uniform(0.0, 0.14) * stains + noise
    return np.asarray(np.clip(np.rint(picture * 255), 0, 255), dtype=np.uint8)


def _written(label: str, writer: np.random.Generator) -> NDArray[np.float64]:
    """The pen's path (points, 2): a habit, a trembling hand, then slant, turn, width, height and place."""
    habit = DIGITS[label][writer.integers(len(DIGITS[label]))]
    points = np.array(habit.points) + writer.normal(0, writer.uniform(0.015, 0.045), (len(habit.points), 2)) - 0.5
    path = np.concatenate([_curve(len(stroke)) @ points[list(stroke)] for stroke in habit.strokes])
    turn, slant = writer.normal(0, 0.16), writer.normal(0.08, 0.16)
    wide, high = writer.uniform(0.55, 0.95), writer.uniform(0.62, 0.92)
    stretch = np.array([[wide, -slant * high], [0.0, high]])
    around = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    return np.asarray(path @ (around @ stretch).T + 0.5 + writer.normal(0, 0.035, 2))


@lru_cache
def _curve(points: int) -> NDArray[np.float64]:
    """The matrix (steps, points) from the points of a stroke to the pen's path through them."""
    straight = points == 2
    along = np.linspace(0, points - 1, STEPS * (points - 1) * (1 + straight) + 1)
    if straight:
        return np.stack([1 - along, along], axis=1)
    return np.asarray(CubicSpline(np.arange(points), np.eye(points))(along))
