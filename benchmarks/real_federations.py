"""The federations of docs/results/real-images.md: volumes of the Decathlon's hippocampus, and PROSTATEx.

    python -m benchmarks.real_federations hippocampus FOLDER --to data      # FOLDER has images/ and labels/
    python -m benchmarks.real_federations prostatex FOLDER --to data        # FOLDER has Images/ and mask_prostate/
    python -m benchmarks.real_federations thin FEDERATION --to data         # of pictures, as `partition` has cut them

Hippocampus, twice. By appearance: four sites, cut at the medians of two figures of the z-scored image, its sharpness
(mean length of the gradient) and its skewness, so that sites differ after normalisation too; 8 volumes train at each.
By an uneven draw: 32, 16, 8 and 4 volumes train at four sites that differ in nothing else. At every site 6 volumes
validate and 12 test. PROSTATEx: two sites of seven patients, sharper and smoother half, in seven folds; in each fold
one volume of each site tests, one validates and five train. Thinned: every 20th training picture and every 4th of
validation stay, all of test, so that small sites train on few and are still judged on many. Nothing here looked at a
method's result.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from consilium.data.site_folder import Case
from consilium.data.site_writing import write_federation_toml, write_site

Pair = tuple[Path, Path]  # image and mask
VALID, TEST = 6, 12


def appearance(path: Path) -> tuple[float, float]:
    """Sharpness and skewness of the z-scored image."""
    image: Any = nibabel.load(path)
    values = np.asarray(image.dataobj, dtype=np.float64)
    values = (values - values.mean()) / values.std()
    steps = np.gradient(values)
    return float(np.sqrt(sum(step**2 for step in steps)).mean()), float((values**3).mean())


def by_appearance(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Four sites, cut at the medians of both figures."""
    figures = [appearance(image) for image, _ in pairs]
    sharp, skewed = (float(np.median(column)) for column in zip(*figures, strict=True))
    sites: dict[str, list[Pair]] = {}
    for pair, (first, second) in zip(pairs, figures, strict=True):
        name = f"{'sharp' if first > sharp else 'smooth'}-{'bright' if second > skewed else 'dark'}"
        sites.setdefault(name, []).append(pair)
    return dict(sorted(sites.items()))


def drawn(pairs: Sequence[Pair], train: Mapping[str, int]) -> dict[str, list[Pair]]:
    """Sites of a random draw without replacement."""
    order = list(np.random.default_rng(0).permutation(len(pairs)))
    return {name: [pairs[order.pop()] for _ in range(n + VALID + TEST)] for name, n in train.items()}


def write(folder: Path, labels: Sequence[str], sites: Mapping[str, Mapping[str, Sequence[Pair]]]) -> None:
    """Site → split → cases."""
    write_federation_toml(folder, "segmentation", list(labels), 3, 1)
    for name, splits in sites.items():
        cases = []
        for split, pairs in splits.items():
            for image, mask in pairs:
                case = mask.name.removesuffix(".nii.gz")
                places = [folder / name / part / f"{case}.nii.gz" for part in ("images", "labels")]
                for place, source in zip(places, (image, mask), strict=True):
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(source.read_bytes())
                cases.append(Case(case, case, split, *places))
        write_site(folder, name, cases)


def split(pairs: Sequence[Pair], train: int, place: int) -> dict[str, list[Pair]]:
    """A random draw of the site's volumes: `train`, then those that validate, then those that test."""
    order = np.random.default_rng([1, place]).permutation(len(pairs))
    found = [pairs[i] for i in order]
    ends = (train, train + VALID, train + VALID + TEST)
    return {"train": found[: ends[0]], "valid": found[ends[0] : ends[1]], "test": found[ends[1] : ends[2]]}


def hippocampus(source: Path, to: Path) -> None:
    pairs = [(path, source / "labels" / path.name) for path in sorted((source / "images").glob("*.nii.gz"))]
    labels = ["anterior", "posterior"]
    looks = by_appearance(pairs)
    write(
        to / "hippocampus-appearance",
        labels,
        {name: split(found, 8, place) for place, (name, found) in enumerate(looks.items())},
    )
    sizes = {"large": 32, "middle": 16, "small": 8, "tiny": 4}
    uneven = drawn(pairs, sizes)
    write(
        to / "hippocampus-uneven",
        labels,
        {name: split(found, sizes[name], 10 + place) for place, (name, found) in enumerate(uneven.items())},
    )


def prostatex(source: Path, to: Path) -> None:
    images = sorted((source / "Images").glob("*.nii.gz"))
    pairs = [(path, source / "mask_prostate" / f"{path.name.split('_')[0]}.nii.gz") for path in images]
    ranked = sorted(pairs, key=lambda pair: appearance(pair[0])[0])
    sites = {"smooth": ranked[: len(ranked) // 2], "sharp": ranked[len(ranked) // 2 :]}
    for fold in range(7):
        write(
            to / f"prostatex-fold{fold}",
            ["prostate"],
            {
                name: {
                    "train": [pair for i, pair in enumerate(found) if i not in (fold, (fold + 1) % 7)],
                    "valid": [found[(fold + 1) % 7]],
                    "test": [found[fold]],
                }
                for name, found in sites.items()
            },
        )


def thin(source: Path, to: Path) -> None:
    """A copy of a federation, in <to>/<its name>-thin."""
    folder = to / f"{source.name}-thin"
    shutil.copytree(source, folder)
    for table in folder.glob("*/cases.csv"):
        head, *lines = table.read_text(encoding="utf-8").splitlines()
        kept = [head]
        for part, step in (("train", 20), ("valid", 4), ("test", 1)):
            kept += [line for line in lines if f",{part}," in line][::step]
        table.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_federations", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=["hippocampus", "prostatex", "thin"])
    parser.add_argument("source", type=Path, help="the folder of the published files, or of the federation")
    parser.add_argument("--to", type=Path, default=Path("data"))
    options = parser.parse_args()
    {"hippocampus": hippocampus, "prostatex": prostatex, "thin": thin}[options.kind](options.source, options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
