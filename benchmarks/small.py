"""A federation of any number of sites with next to no data, and a study of a 30 MB network on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.study import Study
from consilium.study_reading import make_study

SITES = tuple(f"site{number:02d}" for number in range(24))
WIDTHS = (36, 72, 140, 272, 544)  # a U-Net of 30 MB in 97 tensors, the largest 10.7 MB
SPLITS = ("train", "valid", "test")


def write_small(folder: Path) -> Path:
    """One 32 × 32 image per site and split."""
    if folder.exists():
        return folder
    write_federation_toml(folder, "segmentation", ["blob"], 2, 1)
    noise = np.random.default_rng(0)
    for site in SITES:
        cases = []
        for split in SPLITS:
            image, mask = (folder / site / f"{split}-{kind}.png" for kind in ("image", "mask"))
            image.parent.mkdir(exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (32, 32), dtype=np.uint8)).save(image)
            Image.fromarray(noise.integers(0, 2, (32, 32), dtype=np.uint8)).save(mask)
            cases.append(Case(split, split, split, image, mask))
        write_site(folder, site, cases)
    return folder


def small_study(data: Path, method: str, sites: int, rounds: int, widths: Sequence[int] = WIDTHS) -> Study:
    return make_study({
        "study": {"rounds": rounds, "score_every": rounds, "sites": list(SITES[:sites]), "firewall": "off"},
        "data": {"federation": str(data)},
        "task": {"widths": list(widths), "residual_units": 2},
        "method": {"name": method},
    })  # fmt: skip
