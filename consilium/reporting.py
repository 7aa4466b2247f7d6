"""A report with pictures: example cases of every site, drawn from the runs' own models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.errors import UserError
from consilium.prediction import open_predictor
from consilium.reports.page import Overlay, write_page
from consilium.reports.reading import RunView, read_run
from consilium.tasks.segmentation import Segmentation
from consilium.worker import members_of, open_arrays


def write_report(runs: Sequence[Path], to: Path, title: str | None = None) -> None:
    """One page over runs, with an overlay per site where the data are still there."""
    views = [read_run(run) for run in runs]
    try:
        overlays = list(_overlays(views))
    except UserError:  # the federation has moved: the rest of the page needs only the run folders
        overlays = []
    write_page(views, to, overlays, title)


def _overlays(views: Sequence[RunView]) -> Iterator[Overlay]:
    """The first test case of every site, by the run that is best on validation among those that can serve anyone."""
    usable = [view for view in views if view.summary and view.kind == "federated"] or [
        view for view in views if view.summary and view.kind == "bound"
    ]
    if not usable:
        return
    view = max(usable, key=lambda view: view.summary["best"]["valid"].get("site_mean", 0.0))  # type: ignore[index]
    study, predictor = open_predictor(view.folder)
    task, federation = study.task, study.federation()
    if not isinstance(task, Segmentation):
        return
    for site in (*members_of(study, federation), *study.plan.leave_out):
        arrays = open_arrays(study, federation, site)
        for i in arrays.indices("test")[:1]:
            image = torch.from_numpy(np.array(arrays.image(i)))
            mask = torch.from_numpy(np.array(arrays.truth(i)))
            sliced = bool(study.preprocess.slices)
            answer = predictor.answer(image.transpose(0, 1) if sliced else image[None], volume=sliced)
            output = answer.output.transpose(0, 1) if sliced else answer.output[0]
            truth, found = task.channels_of(mask[None])[0], task.decided_channels(output)
            marks = task.score(output, mask, full=False, labels=arrays.labels(i))
            middle = _middle(truth)
            yield Overlay(
                image=_shown(image, middle),
                truth={label: truth[j][middle].numpy() for j, label in enumerate(task.labels)},
                prediction={label: found[j][middle].numpy() for j, label in enumerate(task.labels)},
                site=site,
                case=arrays.cases[i].name,
                model=answer.choices[0].key,
                dice={mark.label: mark.value for mark in marks if mark.metric == "dice"},
            )


def _middle(truth: torch.Tensor) -> Any:
    """Of a volume, the slice with the most to see."""
    return (int(truth.any(0).sum((1, 2)).argmax()),) if truth.dim() == 4 else ()


def _shown(image: torch.Tensor, middle: Any) -> NDArray[Any]:
    plane = image[(slice(None), *middle)].numpy()
    low, high = float(plane.min()), float(plane.max())
    scaled = (plane - low) / (high - low) if high > low else plane - low
    return np.moveaxis(scaled, 0, -1) if len(scaled) == 3 else scaled[0]
