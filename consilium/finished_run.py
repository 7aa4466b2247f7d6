"""A finished run in Python: its scores, its models as `nn.Module`, predictions of arrays and files.

>>> run = open_run("runs/fedsm-s0-1a2b3c4d")                        # doctest: +SKIP
>>> run.scores()[0]["value"], run.model(site="hk"), run.super_model()  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from consilium.data.images import ImageArray, not_finite, read_image
from consilium.data.profile import DataProfile
from consilium.errors import DataError, RunError, StudyError
from consilium.evaluation import evaluate_on
from consilium.export.models import whole_models
from consilium.export.package import is_package, open_package, sites_of
from consilium.files import read_json
from consilium.prediction import answered, open_predictor, trained_on
from consilium.predictor import Predictor
from consilium.run_folder import RunFolder
from consilium.study import Study
from consilium.wording import counted


@dataclass(frozen=True)
class ImagePrediction:
    """The prediction for one image."""

    mask: NDArray[np.uint8] | None  # (*spatial), values 1, 2, … are the study's labels; None in classification
    label: str  # the class; empty in segmentation
    probabilities: NDArray[np.float32]  # (channels, *spatial) on the image's own grid, or (classes,)
    model: str  # the model that answered: "global", "personal/hk", …
    why: str
    confidence: float | None  # of the selector, if there is one
    warning: str = ""  # how the image differs from the training images; "" if it does not, or if nothing is known


@dataclass(frozen=True)
class FinishedRun:
    """A run folder, or an exported package, that holds trained models. `open_run` makes it."""

    path: Path
    study: Study

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that trained, sorted by name; of a package, the sites with a model of their own."""
        if is_package(self.path):
            return sites_of(self.path)
        return tuple(sorted(read_json(self.path / "origin.json")["members"]))

    @cached_property
    def _trained_on(self) -> DataProfile | None:
        return trained_on(self.path)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """summary.json: headline, scores of the best and the last state, cost."""
        return RunFolder.open(self._run()).summary()

    def scores(self, **where: Any) -> list[dict[str, Any]]:
        """Return one dictionary per score; `pandas.DataFrame(run.scores())` is a table.

        Args:
            where: keep only rows with these values, such as `split="test"`, `site="hk"`, `metric="dice"`.
        """
        rows = (dataclasses.asdict(row) for row in RunFolder.open(self._run()).rows())
        return [row for row in rows if all(row[key] == value for key, value in where.items())]

    def predictor(self, site: str | None = None) -> Predictor:
        """Return the method's best model, ready to predict: the super model of FedSM, the global model of FedAvg.

        Args:
            site: return this site's own model instead.
        """
        if is_package(self.path):
            return open_package(self.path, site, device="cpu")[1]
        return open_predictor(self.path, site)[1]

    def super_model(self) -> Predictor:
        """Return the model that routes every image; `.answer(images)` returns logits and the chosen models.

        Raises StudyError if the method has no selector.
        """
        found = self.predictor()
        if found.model not in ("super", "ensemble"):
            raise StudyError(f"a run of '{self.study.method_name}' has no super model; use .model().")
        return found

    def model(self, site: str | None = None) -> nn.Module:
        """Return one network with its trained weights, in evaluation mode, on the CPU.

        It takes preprocessed images (batch, channels, *spatial) and returns logits: (batch, outputs, *spatial) in
        segmentation, (batch, classes) in classification.

        Args:
            site: the site whose own model is returned; None: the common model.

        Raises:
            StudyError: the run has no such model.
        """
        models = self._models(site)
        wanted = [model for model in models if model.of == (site or "")]
        if not wanted:
            own = f"no model of site '{site}'" if site else "no model that all sites share"
            raise StudyError(f"{self.path} holds {own}; it has {', '.join(model.name for model in models)}.")
        network = self.study.task.on("cpu").network()
        network.load_state_dict(dict(wanted[0].weights))
        return network.eval()

    def predict(self, image: NDArray[Any] | Path | str, site: str | None = None) -> ImagePrediction:
        """Predict one image.

        Args:
            image: a file, or an array (*spatial) or (channels, *spatial) with stored values and voxels of 1 mm.
            site: use this site's own model.
        """
        trained = self._trained_on
        if trained and not isinstance(image, str | Path):  # an array has no spacing and no orientation to look at
            trained = replace(trained, spacing=(), orientations=("",))
        found = answered(self.study, self.predictor(site), self._picture(image), trained)
        choice, chances = found.choice, found.chances.numpy()
        label = self.study.facts.labels[int(self.study.task.decide(found.logits))] if found.mask is None else ""
        return ImagePrediction(found.mask, label, chances, choice.key, choice.why, choice.confidence, found.warning)

    def evaluate(
        self, federation: Path | str | None = None, split: str = "test", site: str | None = None
    ) -> list[dict[str, Any]]:
        """Score the best model on cases and return one dictionary per case, label and score.

        Args:
            federation: a folder of site folders with the same labels; None: the run's own.
            split: "train", "valid", "test" or "all".
            site: use this site's own model everywhere.
        """
        place = Path(federation) if federation is not None else Path(self.study.data.federation)
        return evaluate_on(self.study, self.predictor(site), place, split, self.path).rows()

    def _picture(self, image: NDArray[Any] | Path | str) -> ImageArray:
        facts = self.study.facts
        if isinstance(image, str | Path):
            return read_image(Path(image), facts.dimensions, facts.channels)
        array = np.asarray(image)
        array = array[None] if array.ndim == facts.dimensions else array
        if array.ndim != facts.dimensions + 1 or len(array) != facts.channels:
            raise DataError(
                f"the array has shape {np.shape(image)}; this run takes {counted(facts.channels, 'channel')} of "
                f"{facts.dimensions}-D images."
            )
        if not array.size:
            raise DataError(f"the array has no pixels: its shape is {np.shape(image)}.")
        if array.dtype.kind not in "biuf":
            raise DataError(f"the array holds values of type {array.dtype}; give numbers.")
        if fault := not_finite(array):
            raise DataError(f"the array {fault}")
        return ImageArray(array, (1.0,) * facts.dimensions, Path("array"), None)

    def _models(self, site: str | None = None) -> tuple[Any, ...]:
        own = whole_models(self.predictor(site)) if site else ()
        return own or whole_models(self.predictor())

    def _run(self) -> Path:
        if is_package(self.path):
            raise RunError(f"{self.path} is a package: its scores stayed in the run folder; see model_card.md.")
        return self.path


def open_run(path: Path | str) -> FinishedRun:
    """Open a run folder or an exported package.

    Args:
        path: a folder made by `consilium run`, or the package in a folder made by `consilium export`.

    Returns:
        The run, with `.sites`, `.summary`, `.scores()`, `.model()`, `.super_model()`, `.predict()` and `.evaluate()`.

    Raises:
        RunError: the folder is neither.

    >>> from consilium import load_study, open_run, run
    >>> done = open_run(run(load_study("study.toml"), workers=0).folder)
    >>> done.sites
    ('ada', 'bea', 'cid')
    >>> import torch
    >>> done.model()(torch.rand(2, 1, 16, 16)).shape
    torch.Size([2, 2, 16, 16])
    """
    path = Path(path)
    if is_package(path):
        return FinishedRun(path, open_package(path, device="cpu")[0])
    return FinishedRun(path, RunFolder.open(path).study)


def predict(
    run: FinishedRun | Path | str, image: NDArray[Any] | Path | str, site: str | None = None
) -> ImagePrediction:
    """Predict one image with a run's best model.

    Args:
        run: what `open_run` returns, or the path of a run folder or package.
        image: a file, or an array (*spatial) or (channels, *spatial) with stored values and voxels of 1 mm.
        site: use this site's own model; None: the common model, or the selector's choice.

    Returns:
        The mask (*spatial) or the class, probabilities, and the model that answered.

    >>> from consilium import load_study, predict, run
    >>> result = run(load_study("study.toml"), workers=0)
    >>> found = predict(result.folder, "data/ada/images/ada011.png")
    >>> found.model, found.mask.shape
    ('global', (16, 16))
    """
    return (run if isinstance(run, FinishedRun) else open_run(run)).predict(image, site)


def evaluate(
    run: FinishedRun | Path | str, federation: Path | str | None = None, split: str = "test", site: str | None = None
) -> list[dict[str, Any]]:
    """Score a run's best model on cases.

    Args:
        run: what `open_run` returns, or the path of a run folder or package.
        federation: a folder of site folders with the same labels; None: the run's own.
        split: "train", "valid", "test" or "all".
        site: use this site's own model everywhere.

    Returns:
        One dictionary per case, label and score, with the keys site, case, label, metric, value, model, and seen:
        whether the model was trained on the case or chosen by it, as far as its run tells.

    >>> from consilium import evaluate, load_study, run
    >>> rows = evaluate(run(load_study("study.toml"), workers=0).folder, split="test")
    >>> sorted(rows[0])
    ['case', 'label', 'metric', 'model', 'seen', 'site', 'value']
    """
    return (run if isinstance(run, FinishedRun) else open_run(run)).evaluate(federation, split, site)
