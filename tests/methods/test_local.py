"""Local training: no exchange; a site's model is what it would have been alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consilium import packet_files
from consilium.errors import NotForOutsiders
from consilium.method import Best, Valid
from consilium.methods.fedsm import FedSM
from consilium.methods.local import LocalTraining
from consilium.run_folder import RunFolder
from consilium.simulation import Result, run
from consilium.site import SiteCard
from tests.learning.small import FIRST, Line, batch, line, site, value
from tests.toy import toy_study

ADA = SiteCard("ada", 0, 1, ())
CHANGES = {"study__rounds": 2, "local__batch_size": 4}


@pytest.fixture(scope="module")
def local_run(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(toy_study(federation, "local", **CHANGES), tmp_path_factory.mktemp("local"), workers=0)


def test_it_goes_on_from_its_own_model() -> None:
    """x = 1, t = 0, lr .1: 1 → .9 → .81; nothing of the server's enters."""
    here, memory = site(batch([1.0], [0.0])), LocalTraining.Memory(line(1.0))
    for expected in (0.9, 0.81):
        uplink, memory = LocalTraining().train(here, memory, LocalTraining.Downlink(), FIRST)
        assert value(memory.local) == pytest.approx(expected)
        assert uplink.local is not None and uplink.local.digest == memory.local.digest


def test_it_is_fedsm_that_never_pulls(federation: Path, tmp_path: Path, local_run: Result) -> None:
    """At λ = 1 with kept optimisers FedSM's personal models are the local ones, bit by bit."""
    alone = packet_files.load(local_run.folder / "last.safetensors", LocalTraining.Server)
    fedsm = run(toy_study(federation, "fedsm", method__pull=1.0, **CHANGES), tmp_path, workers=0)
    personal = packet_files.load(fedsm.folder / "last.safetensors", FedSM.Server).personal
    for name in ("ada", "bea", "cid"):
        for key, tensor in alone.local[name].items():
            assert tensor.equal(personal[name][key]), (name, key)


def test_every_model_is_scored_at_every_site_at_the_end(local_run: Result) -> None:
    rows = [row for row in RunFolder.open(local_run.folder).rows() if row.metric == "dice" and row.phase == "best"]
    assert {(row.of, row.site) for row in rows} == {
        (a, b) for a in ("ada", "bea", "cid") for b in ("ada", "bea", "cid")
    }
    assert {row.model for row in rows} == {"local"}
    assert {row.when for row in rows} == {"trained"}


def test_while_training_it_is_scored_at_home(local_run: Result) -> None:
    rows = [row for row in RunFolder.open(local_run.folder).rows() if row.phase == "train"]
    assert all(row.of == row.site for row in rows)


def test_each_site_keeps_its_own_best_round() -> None:
    best = Best(
        LocalTraining.Server({"ada": line(1.0), "bea": line(1.0)}),
        {"local/ada": Valid(0.5, 1), "local/bea": Valid(0.5, 1)},
    )
    now = Best(
        LocalTraining.Server({"ada": line(2.0), "bea": line(2.0), "cid": line(2.0)}),
        {"local/ada": Valid(0.6, 2), "local/bea": Valid(0.5, 2), "local/cid": Valid(0.1, 2)},
    )
    kept = LocalTraining().keep(best, now)
    assert {name: value(w) for name, w in kept.server.local.items()} == {"ada": 2.0, "bea": 1.0, "cid": 2.0}
    assert {key: mark.round for key, mark in kept.valid.items()} == {"local/ada": 2, "local/bea": 1, "local/cid": 2}


def test_unshared_models_stay_at_home() -> None:
    method = LocalTraining(share_local_parts=False)
    uplink, memory = method.train(
        site(batch([1.0], [0.0])), LocalTraining.Memory(line(1.0)), LocalTraining.Downlink(), FIRST
    )
    assert uplink.local is None
    server = method.merge(LocalTraining.Server({}), {"ada": uplink}, FIRST)
    assert server.local == {}
    released = method.release(server, ADA)
    assert value(method.deploy(Line(), memory, released).first.weights) == pytest.approx(0.9)  # type: ignore[attr-defined]
    with pytest.raises(NotForOutsiders):
        method.deploy(Line(), None, method.release(server, None))


def test_an_unshared_best_round_is_the_one_that_is_scored(federation: Path, tmp_path: Path) -> None:
    """What the summary calls best is scored on the memory of that round, not of another one."""
    study = toy_study(federation, "local", method__share_local_parts=False, study__score_every=1, **CHANGES)
    result = run(study, tmp_path, workers=0)
    rows = [row for row in RunFolder.open(result.folder).rows() if row.metric == "dice" and row.of == row.site]
    best = result.summary["best"]["round"]
    then = {(r.site, r.split, r.case): r.value for r in rows if r.phase == "train" and r.round == best}
    final = {(r.site, r.split, r.case): r.value for r in rows if r.phase == "best"}
    assert final == then


def test_outside_there_is_no_local_model() -> None:
    released = LocalTraining().release(LocalTraining.Server({"ada": line(1.0)}), None)
    predictor = LocalTraining().deploy(Line(), None, released)
    with pytest.raises(NotForOutsiders, match="name one with --site"):
        predictor.answer(torch.zeros(1, 1))
    assert [other.of for other in predictor.elsewhere()] == ["ada"]
    assert predictor.of_site("ada").of == "ada"
