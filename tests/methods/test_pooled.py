"""Pooled training: one virtual site holds all training cases; every score keeps the true site of its case."""

from __future__ import annotations

from pathlib import Path

import pytest

from consilium.methods.pooled import Pooled
from consilium.run_folder import RunFolder
from consilium.simulation import Result, run
from tests.learning.small import FIRST, batch, line, site, value
from tests.toy import toy_study


@pytest.fixture(scope="module")
def pooled(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    study = toy_study(federation, "pooled", study__rounds=2, local__batch_size=4)
    return run(study, tmp_path_factory.mktemp("pooled"), workers=0)


def test_one_site_makes_the_steps_of_all(pooled: Result) -> None:
    """8, 12 and 10 cases in batches of 4: 2 + 3 + 3 = 8 steps a round."""
    events = [event for event in RunFolder.open(pooled.folder).events() if event["event"] == "train"]
    assert [(event["site"], event["steps"]) for event in events] == [("(pooled)", 8), ("(pooled)", 8)]


def test_scores_keep_the_true_site(pooled: Result) -> None:
    rows = [row for row in RunFolder.open(pooled.folder).rows() if row.metric == "dice"]
    assert {row.site for row in rows} == {"ada", "bea", "cid"}
    assert all(row.case.startswith(row.site) and row.model == "pooled" and not row.outside for row in rows)
    assert set(pooled.summary["headline"]["sites"]) == {"ada", "bea", "cid"}


def test_nobody_else_may_do_it() -> None:
    assert Pooled.deployable is False


def test_the_optimiser_is_kept() -> None:
    here = site(batch([1.0], [0.0]), optimizer="adam")
    uplink, memory = Pooled().train(here, Pooled.Memory(line(1.0)), Pooled.Downlink(), FIRST)
    assert memory.states["pooled"].step == 1
    _, memory = Pooled().train(here, memory, Pooled.Downlink(), FIRST)
    assert memory.states["pooled"].step == 2
    assert value(uplink.pooled) == pytest.approx(0.9)
