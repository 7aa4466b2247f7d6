"""FedAvg on the annotated foreground: the name of a setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consilium.batch import Batch
from consilium.contract import Stage, run_in_process, state
from consilium.errors import StudyError
from consilium.export.models import released, whole_models
from consilium.methods.fedavg_foreground import foreground_only
from consilium.run_folder import RunFolder
from tests.toy import toy_study


def test_it_is_fedavg_with_unannotated_ignored_bit_by_bit(organs: Path, tmp_path: Path) -> None:
    """Weights and scores; plain FedAvg's are others."""
    changes = {"study__rounds": 2, "task__loss": "dice+ce", "task__residual_units": 1}
    named = run_in_process(toy_study(organs, "fedavg-foreground", **changes), tmp_path / "named")
    setting = run_in_process(toy_study(organs, "fedavg", task__unannotated="ignored", **changes), tmp_path / "setting")
    plain = run_in_process(toy_study(organs, "fedavg", **changes), tmp_path / "plain")
    assert state(named) == state(setting) != state(plain)
    rows = [[(r.site, r.case, r.label, r.value) for r in RunFolder.open(x.folder).rows()] for x in (named, setting)]
    assert rows[0] == rows[1]


def test_analyses_see_the_loss_that_was_trained(organs: Path, tmp_path: Path) -> None:
    stage = Stage(toy_study(organs, "fedavg-foreground", task__loss="dice+ce"), tmp_path)
    site = stage.workers["cid"].site
    batch = next(iter(site.batches(stage.rounds[0])))
    output = torch.randn(len(batch.cases), 3, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = stage.method.trained_loss(site, stage.server, None, stage.rounds[0])(batch)(output)
    assert seen == foreground_only(site.task).loss(output, batch) != site.task.loss(output, batch)
    assert foreground_only(site.task) is foreground_only(site.task)  # networks are kept by task


def test_two_organs_are_judged_each_by_itself(organs: Path) -> None:
    """Dice + binary cross entropy: for two zero logits of two organs, ln 2 whatever the truth is."""
    task = foreground_only(toy_study(organs, "fedavg-foreground", task__loss="dice+ce").task)
    plain = foreground_only(toy_study(organs, "fedavg-foreground").task)
    truth = torch.tensor([[[0, 1], [2, 2]]])
    batch = Batch(torch.zeros(1), truth, ("c",))
    extra = task.loss(torch.zeros(1, 3, 2, 2), batch) - plain.loss(torch.zeros(1, 3, 2, 2), batch)
    assert extra.item() == pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize(("name", "whole"), [("fedavg", 1), ("fedavg-foreground", 0), ("cond-dec", 0), ("menu-net", 0)])
def test_a_network_that_does_not_answer_alone_is_no_bundle(name: str, whole: int, organs: Path, tmp_path: Path) -> None:
    """Other software would take an untrained background, and tell a decoder of no site."""
    stage = Stage(toy_study(organs, name), tmp_path)
    found = released(stage.study, stage.server)
    assert len(found.models) == len(whole_models(found.predictor)) == whole


def test_studies_that_cannot_work(organs: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="has a loss on annotated labels only; remove the key"):
        run_in_process(toy_study(organs, "fedavg-foreground", task__unannotated="background"), tmp_path)
