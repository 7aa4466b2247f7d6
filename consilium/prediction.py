"""Predicts with a run: writes a mask or class per image, with the model that answered and the reason."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consilium.data.dicom import require_dicom, series_of
from consilium.data.formats import IMAGE_SUFFIXES, OTHER_KIND, stack_of
from consilium.data.image_folders import images_in, pictures_in
from consilium.data.images import ImageArray, holds_dicom, read_image, together
from consilium.data.mask_files import invert, mask_name, write_mask, write_segmentation
from consilium.data.preprocess import forward
from consilium.data.profile import DataProfile, image_facts, read_profile, unlike
from consilium.data.site_folder import inside_of
from consilium.errors import DataError, RunError, StudyError
from consilium.export import package
from consilium.export.package import is_package, open_package
from consilium.fields import nearest
from consilium.files import read_json, write_text, writing_into
from consilium.hospital import Hospital
from consilium.local_norm import LocalNorm
from consilium.machine import pick_device
from consilium.messages import card_from_json
from consilium.method import Best
from consilium.predictor import Answer, ModelChoice, Predictor, most_common
from consilium.reports.predicted import MAPS, OVERLAY, beside, write_overlay, write_probabilities
from consilium.run_folder import RunFolder
from consilium.store import MemoryStore, read_release
from consilium.study import Study
from consilium.study_reading import load_study
from consilium.task import Task
from consilium.tasks.overlap import cleaned
from consilium.test_time import Mirrored
from consilium.wording import counted, listed
from consilium.worker import kept_at, open_released

TABLE = "predictions.csv"


@dataclass(frozen=True)
class PredictOptions:
    """Options of a prediction."""

    thresholds: Mapping[str, float] = field(default_factory=dict)  # of classes: predicted from this probability on
    probabilities: bool = False  # segmentation: also a map of every label's probability
    overlays: bool = False  # segmentation: also a picture with the mask's outlines
    mirrored: bool = False  # average over mirror images (test-time augmentation)

    def check(self, study: Study) -> None:
        """Reject options that do not fit a study (UserError)."""
        labels, masks = study.facts.labels, study.facts.task == "segmentation"
        if self.thresholds and masks:
            raise StudyError("thresholds are for classification; a mask takes the most probable label.")
        if (self.probabilities or self.overlays) and not masks:
            raise StudyError("probability maps and overlays are for masks; a class's probabilities are always told.")
        for label, least in self.thresholds.items():
            if label not in labels:
                raise StudyError(f"there is no class {label!r} to set a threshold for; {nearest(label, labels)}")
            if not 0 <= least <= 1:
                raise StudyError(f"the threshold {least} of {label!r} is no probability; give 0 to 1.")


@dataclass(frozen=True)
class Prediction:
    """One image's result."""

    image: str
    result: str  # the mask's file, or the class
    model: str  # "global", "personal/hk", …
    confidence: float | None
    why: str
    chances: dict[str, float]
    warning: str = ""  # how the image differs from the training images; "" if it does not, or if nothing is known
    probabilities: Mapping[str, float] = field(default_factory=dict)  # of the classes; {} in segmentation

    def to_json(self) -> dict[str, Any]:
        """The values by column of predictions.csv."""
        certain = {"probability": self.probabilities[self.result]} if self.probabilities else {}
        return {
            "image": self.image,
            "prediction": self.result,
            **certain,
            "model": self.model,
            "confidence": self.confidence,
            "why": self.why,
            "warning": self.warning,
            **{f"chance:{site}": chance for site, chance in self.chances.items()},
            **{f"probability:{label}": value for label, value in self.probabilities.items()},
        }


class UnusableImages(DataError):
    """Some images could not be used; the masks of the others are written."""

    def __init__(self, done: Sequence[Prediction], faults: Sequence[str], to: Path) -> None:
        rest = f" The other {'one is' if len(done) == 1 else f'{len(done)} are'} in {to}." if done else ""
        many = len(done) + len(faults)
        super().__init__("\n".join([f"{len(faults)} of {counted(many, 'image')} could not be used.{rest}", *faults]))
        self.done, self.faults = done, faults


def open_predictor(run: Path, site: str | None = None, unfinished: bool = False) -> tuple[Study, Predictor]:
    """The best model of a run or an exported package, ready to use; `site` selects one hospital's own model.

    An unfinished run may lack parts that are made after training, such as FedSM's selector.
    """
    if is_package(run):
        return open_package(run, site)
    folder = RunFolder.open(run)
    if not unfinished:
        folder.check_finished()
    study = folder.study
    if study.local.batchnorm != "average":
        raise StudyError(
            f"this run was trained with local.batchnorm = '{study.local.batchnorm}': its normalisation stays at the "
            "sites, so there is no whole model to predict with here."
        )
    server = folder.server(study.method)
    task = study.task.on(pick_device(study.local.device, 0))
    best = folder.states.best(study.method) if site else None
    if site and best is not None and site in best.merged:
        own = _at_home(folder, study, task, server, site, best)
        if own.of == site:
            return study, own
    predictor = study.method.deploy(task, None, study.method.release(server, None))
    return study, predictor.of_site(site) if site else predictor


def _at_home(folder: RunFolder, study: Study, task: Task, server: Any, site: str, best: Best) -> Predictor:
    """The model of a site of the run, with its own memory, for methods whose personal part never left it."""
    cards = read_json(folder.path / "origin.json")["members"]
    memories = MemoryStore(folder.path / "sites" / site / "memory", site)
    norm = LocalNorm.of(task, study.local.batchnorm, site)
    kept = kept_at(memories, best.merged[site], study.method, norm, study.local)
    release = study.method.release(server, card_from_json(cards[site]))
    return study.method.deploy(task, kept.memory if kept else None, release)


def open_at_hospital(hospital: Hospital, run: str | None = None) -> tuple[Study, Predictor]:
    """The model that a federation delivered to this hospital, with its own memory; by default the latest."""
    place = _delivered(hospital, run)
    study = load_study(place / "study.toml")
    task = study.task.on(pick_device(hospital.device, 0))
    norm = LocalNorm.of(task, study.local.batchnorm, hospital.site)
    predictor = open_released(study.method, task, norm, study.local, place, hospital.site)
    with contextlib.suppress(OSError):  # a reader who may not write still predicts
        os.utime(place)  # `federation clean` counts the days from the last use
    return study, predictor


def trained_on_at_hospital(hospital: Hospital, run: str | None = None) -> DataProfile | None:
    """The ranges of a delivered model's training images; None if the delivery has none."""
    return read_profile(read_release(_delivered(hospital, run))[1].get("distribution"))


def _delivered(hospital: Hospital, run: str | None) -> Path:
    """The folder of a release at a hospital: of a run, or the latest."""
    delivered = sorted(Path(hospital.memory).glob("*/release.json"), key=lambda path: path.stat().st_mtime)
    if run is not None:
        delivered = [path for path in delivered if path.parent.name == run]
    if not delivered:
        raise RunError(f"{hospital.memory} holds no release{f' of {run}' if run else ''}; a run's end delivers one.")
    return delivered[-1].parent


def predict(
    run: Path,
    images: Sequence[Path],
    to: Path,
    site: str | None = None,
    options: PredictOptions = PredictOptions(),  # noqa: B008 (it is frozen)
) -> list[Prediction]:
    """Predict every image (folders are searched) and write masks and predictions.csv into `to`."""
    return predict_with(*open_predictor(run, site), images, to, site, trained_on(run), options)


def trained_on(run: Path) -> DataProfile | None:
    """The ranges of the training images of a run or package; None if it has none."""
    return package.trained_on(run) if is_package(run) else RunFolder.open(run).origin.trained_on()


def predict_with(
    study: Study,
    predictor: Predictor,
    images: Sequence[Path],
    to: Path,
    site: str | None = None,
    trained: DataProfile | None = None,
    options: PredictOptions = PredictOptions(),  # noqa: B008 (it is frozen)
) -> list[Prediction]:
    """Predict with a given model; `trained` are the ranges of its training images, used to warn of other images."""
    facts = study.facts
    options.check(study)
    if options.mirrored:
        predictor = Mirrored(study.task, predictor)
    paths = [
        p for path in _found(images, facts.dimensions) for p in pictures_in(path, facts.dimensions, facts.channels)
    ]
    masks = facts.task == "segmentation"
    if masks and any(map(holds_dicom, paths)):
        require_dicom()  # fail before hours of work
    outs = _outputs(paths, to, facts.dimensions, options) if masks else [to] * len(paths)
    predictions: list[Prediction] = []
    faults = []

    def record() -> None:
        write_text(_table(predictions), to / TABLE)

    with writing_into(to):
        pass  # a place that cannot be used is refused before the work
    try:
        for path, out in zip(paths, outs):
            try:
                predictions.append(_predict(study, predictor, path, out, site, trained, options))
            except DataError as error:
                faults.append(_said(error, study))
            else:
                if len(predictions) == 1:
                    record()  # tells the next call that the masks are predictions
    finally:
        if predictions:
            record()
    if faults:
        raise UnusableImages(predictions, faults, to)
    return predictions


def _predict(
    study: Study,
    predictor: Predictor,
    path: Path,
    out: Path,
    site: str | None,
    trained: DataProfile | None,
    options: PredictOptions,
) -> Prediction:
    picture = read_image(path, study.facts.dimensions, study.facts.channels)
    found = answered(study, predictor, picture, trained)
    told: dict[str, float] = {}
    if found.mask is None:
        told = dict(zip(study.facts.labels, found.chances.tolist(), strict=True))
        result = _chosen(told, options.thresholds)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        written = write_mask(found.mask, picture, out)
        if holds_dicom(path):
            inside = {label: inside_of(label, study.facts.contains) for label in study.facts.labels}
            seg = written.with_name(f"{written.name.removesuffix('.nii.gz')}.seg.dcm")
            write_segmentation(found.mask, path, study.facts.labels, inside, seg)
        result = str(written)
        if options.probabilities:
            chances = found.chances if study.facts.contains else found.chances[1:]
            write_probabilities(chances.numpy(), picture, written)
        if options.overlays:
            write_overlay(found.mask, picture, study.facts.labels, written)
    choice = found.choice
    why = f"asked for with --site {site}" if site else choice.why
    return Prediction(str(path), result, choice.key, choice.confidence, why, dict(choice.chances), found.warning, told)


def _said(error: DataError, study: Study) -> str:
    """Who predicts has a model and may have no federation.toml."""
    found, other_kind, _ = str(error).partition(OTHER_KIND)
    takes = f"{study.facts.dimensions}-D images with {counted(study.facts.channels, 'channel')}"
    return f"{found}, but the model takes {takes}; convert it." if other_kind else found


@dataclass(frozen=True)
class ImageAnswer:
    """What a model says of one image."""

    choice: ModelChoice
    mask: NDArray[np.uint8] | None  # (*spatial) on the image's own grid; None in classification
    logits: Tensor  # (channels, *spatial) there, or (classes,)
    nested: bool  # labels may contain others, so that every channel has a probability of its own
    warning: str  # how the image differs from the training images; "" if it does not, or if nothing is known

    @property
    def chances(self) -> Tensor:
        return self.logits.sigmoid() if self.nested else self.logits.softmax(0)


def answered(study: Study, predictor: Predictor, picture: ImageArray, trained: DataProfile | None) -> ImageAnswer:
    """Preprocess an image, ask the model, and bring a mask back to the image's own grid."""
    array, undo = forward(picture, study.preprocess)
    images = torch.from_numpy(array[None].copy())
    sliced = bool(study.preprocess.slices)
    if sliced:  # (1, channels, slices, row, column) → (slices, channels, row, column)
        images = images[0].transpose(0, 1)
    answer: Answer = predictor.answer(images, volume=sliced)
    output = answer.output.transpose(0, 1) if sliced else answer.output[0]
    choice = most_common(answer.choices)
    odd = unlike(image_facts(picture, array, undo), trained, study.preprocess) if trained else []
    warning = f"unlike the training images: {'; '.join(odd)}" if odd else ""
    if study.facts.task == "classification":
        return ImageAnswer(choice, None, output, False, warning)
    # resize logits, not the mask, so that edges stay smooth if the image was reduced
    logits = torch.from_numpy(np.ascontiguousarray(invert(output.numpy(), undo, nearest=False)))
    mask = study.task.decide(logits).numpy()
    mask = cleaned(mask) if study.task_fields.clean_up else mask
    return ImageAnswer(choice, mask, logits, bool(study.facts.contains), warning)


def _chosen(probabilities: Mapping[str, float], thresholds: Mapping[str, float]) -> str:
    """The class furthest above its threshold; if none reaches its threshold, the most probable of the others."""
    above = {
        label: probabilities[label] - least for label, least in thresholds.items() if probabilities[label] >= least
    }
    if above:
        return max(above, key=lambda label: above[label])
    rest = [label for label in probabilities if label not in thresholds] or list(probabilities)
    return max(rest, key=lambda label: probabilities[label])


def _found(images: Sequence[Path], dimensions: int) -> list[Path]:
    paths: list[Path] = []
    for path in images:
        if path.is_dir():
            inside = images_in(path, dimensions)
            if not inside:
                formats = f"{', '.join(IMAGE_SUFFIXES)}, or DICOM files of any name"
                raise DataError(f"the folder {path} has no images; formats are {formats}.")
            paths += inside
        elif stack_of(path)[0].is_file() or series_of(path)[0].is_dir():
            paths.append(path)
        else:
            raise DataError(f"there is no image {path}.")
    return together(paths, dimensions)


def _outputs(paths: Sequence[Path], to: Path, dimensions: int, options: PredictOptions) -> list[Path]:
    """A file for every mask; images that would share a file are distinguished by their folders."""
    plain = [_plain_name(path) for path in paths]
    names = [mask_name(Path(name), path, dimensions) for path, name in zip(paths, plain)]
    many = Counter(file.lower() for name in names for file in _files(name, options))  # as on disks without capitals
    shared = [any(many[file.lower()] > 1 for file in _files(name, options)) for name in names]
    chosen = [
        f"{path.parent.name}_{name}" if too and path.parent.name else name
        for path, name, too in zip(paths, names, shared)
    ]
    files = Counter(file for name in chosen for file in _files(name, options))
    if twice := [file for file, count in files.items() if count > 1]:
        both = [str(path) for path, name in zip(paths, chosen) if min(twice) in _files(name, options)]
        raise StudyError(f"{listed(both[:2])} would both write {min(twice)}; predict them into different folders.")
    given = {_identity(stack_of(path)[0]) for path in paths}
    if any(_identity(to / name) in given for name in (*plain, *files)):
        raise StudyError(f"--to {to} would overwrite the images themselves; name another folder.")
    if not (to / TABLE).exists() and (there := [name for name in files if (to / name).exists()]):
        raise StudyError(
            f"--to {to} already has {min(there)}, and no {TABLE} that says it is a prediction; name another folder."
        )
    return [to / name for name in chosen]


def _files(mask: str, options: PredictOptions) -> list[str]:
    """The names of a mask and of what may be written beside it."""
    asked = {OVERLAY: options.overlays, **dict.fromkeys(MAPS, options.probabilities)}
    return [mask, *(beside(Path(mask), ending).name for ending, wanted in asked.items() if wanted)]


def _identity(path: Path) -> object:
    """The same for all names of one file; of a file that is not there, its path."""
    if not path.exists():
        return path
    status = path.stat()
    return status.st_dev, status.st_ino


def _plain_name(path: Path) -> str:
    """A file name for an image; for an image in a stack, test.npy#17 becomes test-00017.npy."""
    file, place = stack_of(path)
    if series_of(path)[0].is_dir():
        return path.resolve().name.replace("#", "-") + ".dcm"
    return file.name if place is None else f"{file.stem}-{place:05d}.npy"


def _table(predictions: Sequence[Prediction]) -> str:
    rows = [prediction.to_json() for prediction in predictions]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {column: (f"{value:.6f}" if isinstance(value, float) else value) for column, value in row.items()}
        for row in rows
    )
    return text.getvalue()
