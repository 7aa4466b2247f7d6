"""Using a run: images in, masks out, with the model that answered and why."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consilium.data.images import IMAGE_SUFFIXES, read_image, suffix_of, write_mask
from consilium.data.preprocess import forward, invert
from consilium.errors import DataError, StudyError
from consilium.machine import pick_device
from consilium.run_folder import RunFolder, write_text
from consilium.site import Answer, Predictor
from consilium.study import Study


@dataclass(frozen=True)
class Prediction:
    """One image's result."""

    image: str
    result: str  # the mask's file, or the class
    model: str  # "global", "personal/hk", …
    confidence: float | None
    why: str
    chances: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def open_predictor(run: Path, site: str | None = None) -> tuple[Study, Predictor]:
    """The best model of a run, ready to use; `site` asks for one hospital's own."""
    folder = RunFolder.open(run)
    study = folder.study
    server = folder.server(study.method)
    device = pick_device(study.local.device, 0)
    predictor = study.method.deploy(study.task.on(device), None, study.method.release(server, None))
    return study, predictor.of_site(site) if site else predictor


def predict(run: Path, images: Sequence[Path], to: Path, site: str | None = None) -> list[Prediction]:
    """Predict every image (folders are searched) and write masks and predictions.csv into `to`."""
    study, predictor = open_predictor(run, site)
    paths = _found(images)
    outputs = _outputs(paths, to)
    to.mkdir(parents=True, exist_ok=True)
    predictions = [_predict(study, predictor, path, out) for path, out in zip(paths, outputs)]
    write_text(to / "predictions.csv", _table(predictions))
    return predictions


def _predict(study: Study, predictor: Predictor, path: Path, out: Path) -> Prediction:
    picture = read_image(path, study.facts.dimensions, study.facts.channels)
    array, undo = forward(picture, study.preprocess)
    answer: Answer = predictor.answer(torch.from_numpy(array[None].copy()))
    (choice,) = answer.choices
    if study.facts.task == "classification":
        result = study.facts.labels[int(study.task.decide(answer.output[0]))]
    else:
        # logits are brought back, not the mask: edges stay smooth where the image was shrunk
        logits = torch.from_numpy(np.ascontiguousarray(invert(answer.output[0].numpy(), undo, nearest=False)))
        result = str(write_mask(study.task.decide(logits).numpy(), picture, out))
    return Prediction(str(path), result, choice.key, choice.confidence, choice.why, dict(choice.chances))


def _found(images: Sequence[Path]) -> list[Path]:
    paths: list[Path] = []
    for path in images:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and suffix_of(p) in IMAGE_SUFFIXES)
            if not inside:
                raise DataError(f"the folder {path} has no images; formats are {', '.join(IMAGE_SUFFIXES)}.")
            paths += inside
        elif path.is_file():
            paths.append(path)
        else:
            raise DataError(f"there is no image {path}.")
    return paths


def _outputs(paths: Sequence[Path], to: Path) -> list[Path]:
    """A name for every mask; two images of one name are told apart by their folders."""
    names = [path.name for path in paths]
    chosen = [path.name if names.count(path.name) == 1 else "_".join((*path.parts[-2:-1], path.name)) for path in paths]
    twice = {name for name in chosen if chosen.count(name) > 1}
    if twice:
        raise StudyError(f"several images are called {min(twice)}; predict them into different folders.")
    return [to / name for name in chosen]


def _table(predictions: Sequence[Prediction]) -> str:
    sites = list(predictions[0].chances) if predictions else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "prediction", "model", "confidence", "why", *(f"chance:{site}" for site in sites)])
    writer.writerows(_lines(predictions, sites))
    return text.getvalue()


def _lines(predictions: Sequence[Prediction], sites: Sequence[str]) -> Iterator[list[Any]]:
    for p in predictions:
        sure = "" if p.confidence is None else f"{p.confidence:.6f}"
        yield [p.image, p.result, p.model, sure, p.why, *(f"{p.chances[site]:.6f}" for site in sites)]
