"""The toy tasks of the tests: three sites, 16-pixel images, a network of a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium.data.site_folder import Case, write_federation_toml, write_site
from consilium.study import Study, make_study

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


ANNOTATED = {"ada": ("round",), "bea": ("square",), "cid": ("round", "square")}
VALUE = {"round": 1, "square": 2}
SPLITS = ("train", "train", "train", "valid", "test")


def write_organs(
    folder: Path,
    hidden_noise: bool = False,
    noise: str = "",
    size: int = 16,
    splits: tuple[str, ...] = SPLITS,
    unlabelled: int = 0,
) -> Path:
    """Three sites with a disc and a square in every image; `hidden_noise` draws hidden labels anew, at random.

    `noise` names a label whose masks are spoilt where it is annotated. So many more images are `unlabelled`: a mask
    lies beside them as beside the others, but no table names it.
    """
    write_federation_toml(folder, "segmentation", list(VALUE), 2, 1)
    for number, (site, labels) in enumerate(ANNOTATED.items()):
        cases = []
        for sub in ("images", "labels"):
            (folder / site / sub).mkdir(parents=True)
        drawn = {**dict(enumerate(splits)), **{100 + i: "train" for i in range(unlabelled)}}
        for index, split in drawn.items():
            known = labels if index < 100 else ()
            rng, dice = np.random.default_rng([number, index]), np.random.default_rng([99, number, index])
            y, x = np.mgrid[:size, :size]
            mask = np.zeros((size, size), np.uint8)
            mask[(y - rng.uniform(3, 6)) ** 2 + (x - rng.uniform(4, 12)) ** 2 < 8] = 1
            top, left = rng.integers(8, 11), rng.integers(2, 10)
            mask[top : top + 5, left : left + 5] = 2
            image = rng.normal(60 + 20 * number, 8, mask.shape) + 70 * (mask == 1) + 120 * (mask == 2)
            unknown = [value for label, value in VALUE.items() if label not in known]
            if hidden_noise and unknown:
                free = ~np.isin(mask, [VALUE[label] for label in known])
                mask[free] = dice.choice([0, *unknown], int(free.sum()))
            if noise in labels:
                mask[mask == VALUE[noise]] = dice.choice([0, VALUE[noise]], int((mask == VALUE[noise]).sum()))
            paths = [folder / site / sub / f"{index}.png" for sub in ("images", "labels")]
            Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(paths[0])
            Image.fromarray(mask).save(paths[1])
            cases.append(Case(f"{site}{index}", f"p{index}", split, paths[0], paths[1] if known else None))
        write_site(folder, site, cases, labels)
    return folder


def toy_study(federation: Path, method: str = "fedavg", **changes: Any) -> Study:
    """A study of three rounds on the toy task; changes are written `local__lr=0.1`, None takes a key away."""
    tables: dict[str, dict[str, Any]] = {
        "study": {"rounds": 3, "score_every": 2},
        "data": {"federation": str(federation)},
        "task": {"widths": [4, 8], "residual_units": 1, "selector_widths": [4, 8]},
        "local": {"batch_size": 2, "lr": 0.01, **(PLAIN_SGD if method == "scaffold" else {})},
        "method": {"name": method, **TOY_FIELDS.get(method, {})},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tables.setdefault(section, {})[name] = value
        if value is None:
            del tables[section][name]
    return make_study(tables)
