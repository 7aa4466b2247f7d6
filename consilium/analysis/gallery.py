"""What the sites hold: an example image each, and how many cases: figures 5 and 6, tables 1, 2 and 8 of FedSM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.analysis.opening import OpenRun
from consilium.data.cache import SiteArrays
from consilium.tasks.segmentation import Segmentation
from consilium.worker import open_arrays

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Example:
    """One case of a site as training sees it."""

    site: str
    outside: bool
    case: str
    image: NDArray[np.float32]  # (H, W) or (H, W, 3); of a volume, the slice with the most to see
    outlines: Mapping[str, NDArray[np.bool_]]  # by label; empty for a classification
    note: str  # the class, or which slice


@dataclass(frozen=True)
class Count:
    """How much a site has of one split."""

    cases: int
    slices: int | None  # of volumes, in the files' own grid; None for pictures


Counts = Mapping[str, Mapping[str, Count]]  # site → split


def examples(run: OpenRun) -> list[Example]:
    """The first training case of every site (of a site without any, its first case)."""
    found = []
    for site in run.sites:
        arrays = open_arrays(run.study, run.federation, site)
        places = [*arrays.indices("train"), *range(len(arrays))][:1]
        found += [_example(run, site, arrays, i) for i in places]
    return found


def _example(run: OpenRun, site: str, arrays: SiteArrays, i: int) -> Example:
    image, truth, task = np.array(arrays.image(i)), arrays.truth(i), run.study.task
    case, outside = arrays.cases[i].name, site in run.guests
    volume = image.ndim == 4
    if not isinstance(task, Segmentation) or not isinstance(truth, np.ndarray):
        plane = image[:, image.shape[1] // 2] if volume else image
        note = run.federation.labels[truth] if isinstance(truth, int) else ""
        return Example(site, outside, case, _picture(plane), {}, note)
    masks = task.channels_of(torch.from_numpy(np.array(truth))[None])[0].numpy()
    if not volume:
        return Example(site, outside, case, _picture(image), dict(zip(task.labels, masks, strict=True)), "")
    z = int(masks.any(0).sum((1, 2)).argmax())
    outlines = dict(zip(task.labels, masks[:, z], strict=True))
    return Example(site, outside, case, _picture(image[:, z]), outlines, f"slice {z + 1} of {image.shape[1]}")


def _picture(plane: NDArray[np.float32]) -> NDArray[np.float32]:
    """(channels, H, W) as colours, or as the first channel where they are not red, green and blue."""
    return np.moveaxis(plane, 0, -1) if len(plane) == 3 else plane[0]


def counts(run: OpenRun) -> Counts:
    """Cases, and slices of volumes, per site and split."""
    found: dict[str, dict[str, Count]] = {}
    for site in run.sites:
        arrays = open_arrays(run.study, run.federation, site)
        found[site] = {split: _count(arrays, split, run.federation.dimensions) for split in SPLITS}
    return found


def _count(arrays: SiteArrays, split: str, dimensions: int) -> Count:
    places = arrays.indices(split, unlabelled=True)
    slices = sum(arrays.undo(i).oriented[0] for i in places) if dimensions == 3 else None
    return Count(len(places), slices)


def total(found: Mapping[str, Count]) -> Count:
    """Over splits, or over sites."""
    slices = [count.slices for count in found.values() if count.slices is not None]
    return Count(sum(count.cases for count in found.values()), sum(slices) if slices else None)


def to_markdown(table: Counts, guests: list[str]) -> str:
    """Sites by splits; slices in brackets; guests are named and not in the sum."""
    inside = {site: row for site, row in table.items() if site not in guests}
    lines = list(inside.items())
    lines.append(("all sites", {split: total({site: row[split] for site, row in inside.items()}) for split in SPLITS}))
    lines += [(f"{site} (outside)", table[site]) for site in table if site in guests]
    head = ["site", *SPLITS, "all"]
    rows = [[name, *(_text(row[split]) for split in SPLITS), _text(total(row))] for name, row in lines]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def _text(count: Count) -> str:
    return str(count.cases) if count.slices is None else f"{count.cases} ({count.slices})"


def to_json(table: Counts, guests: list[str]) -> dict[str, object]:
    return {
        "outside": guests,
        "counts": {
            site: {
                split: {"cases": count.cases} | ({} if count.slices is None else {"slices": count.slices})
                for split, count in row.items()
            }
            for site, row in table.items()
        },
    }
