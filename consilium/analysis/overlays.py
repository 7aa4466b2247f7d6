"""Predicted masks in the colours of the organs: a slice, and a front view of volumes (UFPS, figures 11, 12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.analysis.figures import MANY
from consilium.analysis.finding import Finding, Options, Say, in_words
from consilium.analysis.opening import OpenRun, Runs
from consilium.data.orientation import turned
from consilium.errors import NotForOutsiders, RunError
from consilium.reports.figures import dice
from consilium.reports.style import WIDTH, as_picture, sheet
from consilium.site_opening import open_arrays
from consilium.tasks.segmentation import Segmentation
from consilium.weights import SiteName

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Masks = NDArray[np.bool_]  # (labels, *spatial)


@dataclass(frozen=True, eq=False)
class OverlayCase:
    """One test case, its truth and every model's prediction; volumes in the radiological orientation."""

    site: SiteName
    case: str
    image: NDArray[np.float32]  # (channels, *spatial)
    truth: Masks
    known: tuple[str, ...]  # labels the truth shows
    predictions: Mapping[str, Masks]  # by run
    notes: Mapping[str, str] = field(default_factory=dict)  # text below a prediction

    @property
    def volume(self) -> bool:
        return self.image.ndim == 4


def shown_cases(runs: Sequence[OpenRun], sites: Sequence[SiteName]) -> list[OverlayCase]:
    """The first test case of every site, predicted by the model that each run gives that site."""
    task = runs[0].study.task
    if not isinstance(task, Segmentation):
        raise RunError(f"{runs[0].name} does not segment; there is nothing to draw over its images.")
    found = []
    for site in sites:
        arrays = open_arrays(runs[0].study, runs[0].federation, site)
        for i in arrays.indices("test")[:1]:
            image, truth = np.array(arrays.image(i)), torch.from_numpy(np.array(arrays.truth(i)))
            predictions = {}
            for run in runs:
                try:
                    predictions[run.name] = _predicted(run, site, torch.from_numpy(image))
                except NotForOutsiders:
                    continue
            masks = task.channels_of(truth[None])[0].numpy()
            axes = arrays.display_axes(i, runs[0].study.preprocess.orientation)
            drawn = {name: turned(mask, axes) for name, mask in predictions.items()}
            name, known = arrays.cases[i].name, arrays.labels(i)
            found.append(OverlayCase(site, name, turned(image, axes), turned(masks, axes), known, drawn))
    if not found:
        raise RunError("these sites have no test cases to show.")
    return found


def _predicted(run: OpenRun, site: SiteName, image: torch.Tensor) -> Masks:
    task, worker = run.study.task, run.worker(site)
    assert isinstance(task, Segmentation)
    sliced = bool(run.study.preprocess.slices)
    answer = run.predictor(worker).answer(image.transpose(0, 1) if sliced else image[None], volume=sliced)
    output = answer.output.transpose(0, 1) if sliced else answer.output[0]
    found: Masks = task.decided_channels(output).numpy()
    return found


def scores(found: Sequence[OverlayCase], labels: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Site → run → label → Dice of the whole case, of the labels its truth shows."""
    return {
        one.site: {
            name: {
                label: round(dice(one.truth[k], masks[k]), 4) for k, label in enumerate(labels) if label in one.known
            }
            for name, masks in one.predictions.items()
        }
        for one in found
    }


def slices(found: Sequence[OverlayCase], labels: Sequence[str]) -> Figure:
    """A row per site: the image, the truth, every model; of a volume, the slice with the most labels."""
    return _grid(found, labels, lambda axes, one, masks: _over(axes, one, masks, _busiest(one)))


def projections(found: Sequence[OverlayCase], labels: Sequence[str]) -> Figure:
    """The same from the front: for every organ its depth along the view, over the maximum of the image."""
    return _grid(found, labels, _projected)


def _grid(found: Sequence[OverlayCase], labels: Sequence[str], draw: Any) -> Figure:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for one in found for name in one.predictions))
    columns = 2 + len(names)
    side = min(2.2, WIDTH / columns)
    with sheet(height=side * len(found) + 0.6, width=side * columns) as figure:
        panels = figure.subplots(len(found), columns, squeeze=False)
        for row, one in zip(panels, found, strict=True):
            masks = {"image": None, "truth": one.truth, **{name: one.predictions.get(name) for name in names}}
            for axes, (name, mask) in zip(row, masks.items(), strict=True):
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
                if mask is not None or name == "image":
                    draw(axes, one, mask)
                axes.set_xlabel(one.notes.get(name, ""), fontsize=8)
                if one is found[0]:
                    axes.set_title(name, fontsize=8.5)
            row[0].set_ylabel(f"{one.site}\n{one.case}", fontsize=8)
        handles = [Patch(color=MANY[k % len(MANY)], label=label) for k, label in enumerate(labels)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
        return figure


def _busiest(one: OverlayCase) -> int | None:
    """The slice of a volume with the most labels; among several, the one with the largest area."""
    if not one.volume:
        return None
    size = one.truth.sum((2, 3))
    return int(np.lexsort((size.sum(0), (size > 0).sum(0)))[-1])


def _over(axes: Axes, one: OverlayCase, masks: Masks | None, z: int | None) -> None:
    plane = one.image if z is None else one.image[:, z]
    axes.imshow(as_picture(np.moveaxis(plane, 0, -1) if len(plane) == 3 else plane[0]), cmap="gray", vmin=0, vmax=1)
    if masks is not None:
        axes.imshow(_coloured(0.55 * (masks if z is None else masks[:, z]).astype(float)))


def _projected(axes: Axes, one: OverlayCase, masks: Masks | None) -> None:
    """Along the second axis, front to back; slices are counted from the feet, so the first is at the bottom."""
    how: Any = {"origin": "lower", "aspect": 0.8 * one.image.shape[3] / one.image.shape[1]}  # few slices, wide apart
    axes.imshow(as_picture(one.image[0].max(1)), cmap="gray", vmin=0, vmax=1, **how)
    if masks is not None:
        depth = masks.sum(2).astype(float)
        axes.imshow(_coloured(0.35 * (depth > 0) + 0.6 * depth / max(1.0, depth.max())), **how)


def _coloured(opacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Opacities (labels, H, W) as one picture with transparency; later labels lie over earlier ones."""
    from matplotlib.colors import to_rgb

    picture = np.zeros((*opacity.shape[1:], 4))
    for k, layer in enumerate(opacity):
        tint, cover = np.array(to_rgb(MANY[k % len(MANY)])), layer[..., None]
        alpha = cover[..., 0] + picture[..., 3] * (1 - cover[..., 0])
        mixed = tint * cover + picture[..., :3] * picture[..., 3:] * (1 - cover)
        picture[..., :3] = np.divide(mixed, alpha[..., None], out=np.zeros_like(mixed), where=alpha[..., None] > 0)
        picture[..., 3] = alpha
    return picture


def analyse_overlays(runs: Runs, options: Options, say: Say) -> Iterable[Finding]:
    """All runs side by side on the first test case of every site."""
    first = runs.opened[0]
    sites = [options.site] if options.site else first.sites
    found = shown_cases(runs.opened, sites)
    labels, values = first.study.task.labels, scores(found, first.study.task.labels)
    words = in_words(values, _mean)
    drawn = {"overlays": slices(found, labels)}
    if all(one.volume for one in found):
        drawn["projections"] = projections(found, labels)
    yield Finding(
        "overlays",
        "What the models draw",
        f"The first test case of every site; mean Dice of its labels. {words}",
        {"labels": list(labels), "cases": {one.site: one.case for one in found}, "dice": values},
        drawn,
    )


def _mean(values: Mapping[str, float]) -> str:
    return f"{sum(values.values()) / len(values):.3f}" if values else "–"
