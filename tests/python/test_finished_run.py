"""A finished run in Python: scores, models, predictions, evaluation elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import consilium
from consilium.contract import run_in_process
from consilium.errors import DataError, RunError, StudyError
from consilium.export.exporting import export_run
from consilium.finished_run import FinishedRun, open_run
from consilium.toy_federation import SIZES
from tests.toy import toy_study

pytestmark = pytest.mark.xdist_group("monai")  # one process loads it, and makes the runs below once


@pytest.fixture(scope="module")
def finished(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    """A run of FedSM and one of FedAvg."""
    runs = tmp_path_factory.mktemp("runs")
    made = {
        method: run_in_process(toy_study(federation, method, study__rounds=2, local__batch_size=4), runs / method)
        for method in ("fedsm", "fedavg")
    }
    return {method: open_run(result.folder) for method, result in made.items()}


def test_scores_are_rows(finished: dict[str, FinishedRun]) -> None:
    run = finished["fedsm"]
    rows = run.scores(split="test", phase="best", model="super", metric="dice")
    assert {row["site"] for row in rows} == set(SIZES) == set(run.sites)
    by_site = {site: np.mean([row["value"] for row in rows if row["site"] == site]) for site in run.sites}
    assert np.mean(list(by_site.values())) == pytest.approx(run.summary["headline"]["site_mean"])


def test_models_are_modules(finished: dict[str, FinishedRun]) -> None:
    run = finished["fedsm"]
    images = torch.rand(2, 1, 16, 16)
    networks = [run.model(), *(run.model(site=site) for site in run.sites)]
    assert all(isinstance(network, nn.Module) and not network.training for network in networks)
    outputs = [network(images) for network in networks]
    for i in range(len(outputs)):
        for other in outputs[i + 1 :]:
            assert not torch.equal(outputs[i], other), "every site has a model of its own"
    answer = run.super_model().answer(images)
    assert answer.output.shape == outputs[0].shape
    chosen = {"": run.model(), **{site: run.model(site=site) for site in run.sites}}
    for i, choice in enumerate(answer.choices):
        torch.testing.assert_close(chosen[choice.of](images)[i], answer.output[i], rtol=1e-4, atol=1e-5)


def test_an_array_is_predicted_as_its_file_is(finished: dict[str, FinishedRun], federation: Path) -> None:
    path = federation / "ada/images/ada011.png"
    by_file = consilium.predict(finished["fedsm"], path)
    by_array = consilium.predict(finished["fedsm"].path, np.asarray(Image.open(path)))
    assert by_file.mask is not None and by_array.mask is not None
    assert by_file.mask.shape == (16, 16)
    assert np.array_equal(by_file.mask, by_array.mask)
    assert by_file.model == by_array.model
    assert np.allclose(by_file.probabilities.sum(0), 1, atol=1e-5)
    own = finished["fedsm"].predict(path, site="bea")
    assert own.model == "personal/bea"


def test_an_array_unlike_the_training_images_is_marked(finished: dict[str, FinishedRun], federation: Path) -> None:
    array = np.asarray(Image.open(federation / "ada/images/ada011.png"))
    assert finished["fedsm"].predict(array).warning == ""
    assert "another modality or unit?" in finished["fedsm"].predict(array.astype(np.float64) * 1e6).warning


def test_evaluation_gives_the_runs_own_scores(finished: dict[str, FinishedRun], federation: Path) -> None:
    run = finished["fedsm"]
    told = {
        (row["site"], row["case"]): row["value"]
        for row in run.scores(split="test", phase="best", model="super", metric="dice", label="blob")
    }
    found = {(row["site"], row["case"]): row["value"] for row in consilium.evaluate(run) if row["metric"] == "dice"}
    assert found == pytest.approx(told)
    assert {row["site"] for row in run.evaluate(federation, split="valid")} == set(SIZES)


@pytest.mark.slow
def test_a_package_has_models_and_no_scores(finished: dict[str, FinishedRun], tmp_path: Path) -> None:
    export_run(finished["fedsm"].path, tmp_path / "out")
    package = open_run(tmp_path / "out")
    images = torch.rand(1, 1, 16, 16)
    assert package.sites == finished["fedsm"].sites
    assert torch.equal(package.model(site="cid")(images), finished["fedsm"].model(site="cid")(images))
    with pytest.raises(RunError, match="its scores stayed in the run folder"):
        package.scores()


@pytest.mark.parametrize(
    ("ask", "error", "sentence"),
    [
        (lambda run: run.super_model(), StudyError, "a run of 'fedavg' has no super model"),
        (lambda run: run.model(site="ada"), StudyError, "site 'ada'"),
        (lambda run: run.predict(np.zeros((3, 16, 16))), DataError, "this run takes 1 channel of 2-D images"),
        (lambda run: run.predict(np.full((16, 16), np.nan)), DataError, "256 values that are not finite numbers"),
        (lambda run: run.predict(np.zeros((0, 16))), DataError, "the array has no pixels"),
        (lambda run: run.predict(np.full((16, 16), "a")), DataError, "give numbers"),
        (lambda run: run.evaluate(split="tests"), StudyError, "it must be one of train, valid, test"),
    ],
)
def test_mistakes(finished: dict[str, FinishedRun], ask: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ask(finished["fedavg"])


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        open_run(tmp_path)
