"""`consilium export`: a run becomes bundles, a package and a model card, checked in a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from consilium.errors import RunError, WorkError
from consilium.export import card, card_page, fresh, onnx_file
from consilium.export.bundle import renamed, write_bundle
from consilium.export.models import Model, Released, released, whole_models
from consilium.export.network import Portable, portable
from consilium.export.package import FOLDER, write_package
from consilium.files import write_json, write_text
from consilium.machine import threads_of_torch
from consilium.predictor import Predictor
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.task import Task
from consilium.tasks.segmentation import Segmentation

TOLERANCE = 1e-6  # between a bundle's logits and ours, relative to the largest
ONNX_TOLERANCE = 1e-4  # another library computes: only rounding may differ


@dataclass(frozen=True)
class Export:
    """What was written, and how far the outputs were from ours in a fresh process."""

    folder: Path
    models: tuple[str, ...]
    onnx: bool
    gaps: Mapping[str, float]  # empty: not checked


def export_run(run: Path, to: Path, check: bool = True) -> Export:
    """Write everything of a finished run that another hospital or program needs into the new or empty folder `to`."""
    folder = RunFolder.open(run)
    folder.summary()  # refuses an unfinished run
    study = folder.study
    out = released(study, folder.server(study.method))
    network = portable(study)
    onnx = onnx_file.available()
    view = read_run(run)
    facts = card.facts(study, view, out, onnx)
    with _new_folder(to) as draft:
        for model in out.models:
            write_bundle(draft / model.name, study, network, model, card.own_scores(facts, model), card.about(model))
        if onnx:
            _write_onnx(draft, study, network, out.models)
        write_package(draft / FOLDER, study, out, folder.origin.trained_on())
        write_json(facts, draft / "model_card.json", durable=False)
        write_text(card_page.markdown(facts), draft / "model_card.md")
        gaps = _gaps(draft, study, network, out) if check else {}
    return Export(to, tuple(model.name for model in out.models), onnx, gaps)


def export_delivered(study: Study, predictor: Predictor, to: Path, check: bool = True) -> Export:
    """Write the models a hospital has been delivered, its own part included, as bundles; the server is not asked.

    There is no package and no model card: the release may need the hospital's memory, and the scores are the server's.
    """
    models = whole_models(predictor)
    if not models:
        raise RunError("what was delivered here is not a whole network; use it with `consilium predict --hospital`.")
    network, onnx = portable(study), onnx_file.available()
    with _new_folder(to) as draft:
        for model in models:
            write_bundle(draft / model.name, study, network, model, {}, card.about(model))
        if onnx:
            _write_onnx(draft, study, network, models)
        gaps = _compared(draft, study, _probe(study, network), models, {}) if check else {}
    return Export(to, tuple(model.name for model in models), onnx, gaps)


@contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A folder beside the target, renamed to it at the end: an export is whole or not there."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunError(f"{to} exists and is not an empty folder; give --to a new one.")
    draft = to.absolute().with_name(f".{to.absolute().name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        if to.exists():
            to.rmdir()
        draft.rename(to)
    except OSError as error:
        raise WorkError(f"{error.strerror or error} ({error.filename or to}): nothing was exported.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write_onnx(draft: Path, study: Study, network: Portable, models: tuple[Model, ...]) -> None:
    if not models:
        return
    writer = onnx_file.OnnxWriter(network.module, _probe(study, network))
    for model in models:
        writer.write(renamed(model.weights, network.prefix), draft / model.name / "models/model.onnx")


# ---------------------------------------------------------------------------------------------- the check


def _probe(study: Study, network: Portable) -> Tensor:
    """Two images of noise, small but of a size that the network takes as it is."""
    size = [max(16, 2 * network.divisor)] * study.task.dimensions
    sides = size if network.prefix else study.preprocess.size or size  # others may have been built for one size
    return torch.rand((2, study.facts.channels, *sides), generator=torch.Generator().manual_seed(0))


def _gaps(draft: Path, study: Study, network: Portable, out: Released) -> dict[str, float]:
    """How far every model is from ours when a fresh process loads the export."""
    images = _probe(study, network)
    site = out.models[0].of if out.models and all(model.of for model in out.models) else ""
    answering = out.predictor.of_site(site) if site else out.predictor
    with threads_of_torch(1):  # as in the fresh process: the number of threads changes the last bits
        whole = answering.answer(images).output
    return _compared(draft, study, images, out.models, {f"{fresh.PACKAGE}:{site}" if site else fresh.PACKAGE: whole})


def _compared(
    draft: Path, study: Study, images: Tensor, models: Sequence[Model], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    with threads_of_torch(1):
        bundles = {model.name: _bare(study).infer(model.weights, images) for model in models}
    gaps = _in_a_fresh_process(draft, {fresh.IMAGES: images, **bundles, **expected})
    for name, gap in gaps.items():
        limit = ONNX_TOLERANCE if name.startswith(fresh.ONNX) else TOLERANCE
        if not gap <= limit:
            raise WorkError(f"the exported '{name}' differs from the run's model by {gap:g}; nothing was exported.")
    return gaps


def _bare(study: Study) -> Task:
    """The task without sliding windows: what its network alone says."""
    task = study.task.on("cpu")
    return replace(task, patch=()) if isinstance(task, Segmentation) else task


def _in_a_fresh_process(draft: Path, expected: Mapping[str, Tensor]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "expected.safetensors"
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in expected.items()}, file)
        command = [sys.executable, "-P", fresh.__file__, str(draft), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkError(f"a fresh process could not load the export ({_last_line(done.stderr)}); nothing was exported.")
    gaps: Any = json.loads(done.stdout.splitlines()[-1])
    return {str(name): float(gap) for name, gap in gaps.items()}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
