"""What one update shows: images found again from a gradient alone (Geiping et al. 2020, "Inverting gradients").

The attacker has the weights a site began with, the gradient of one step and the true masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from consilium.analysis.opening import OpenRun
from consilium.analysis.probing import network_of
from consilium.batch import Batch
from consilium.data.cases import Cases
from consilium.errors import RunError
from consilium.randomness import derive, torch_generator
from consilium.reports.style import as_picture, sheet
from consilium.weights import SiteName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 8)  # of batches
STEPS = 600  # of the search
_SIDE = {2: 64, 3: 24}  # voxels: larger images are cut, so that the time is bounded
_SMOOTH = 0.7  # how much neighbouring voxels should be alike


@dataclass(frozen=True)
class Inverted:
    """Images of one batch, and what was found from their gradient."""

    batch: int
    images: NDArray[np.float32]  # (batch, channels, *spatial)
    found: NDArray[np.float32]  # in the order of the images they are most like
    likeness: tuple[float, ...]  # by image: its correlation with what was found
    chance: float | None  # the mean correlation of what was found with images that were not sent; None: there are none

    def to_json(self) -> dict[str, Any]:
        likeness = [round(value, 4) for value in self.likeness]
        return {"batch": self.batch, "likeness": likeness, "not_sent": self.chance and round(self.chance, 4)}


def invert(run: OpenRun, steps: int = STEPS) -> list[Inverted]:
    """Try one update of batch size 1 and one of 8, from the weights that the run began with.

    The images are those of the member with the most training cases; `steps` are of the search.
    """
    most = max(run.members, key=lambda name: run.roster[name].n if name in run.roster else 0)
    return list(_inverted(run, most, steps))


def _inverted(run: OpenRun, site: SiteName, steps: int) -> Iterator[Inverted]:
    worker, task = run.worker(site), run.study.task
    assert isinstance(worker.site.data, Cases)
    data = replace(worker.site.data, augmentations=())
    seed = derive(run.study.plan.seed, "inversion", site)
    network = network_of(task, task.initial())
    every = [_cut(batch) for batch in islice(data.batches(1, 0, seed), 3 * max(SIZES))]
    if not every:
        raise RunError(f"site '{site}' has no training cases whose update could be inverted; choose another run.")
    for size in SIZES:
        if len(every) < size:
            continue
        batch = _together(every[:size])
        found = search(network, task.loss, batch, steps, torch_generator(seed, size))
        others = [one.images for one in every[size : 3 * size] if one.images.shape[1:] == batch.images.shape[1:]]
        yield matched(batch.images, found, others)


def gradient(network: nn.Module, loss: Any, batch: Batch, images: Tensor, graph: bool) -> list[Tensor]:
    """Of the study's loss, by parameter."""
    value = loss(network(images), batch)
    return list(torch.autograd.grad(value, list(network.parameters()), create_graph=graph))


def search(network: nn.Module, loss: Any, batch: Batch, steps: int, generator: torch.Generator) -> Tensor:
    """Images whose gradient points the same way as the batch's, from noise; the masks are known."""
    wanted = [part.detach() for part in gradient(network, loss, batch, batch.images, graph=False)]
    length = torch.stack([part.square().sum() for part in wanted]).sum().sqrt()
    # range and mean follow from the preprocessing; a search from a flat image leaves less noise than one from noise
    low, high, middle = batch.images.min(), batch.images.max(), batch.images.mean()
    width = float(high - low)
    images = (middle + 0.05 * width * torch.randn(batch.images.shape, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.05 * width)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        given = gradient(network, loss, batch, images, graph=True)
        dot = torch.stack([(one * two).sum() for one, two in zip(given, wanted)]).sum()
        own = torch.stack([part.square().sum() for part in given]).sum().sqrt()
        distance = 1 - dot / (own * length).clamp_min(1e-12)
        distance = distance + _SMOOTH / width * _roughness(images)
        (slope,) = torch.autograd.grad(distance, [images])
        images.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(low, high)
    return images.detach()


def _roughness(images: Tensor) -> Tensor:
    """The mean difference of neighbouring voxels."""
    parts = [images.diff(dim=axis).abs().mean() for axis in range(2, images.dim())]
    return torch.stack(parts).mean()


def matched(images: Tensor, found: Tensor, others: Sequence[Tensor]) -> Inverted:
    """Which of what was found is which image: by correlation, each once. `others` are images that were not sent."""
    from scipy.optimize import linear_sum_assignment

    table = _correlations(images, found)
    _, columns = linear_sum_assignment(-table)
    likeness = tuple(float(table[i, j]) for i, j in enumerate(columns))
    beside = float(_correlations(torch.cat(list(others)), found).mean()) if others else None
    return Inverted(len(images), images.numpy(), found[list(columns)].numpy(), likeness, beside)


def _correlations(one: Tensor, two: Tensor) -> NDArray[np.float64]:
    """(images of one, images of two)."""
    rows = [part.flatten(1).double() for part in (one, two)]
    rows = [(part - part.mean(1, keepdim=True)) for part in rows]
    rows = [part / part.norm(dim=1, keepdim=True).clamp_min(1e-12) for part in rows]
    return np.asarray((rows[0] @ rows[1].T).numpy())


def _cut(batch: Batch) -> Batch:
    """The middle of a case, if it is large."""
    side = _SIDE[batch.images.dim() - 2]
    corners = [max(0, (size - side) // 2) for size in batch.images.shape[2:]]
    window = tuple(slice(corner, corner + side) for corner in corners)
    truth = batch.truth[(slice(None), *window)] if batch.truth.dim() > 1 else batch.truth
    return replace(batch, images=batch.images[(slice(None), slice(None), *window)], truth=truth)


def _together(batches: Sequence[Batch]) -> Batch:
    labels = [batch.labels_of(0) for batch in batches]
    return Batch(
        torch.cat([batch.images for batch in batches]),
        torch.cat([batch.truth for batch in batches]),
        tuple(case for batch in batches for case in batch.cases),
        labels=None if None in labels else tuple(label for label in labels if label is not None),
    )


def inversion_figure(tries: Sequence[Inverted]) -> Figure:
    """Above the images of a batch, below what their gradient showed."""
    columns = max(one.batch for one in tries)
    with sheet(height=2.6 * len(tries), width=1.1 * columns + 1.2) as figure:
        parts = figure.subfigures(len(tries), 1, squeeze=False)[:, 0]
        for part, one in zip(parts, tries):
            plural = "s" if one.batch > 1 else ""
            part.suptitle(
                f"One update of {one.batch} image{plural}: correlation {np.mean(one.likeness):.2f}"
                + ("" if one.chance is None else f", with images that were not in it {one.chance:.2f}"),
                fontsize=9,
            )
            grid = part.subplots(2, columns, squeeze=False)
            for axes in grid.flat:
                axes.set_axis_off()
            for row, images in zip(grid, (one.images, one.found)):
                for axes, image in zip(row, images, strict=False):
                    axes.imshow(as_picture(_plane(image)), cmap="gray", interpolation="nearest")
            grid[0][0].set_title("image" + plural)
            grid[1][0].set_title("found")
        return figure


def _plane(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """A picture (rows, columns[, 3]) of (channels, *spatial): of a volume its middle slice."""
    plane = image if image.ndim == 3 else image[:, image.shape[1] // 2]
    return np.moveaxis(plane, 0, -1) if len(plane) == 3 else plane[0]
