"""Three small sites with 16 × 16 images, and a study for them: the contract tests and the project's tests run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.study import Study
from consilium.study_reading import make_study

SIZES = {"ada": (8, 3, 3), "bea": (12, 3, 3), "cid": (10, 3, 3)}  # training, validation, test cases
TOY_FIELDS = {"pfedme": {"strength": 1.0, "inner_lr": 0.3, "lr": 0.5}}  # a few steps must show that it learns
PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.5}


def draw(site: str, index: int) -> tuple[np.ndarray, np.ndarray]:
    """A blob on a noisy ground; sites differ in contrast, size and noise."""
    rng = np.random.default_rng([list(SIZES).index(site), index])
    y, x = np.mgrid[:16, :16]
    number = list(SIZES).index(site)
    radius = rng.uniform(2, 3) + number
    mask = (y - rng.uniform(5, 11)) ** 2 + (x - rng.uniform(5, 11)) ** 2 < radius**2
    bright = 80 + 60 * number
    image = rng.normal(60, 8 + 6 * number, (16, 16)) + mask * (bright if number != 1 else -50)
    return np.clip(image, 0, 255).astype(np.uint8), mask.astype(np.uint8)


def write_toy(folder: Path) -> Path:
    """The toy federation as site folders."""
    write_federation_toml(folder, "segmentation", ["blob"], 2, 1)
    for site, counts in SIZES.items():
        cases, index = [], 0
        for sub in ("images", "labels"):
            (folder / site / sub).mkdir(parents=True)
        for split, count in zip(("train", "valid", "test"), counts):
            for _ in range(count):
                image, mask = draw(site, index)
                name = f"{site}{index:03d}"
                paths = [folder / site / sub / f"{name}.png" for sub in ("images", "labels")]
                Image.fromarray(image).save(paths[0])
                Image.fromarray(mask).save(paths[1])
                cases.append(Case(name, f"p{index}", split, paths[0], paths[1]))
                index += 1
        write_site(folder, site, cases)
    return folder


def toy_study(federation: Path, method: str = "fedavg", **changes: Any) -> Study:
    """A study of three rounds on the toy task; changes are written `local__lr=0.1`, `method__sharpness__rho=0.5`;
    None takes a key away."""
    tables: dict[str, dict[str, Any]] = {
        "study": {"rounds": 3, "score_every": 2},
        "data": {"federation": str(federation)},
        "task": {"widths": [4, 8], "residual_units": 1, "selector_widths": [4, 8]},
        "local": {"batch_size": 2, "lr": 0.01, **(PLAIN_SGD if method == "scaffold" else {})},
        "method": {"name": method, **TOY_FIELDS.get(method, {})},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        table: dict[str, Any] = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
        if value is None:
            del table[name]
    return make_study(tables)
