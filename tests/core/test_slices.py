"""Volumes trained as slices: which score decides, and that older runs keep theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from consilium import simulation
from consilium.data.phantoms import write_phantom
from consilium.errors import StudyError
from consilium.evaluation import scored_cases
from consilium.finished_run import FinishedRun
from consilium.predictor import Answer, ModelChoice, Predictor
from consilium.reporting import examples
from consilium.site_opening import open_arrays, site_facts
from consilium.study import Study
from consilium.study_reading import load_study, make_study
from consilium.timeline import timeline
from consilium.validation import admitted, expected_roster, labelled_cases


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volumes") / "prostate"
    write_phantom("prostate", folder, 18, 32, 0)
    return folder


def study(volumes: Path, method: str = "fedavg", slices: str = "axial", **task: Any) -> Study:
    size = [16, 16] if slices else [4, 16, 16]
    return make_study({
        "study": {"rounds": 1, "score_every": 1, "sites": ["i2cvb", "msd"]},
        "data": {"federation": str(volumes)},
        "preprocess": {"slices": slices, "size": size},
        "task": {"widths": [4, 8], "residual_units": 0, **task},
        "local": {"batch_size": 16},
        "method": {"name": method},
    })  # fmt: skip


def test_slices_decide_and_volumes_stand_beside(volumes: Path, tmp_path: Path) -> None:
    result = simulation.run(study(volumes), tmp_path, workers=0)
    assert result.summary["headline"]["metric"] == "slice_dice"
    found = result.summary["best"]["scores"]["global"]
    assert result.summary["headline"]["site_mean"] == found["slice_dice"]["mean"]["site_mean"]
    assert found["dice"]["mean"]["cases"]["msd"] < found["slice_dice"]["mean"]["cases"]["msd"]  # volumes, slices


def test_volumes_decide_where_the_study_says_so_and_where_there_are_no_slices(volumes: Path) -> None:
    assert study(volumes).headline == "slice_dice"
    assert study(volumes, decides="volume").headline == "dice"
    assert [study(volumes, decides=how).task.decides for how in ("slice", "volume")] == ["slice", "volume"]
    assert study(volumes, slices="").headline == "dice"
    with pytest.raises(StudyError, match=r"\[task\] decides = 'case': it must be one of slice, volume"):
        study(volumes, decides="case")


def test_a_run_from_before_the_key_was_decided_by_volumes(volumes: Path, tmp_path: Path) -> None:
    made = study(volumes, "fedsm", decides="volume")
    text = made.to_toml().replace('decides = "volume"\n', "").replace('route = "slice"', 'route = "volume"')
    assert "decides" not in text
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    again = load_study(tmp_path / "study.toml")
    assert again.headline == "dice" and vars(again.method)["route"] == "volume"


def test_how_slices_are_judged_and_routed_is_nothing_to_whole_images(volumes: Path) -> None:
    """So runs of older versions are found again by their hash."""
    whole = {how: study(volumes, "fedsm", slices="", decides=how).hash for how in ("slice", "volume")}
    assert whole["slice"] == whole["volume"]
    assert study(volumes, decides="slice").hash != study(volumes, decides="volume").hash


class BySlice(Predictor):
    """The first slice is sent to one model, the slice `shown` to another, all others to the global model."""

    model, of, when = "super", "", "merged"

    def __init__(self, made: Study, shown: int = -1) -> None:
        self.task, self.weights, self.shown = made.task, made.task.initial(), shown

    def answer(self, images: Tensor, volume: bool = False) -> Answer:
        assert volume and len(images) > 3
        choices = [ModelChoice("global") for _ in images]
        choices[0] = ModelChoice("personal", "msd")
        if self.shown >= 0:
            choices[self.shown] = ModelChoice("personal", "i2cvb")
        return Answer(self.task.infer(self.weights, images), tuple(choices))


def test_a_volume_is_told_by_the_model_of_most_of_its_slices(
    volumes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = study(volumes, "fedsm")
    predictor = BySlice(made)
    assert {case.model for case in scored_cases(made, predictor, volumes, "test")} == {"global"}
    monkeypatch.setattr(FinishedRun, "predictor", lambda self, site=None: predictor)
    monkeypatch.setattr(FinishedRun, "_trained_on", None)  # there is no run folder
    image = next(iter(sorted((volumes / "msd" / "images").iterdir())))
    assert FinishedRun(tmp_path, made).predict(image).model == "global"


def test_an_example_is_told_by_the_model_of_the_slice_that_is_shown(volumes: Path) -> None:
    made = study(volumes, "fedsm")
    found = {}
    arrays = open_arrays(made, made.federation(), "msd")
    first = arrays.indices("test")[0]
    truth = np.array(arrays.truth(first))
    shown = int((truth > 0).sum((1, 2)).argmax())
    for one in examples(made, BySlice(made, shown), "test"):
        found[one.site] = one.model
    assert shown and found["msd"] == "personal/i2cvb"


def test_a_dry_run_takes_no_volume_for_one_image_of_a_batch(volumes: Path) -> None:
    """Only masks tell how many slices have a label, so nothing is said of too few."""
    made = study(volumes, "apple")
    made = replace(made, local=replace(made.local, batch_size=8))
    federation = made.federation()
    line = timeline(made.method, made.plan.rounds)
    for site in ("i2cvb", "msd"):
        assert labelled_cases(federation, site) < made.local.batch_size < site_facts(made, federation, site)[0].n
    assert admitted(made, line, expected_roster(made, federation, ["i2cvb", "msd"])) == []
