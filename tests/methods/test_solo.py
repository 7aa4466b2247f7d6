"""SOLO: models of different organs, by hand as one; each its own best round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files
from consilium.contract import run_in_process
from consilium.errors import NotForOutsiders, StudyError
from consilium.method import Best, Valid
from consilium.methods.merged import check_exclusive, merged_logits
from consilium.methods.solo import Solo
from consilium.networks.cnn import CNN
from consilium.networks.unet import UNet
from consilium.networks.vgg import SmallVGG
from consilium.run_folder import RunFolder
from consilium.tasks.classification import Classification
from consilium.tasks.segmentation import Segmentation
from consilium.weights import Weights
from tests.toy import toy_study


def test_merged_logits_by_hand() -> None:
    """Two models know the liver: their mean. Background needs all three to say so; nobody knows the pancreas."""
    chances = [[[0.25], [0.75]], [[0.5], [0.25], [0.25]], [[0.8], [0.2]]]
    one, two, three = (torch.tensor([channels]).log() for channels in chances)
    outputs = [(("liver",), one), (("liver", "spleen"), two), (("kidney",), three)]
    merged = merged_logits(outputs, ("kidney", "liver", "spleen", "pancreas"))[0, :, 0].softmax(0)
    parts = torch.tensor([0.25 * 0.5 * 0.8, 0.2, (0.75 + 0.25) / 2, 0.25, 0.0])
    assert torch.allclose(merged, parts / parts.sum(), atol=1e-6)


def test_an_organ_is_found_though_only_one_model_knows_it() -> None:
    """The others call it background, as they call everything they do not know."""
    sure, unaware = torch.tensor([[[-1.0], [1.0]]]), torch.tensor([[[8.0], [-8.0]]])
    outputs = [(("kidney",), sure), (("liver",), unaware), (("spleen",), unaware)]
    assert merged_logits(outputs, ("kidney", "liver", "spleen"))[0, :, 0].argmax() == 1


def test_all_organs_are_scored_at_every_site(organs: Path, tmp_path: Path) -> None:
    study = toy_study(organs, "solo", data__test_masks="complete", study__rounds=2)
    result = run_in_process(study, tmp_path)
    rows = [r for r in RunFolder.open(result.folder).rows() if r.phase == "best" and r.split == "test"]
    assert {(r.site, r.label) for r in rows if r.model == "solo" and r.metric == "dice"} == {
        (site, label) for site in ("ada", "bea", "cid") for label in ("round", "square")
    }
    assert {r.of for r in rows if r.model == "teacher" and r.site == "ada"} == {"ada", "bea", "cid"}
    assert result.summary["headline"]["model"] == "solo"


def test_each_site_keeps_its_own_best_round() -> None:
    def state(a: float, b: float, scores: dict[str, float], round: int) -> Best:
        models = {"a": Weights({"w": torch.tensor(a)}), "b": Weights({"w": torch.tensor(b)})}
        return Best(Solo.Server(models, {}), {k: Valid(v, round) for k, v in scores.items()}, {"a": round})

    first = state(1.0, 2.0, {"teacher/a": 0.5, "teacher/b": 0.5}, 1)
    best = Solo().keep(first, state(3.0, 4.0, {"teacher/a": 0.6, "teacher/b": 0.4}, 2))
    assert {name: w["w"].item() for name, w in best.server.teachers.items()} == {"a": 3.0, "b": 2.0}


def test_models_that_are_not_shared_stay_at_home(organs: Path, tmp_path: Path) -> None:
    study = toy_study(organs, "solo", method__share_local_parts=False, study__rounds=1)
    result = run_in_process(study, tmp_path)
    server: Any = packet_files.load(result.folder / "last.safetensors", Solo.Server)
    assert server.teachers == {}
    with pytest.raises(NotForOutsiders, match="not shared"):
        study.method.deploy(study.task, None, study.method.release(server, None))


def test_studies_that_cannot_work(federation: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="SOLO needs batchnorm = 'average'"):
        run_in_process(toy_study(federation, "solo", local__batchnorm="local", task__norm="batch"), tmp_path)
    with pytest.raises(StudyError, match="for methods without teachers"):
        run_in_process(toy_study(federation, "solo", task__unannotated="ignored"), tmp_path)


@pytest.mark.parametrize(
    "task",
    [
        Classification(("a", "b"), 2, 1, CNN(), SmallVGG((4,))),
        Segmentation(("disc", "cup"), 2, 1, UNet((4, 8), 1), SmallVGG((4,)), contains={"disc": ("cup",)}),
    ],
    ids=["classes", "labels inside each other"],
)
def test_only_labels_that_exclude_each_other_have_teachers(task: Any) -> None:
    with pytest.raises(StudyError, match="labels exclude each other"):
        check_exclusive(task, "average", "SOLO")
