"""A report with pictures: example cases of every site, drawn from the runs' own models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.audit.leaks import leak_page
from consilium.data.orientation import Axes, turned
from consilium.errors import UserError
from consilium.machine import threads_of_torch
from consilium.prediction import open_predictor
from consilium.predictor import Answer, ModelChoice, Predictor, most_common
from consilium.reports.drawings import Overlay, legend
from consilium.reports.outlines import overlay
from consilium.reports.page import write_page
from consilium.reports.reading import RunView, read_run, run_folders
from consilium.scores.means import exact_mean
from consilium.scores.statistics import volume_of
from consilium.site_opening import open_arrays
from consilium.study import Study
from consilium.tasks.segmentation import Segmentation
from consilium.validation import members_of
from consilium.weights import SiteName


def write_report(runs: Sequence[Path], to: Path, title: str | None = None) -> None:
    """One page over runs, with example cases of every site where the data are still there."""
    views = [read_run(run) for run in run_folders(runs)]
    try:
        overlays = list(_overlays(views))
    except UserError:  # the federation has moved: the rest of the page needs only the run folders
        overlays = []
    leaks = [page for view in views if (page := leak_page(view)) is not None]
    write_page(views, to, overlays, title, leaks)


def _overlays(views: Sequence[RunView]) -> Iterator[Overlay]:
    """Three test cases of every site, by the run that is best on validation among those that can serve anyone."""
    usable = [view for view in views if view.summary and view.kind == "federated"] or [
        view for view in views if view.summary and view.kind == "bound"
    ]
    if not usable:
        return
    view = max(usable, key=lambda view: view.summary["best"]["valid"].get("site_mean", 0.0))  # type: ignore[index]
    study, predictor = open_predictor(view.folder)
    yield from examples(study, predictor, "test", ranked_cases(view))


def ranked_cases(view: RunView) -> dict[SiteName, dict[str, str]]:
    """Site → case → "worst", "typical" (the median) or "best" of its test cases, by the headline score of the run.

    Ties go by name; a site with fewer than three cases shows what it has. Where slices are scored, their mean ranks a
    volume.
    """
    about = view.headline
    scored: dict[SiteName, dict[str, list[float]]] = {}
    for row in view.best_rows:
        own = row.of in ("", row.site)
        if (
            about
            and own
            and (row.model, row.metric, row.label, row.split) == (about.model, about.metric, about.label, "test")
        ):
            case = volume_of(row.case) if row.metric.startswith("slice_") else row.case
            scored.setdefault(row.site, {}).setdefault(case, []).append(row.value)
    return {
        site: _ranked([(exact_mean(values), case) for case, values in found.items()]) for site, found in scored.items()
    }


def _ranked(found: Sequence[tuple[float, str]]) -> dict[str, str]:
    cases = [case for _, case in sorted(found)]
    if len(cases) < 3:
        return dict(zip(cases, ("worst", "best") if len(cases) == 2 else ("typical",), strict=True))
    return {cases[0]: "worst", cases[len(cases) // 2]: "typical", cases[-1]: "best"}


def live_examples(run: Path) -> tuple[tuple[tuple[str, bytes], ...], tuple[tuple[str, str], ...]]:
    """One validation case per site, by the best state of a run that may be under way.

    Captions with SVG pictures, and labels with the colours of their outlines.
    """

    shown = list(examples(*open_predictor(run, unfinished=True), split="valid"))
    pictures = tuple(
        (
            f"{one.site}, by the {_called(one.model)}; Dice "
            + ", ".join(f"{label} {value:.2f}" for label, value in one.dice.items()),
            overlay(one.image, one.truth, one.prediction),
        )
        for one in shown
    )
    return pictures, tuple(legend(shown))


def examples(
    study: Study, predictor: Predictor, split: str, ranked: Mapping[SiteName, Mapping[str, str]] | None = None
) -> Iterator[Overlay]:
    """The ranked cases of every site, or the first of a split, as a model sees them; nothing where classes are told."""
    task, federation = study.task, study.federation()
    if not isinstance(task, Segmentation):
        return
    for site in (*members_of(study, federation), *study.plan.leave_out):
        arrays = open_arrays(study, federation, site)
        ranks = (ranked or {}).get(site, {})
        places = {arrays.cases[i].name: i for i in arrays.indices(split)}
        for name in [name for name in ranks if name in places] or list(places)[:1]:
            i = places[name]
            image = torch.from_numpy(np.array(arrays.image(i)))
            mask = torch.from_numpy(np.array(arrays.truth(i)))
            sliced = bool(study.preprocess.slices)
            with threads_of_torch(study.local.threads):  # as in scoring
                answer = predictor.answer(image.transpose(0, 1) if sliced else image[None], volume=sliced)
            output = answer.output.transpose(0, 1) if sliced else answer.output[0]
            truth, found = task.channels_of(mask[None])[0], task.decided_channels(output)
            marks = task.score(output, mask, full=False, labels=arrays.labels(i))
            axes = arrays.display_axes(i, study.preprocess.orientation)
            seen, drawn, decided = (turned(part.numpy(), axes) for part in (image, truth, found))
            middle = _middle(drawn)
            yield Overlay(
                image=_shown(seen, middle),
                truth={label: drawn[j][middle] for j, label in enumerate(task.labels)},
                prediction={label: decided[j][middle] for j, label in enumerate(task.labels)},
                site=site,
                case=name,
                model=_choice_shown(answer, seen.shape[1:], axes, middle).key,
                dice={mark.label: mark.value for mark in marks if mark.metric == "dice"},
                rank=ranks.get(name, ""),
            )


def _called(model: str) -> str:
    """A model's key in words: "global" or "personal/hk"."""
    kind, _, of = model.partition("/")
    return f"{kind} model{f' of {of}' if of else ''}"


def _middle(truth: NDArray[np.bool_]) -> Any:
    """Of a volume, the slice with the most to see."""
    return (int(truth.any(0).sum((1, 2)).argmax()),) if truth.ndim == 4 else ()


def _choice_shown(answer: Answer, shape: tuple[int, ...], axes: Axes, middle: Any) -> ModelChoice:
    """The model of the slice that is shown; a plane that cuts several slices is told by most of them."""
    if len(answer.choices) == 1:
        return answer.choices[0]
    count = len(answer.choices)
    numbers = turned(np.arange(count).reshape(count, 1, 1), axes)  # 1 along the axes within a slice
    return most_common([answer.choices[i] for i in np.unique(np.broadcast_to(numbers, shape)[middle])])


def _shown(image: NDArray[np.float32], middle: Any) -> NDArray[Any]:
    plane = image[(slice(None), *middle)]
    low, high = float(plane.min()), float(plane.max())
    scaled = (plane - low) / (high - low) if high > low else plane - low
    return np.moveaxis(scaled, 0, -1) if len(scaled) == 3 else scaled[0]
