"""The toy tasks of the tests: three sites, 16-pixel images, a network of a few thousand weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium import toy_federation
from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site
from consilium.study import Study
from consilium.toy_federation import PLAIN_SGD, SIZES, TOY_FIELDS, draw, write_toy

ANNOTATED = {"ada": ("round",), "bea": ("square",), "cid": ("round", "square")}
__all__ = ["PLAIN_SGD", "SIZES", "TOY_FIELDS", "draw", "toy_study", "write_organs", "write_toy"]
VALUE = {"round": 1, "square": 2}
SPLITS = ("train", "train", "train", "valid", "test")
RESIDUAL = ("cond-dec", "fedavg-foreground", "fedcrld")  # a decoder with a norm; three rounds that learn enough


def toy_study(federation: Path, method: str = "fedavg", **changes: Any) -> Study:
    """The package's toy study in batches of four, scored in its third round: enough to learn, and no more."""
    changes.setdefault("local__batch_size", 2 if method == "per-fedavg" else 4)
    changes.setdefault("study__score_every", 3)
    changes.setdefault("task__residual_units", int(method in RESIDUAL))
    return toy_federation.toy_study(federation, method, **changes)


def write_organs(
    folder: Path,
    hidden_noise: bool = False,
    noise: str = "",
    size: int = 16,
    splits: tuple[str, ...] | Mapping[str, tuple[str, ...]] = SPLITS,
    unlabelled: int = 0,
) -> Path:
    """Three sites with a disc and a square in every image; `hidden_noise` draws hidden labels anew, at random.

    `splits` are those of the images, the same at every site or by site.

    `noise` names a label whose masks are spoilt where it is annotated. So many more images are `unlabelled`: a mask
    lies beside them as beside the others, but no table names it.
    """
    write_federation_toml(folder, "segmentation", list(VALUE), 2, 1)
    for number, (site, labels) in enumerate(ANNOTATED.items()):
        cases = []
        for sub in ("images", "labels"):
            (folder / site / sub).mkdir(parents=True)
        own = splits[site] if isinstance(splits, Mapping) else splits
        drawn = {**dict(enumerate(own)), **{100 + i: "train" for i in range(unlabelled)}}
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
