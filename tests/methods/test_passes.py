"""What a prediction costs: the passes a predictor declares are those it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.contract import Stage, run_in_process
from consilium.methods import METHODS
from consilium.tasks.segmentation import Segmentation
from tests.toy import toy_study

IMAGE = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
# three sites that annotate a disc, a square, and both
PASSES = {
    "fedavg": 1,
    "fedavg-foreground": 1,
    "solo": 3,
    "cond-dec": 3,
    "fedbn": 3,
    "multi-head": 3,
    "multi-encoder": 3,
    "multi-decoder": 3,
    "dod": 4,
    "fedcrld": 3,
    "menu-net": 1,
    "fedsm": 1,
}


@pytest.mark.parametrize("name", PASSES)
def test_declared_and_made(name: str, organs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(toy_study(organs, name, local__batch_size=8), tmp_path)
    stage.round(0)
    predictor = stage.method.deploy(stage.task, None, stage.method.release(stage.server, stage.roster["ada"]))
    made = []
    infer = Segmentation.infer

    def counted(self: Any, weights: Any, images: Any, kind: str = "model", labels: Any = None) -> Any:
        made.append(kind)
        return infer(self, weights, images, kind, labels)

    monkeypatch.setattr(Segmentation, "infer", counted)
    predictor.answer(IMAGE)
    assert predictor.passes == len([kind for kind in made if kind != "selector"]) == PASSES[name]


def test_one_pass_where_all_annotate_the_same(federation: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(federation, "fedbn", local__batch_size=8), tmp_path)
    stage.round(0)
    deployed = [stage.method.deploy(stage.task, None, stage.method.release(stage.server, card))
                for card in (stage.roster["ada"], None)]  # fmt: skip
    assert [predictor.passes for predictor in deployed] == [1, 3]


@pytest.mark.parametrize(("shared", "passes"), [(True, 3), (False, 1)])
def test_a_run_says_what_a_prediction_costs(shared: bool, passes: int, organs: Path, tmp_path: Path) -> None:
    study = toy_study(organs, "solo", study__rounds=1, local__batch_size=8, method__share_local_parts=shared)
    assert run_in_process(study, tmp_path).summary["passes"] == passes


def test_every_method_says_it_in_words() -> None:
    personal = [name for name, kind in METHODS.items() if kind.prediction != "one"]
    assert set(personal) >= {name for name, passes in PASSES.items() if passes > 1}
