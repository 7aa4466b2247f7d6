"""The data of the sites: an example image each, and numbers of cases: figures 5 and 6, tables 1, 2 and 8 of FedSM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.analysis.figures import SPLIT_WORDS
from consilium.analysis.finding import Finding, Options, Say
from consilium.analysis.opening import OpenRun, Runs
from consilium.data.orientation import turned
from consilium.data.site_arrays import SiteArrays
from consilium.reports.style import INK, TRUTH, WIDTH, as_picture, bare, outline, sheet
from consilium.site_opening import open_arrays
from consilium.tasks.segmentation import Segmentation
from consilium.wording import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SPLITS = ("train", "valid", "test")
_SHADES = {"train": "#0072B2", "valid": "#56B4E9", "test": "#E69F00"}


@dataclass(frozen=True, eq=False)
class GalleryExample:
    """One preprocessed case of a site."""

    site: str
    outside: bool
    case: str
    image: NDArray[np.float32]  # (H, W) or (H, W, 3); of a volume, the slice with the most labels
    outlines: Mapping[str, NDArray[np.bool_]]  # by label; empty for a classification
    note: str  # the class, or which slice


@dataclass(frozen=True)
class Count:
    """The size of one split at a site."""

    cases: int
    slices: int | None  # of volumes, in the files' own grid; None for pictures


Counts = Mapping[str, Mapping[str, Count]]  # site → split


def examples(run: OpenRun) -> list[GalleryExample]:
    """The first training case of every site, or its first case if it has none for training."""
    found = []
    for site in run.sites:
        arrays = open_arrays(run.study, run.federation, site)
        places = [*arrays.indices("train"), *range(len(arrays))][:1]
        found += [_example(run, site, arrays, i) for i in places]
    return found


def _example(run: OpenRun, site: str, arrays: SiteArrays, i: int) -> GalleryExample:
    truth, task = arrays.truth(i), run.study.task
    axes = arrays.display_axes(i, run.study.preprocess.orientation)
    image = turned(np.array(arrays.image(i)), axes)
    case, outside = arrays.cases[i].name, site in run.guests
    volume = image.ndim == 4
    if not isinstance(task, Segmentation) or not isinstance(truth, np.ndarray):
        plane = image[:, image.shape[1] // 2] if volume else image
        note = run.federation.labels[truth] if isinstance(truth, int) else ""
        return GalleryExample(site, outside, case, _picture(plane), {}, note)
    masks = turned(task.channels_of(torch.from_numpy(np.array(truth))[None])[0].numpy(), axes)
    if not volume:
        return GalleryExample(site, outside, case, _picture(image), dict(zip(task.labels, masks, strict=True)), "")
    z = int(masks.any(0).sum((1, 2)).argmax())
    outlines = dict(zip(task.labels, masks[:, z], strict=True))
    return GalleryExample(site, outside, case, _picture(image[:, z]), outlines, f"slice {z + 1} of {image.shape[1]}")


def _picture(plane: NDArray[np.float32]) -> NDArray[np.float32]:
    """An image (channels, H, W) in colour, or its first channel if it is not red, green and blue."""
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
    """The sum over splits, or over sites."""
    slices = [count.slices for count in found.values() if count.slices is not None]
    return Count(sum(count.cases for count in found.values()), sum(slices) if slices else None)


def to_markdown(table: Counts, guests: list[str]) -> str:
    """A table of sites and splits, with slices in brackets; guests are named and not in the sum."""
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


def gallery(found: Sequence[GalleryExample], counts: Counts) -> Figure:
    """A column per site: the image, and below it the same with the truth outlined, where there is one."""
    columns = min(6, len(found))
    outlined = any(example.outlines for example in found)
    deep, bands = 1 + outlined, math.ceil(len(found) / columns)
    side = WIDTH / max(columns, 4)
    with sheet(height=bands * (deep * side + 0.55), width=side * columns) as figure:
        panels = figure.subplots(bands * deep, columns, squeeze=False)
        for axes in panels.flat:
            axes.set_axis_off()
        for k, example in enumerate(found):
            top, column = deep * (k // columns), k % columns
            image = _true_colours(example.image)
            for axes in panels[top : top + deep, column]:
                axes.imshow(image, cmap="gray", vmin=0, vmax=1)
            for mask in example.outlines.values():
                outline(panels[top + deep - 1, column], mask, TRUTH)
            height, width = image.shape[:2]  # outlines may extend a pixel beyond the edge
            panels[top + deep - 1, column].set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
            panels[top, column].set_title(_gallery_title(example, total(counts[example.site]).cases), fontsize=8.5)
        return figure


def _true_colours(image: NDArray[Any]) -> NDArray[Any]:
    """A colour picture with values between 0 and 1 as it is; others are rescaled."""
    return image if image.ndim == 3 and image.min() >= 0 and image.max() <= 1 else as_picture(image)


def _gallery_title(example: GalleryExample, cases: int) -> str:
    where = f"{example.site} (outside)" if example.outside else example.site
    return f"{where}, {counted(cases, 'case')}\n{example.case}" + (f"\n{example.note}" if example.note else "")


def count_bars(counts: Counts, guests: Sequence[str]) -> Figure:
    """Cases per site, one bar in three parts, with their numbers; of volumes also the slices."""
    from matplotlib.patches import Patch

    with sheet(height=1.1 + 0.36 * len(counts), width=0.8 * WIDTH) as figure:
        axes = figure.subplots()
        most = max(total(row).cases for row in counts.values()) or 1
        for i, row in enumerate(counts.values()):
            start = 0
            for split in SPLITS:
                cases = row[split].cases
                axes.barh(i, cases, left=start, height=0.7, color=_SHADES[split], edgecolor="white", linewidth=1.5)
                if cases > 0.012 * most * len(str(cases)) + 0.01 * most:
                    tint = "white" if split == "train" else INK
                    axes.text(start + cases / 2, i, str(cases), ha="center", va="center", fontsize=8, color=tint)
                start += cases
            whole = total(row)
            note = f"{whole.cases}" if whole.slices is None else f"{whole.cases} ({counted(whole.slices, 'slice')})"
            axes.annotate(note, (start, i), xytext=(5, 0), textcoords="offset points", va="center", fontweight="bold")
        axes.set_yticks(range(len(counts)), [f"{site} (outside)" if site in guests else site for site in counts])
        axes.set(xlabel="cases", xlim=(0, 1.2 * most))
        axes.locator_params(axis="x", integer=True)
        bare(axes)
        figure.legend(
            handles=[Patch(color=_SHADES[split], label=SPLIT_WORDS[split]) for split in SPLITS],
            loc="outside upper left", ncols=3, frameon=False, handlelength=1, handleheight=1,
        )  # fmt: skip
        return figure


def analyse_gallery(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """Once for every federation among the runs."""
    once = {(run.federation.folder, tuple(run.sites)): run for run in reversed(runs.opened)}
    for run in reversed(once.values()):
        say(f"example images of {counted(len(run.sites), 'site')}")
        held = counts(run)
        yield Finding(
            "gallery",
            "What the sites hold",
            "Cases per site: " + ", ".join(f"{site} {total(row).cases}" for site, row in held.items()),
            to_json(held, run.guests),
            {
                "gallery": gallery(examples(run), held),
                "counts": count_bars(held, run.guests),
            },
            to_markdown(held, run.guests),
            run.path,
        )
