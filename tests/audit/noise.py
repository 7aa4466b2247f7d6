"""A federation to be memorised: noise, and masks that have nothing to do with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.simulation import run
from consilium.toy_federation import toy_study

SIDE = 8


def write_noise(folder: Path, seed: int, train: int, valid: int, test: int, sites: int = 1) -> Path:
    """So many cases of every site; no image tells its mask, so a model can only know the masks it has seen."""
    write_federation_toml(folder, "segmentation", ["blob"], 2, 1)
    for site in ("ada", "bea")[:sites]:
        for sub in ("images", "labels"):
            (folder / site / sub).mkdir(parents=True)
        rng = np.random.default_rng([seed, ord(site[0])])
        cases = []
        for index, split in enumerate(["train"] * train + ["valid"] * valid + ["test"] * test):
            paths = [folder / site / sub / f"{index:04d}.png" for sub in ("images", "labels")]
            Image.fromarray(rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)).save(paths[0])
            y, x = np.mgrid[:SIDE, :SIDE]
            blob = (y - rng.uniform(1, SIDE - 1)) ** 2 + (x - rng.uniform(1, SIDE - 1)) ** 2 < 6
            Image.fromarray(blob.astype(np.uint8)).save(paths[1])
            cases.append(Case(f"{site}{index:04d}", f"{site}-{seed}-{index}", split, *paths))
        write_site(folder, site, cases)
    return folder


def overfitted(federation: Path, runs: Path, epochs: int, method: str = "fedavg", **changes: object) -> Path:
    """A run that had so many epochs on a federation of noise."""
    how: dict[str, object] = {"study__rounds": 1, "local__epochs": epochs, "local__batch_size": 8, "local__lr": 0.01}
    how |= {"task__widths": [8, 16], "task__residual_units": 0, "task__loss": "dice+ce", **changes}
    study = toy_study(federation, method, **how)
    return run(study, runs, workers=0).folder


def moved(run: Path, federation: Path) -> Path:
    """The same run, told that its data are another federation."""
    path = run / "study.toml"
    lines = path.read_text().splitlines()
    told = [f'federation = "{federation}"' if line.startswith("federation = ") else line for line in lines]
    assert told != lines
    path.write_text("\n".join(told) + "\n")
    return run
