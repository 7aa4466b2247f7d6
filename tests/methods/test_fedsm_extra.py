"""FedSM-extra and the ensemble: two phases, targets by least loss, models sent once, averaged probabilities."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files, simulation, tree
from consilium.cli.progress import _RunStatus
from consilium.errors import StudyError
from consilium.learning.discriminant import sums_of
from consilium.learning.regression import STRENGTHS, LossForecast, regression
from consilium.method import Best, Valid
from consilium.methods.fedsm_ensemble import FedSMEnsemble
from consilium.methods.fedsm_extra import FedSMExtra
from consilium.methods.regression_selector import scores_by_strength
from consilium.methods.routers import GLOBAL, RegressionRouter
from consilium.methods.routing import SuperModel
from consilium.methods.selector import Models
from consilium.prediction import open_predictor
from consilium.run_folder import RunFolder
from consilium.site import Round
from consilium.task import CaseScore
from consilium.weights import Weights
from tests.learning.small import Line, batch, line, site, value
from tests.toy import toy_study

SELECT = Round(2, "selector", 0, 1)


class Seen(Line):
    """An image is one number, and so is its feature; a model multiplies it by its weight."""

    def infer(self, weights: Weights, images: Any, kind: str = "model", labels: Any = None) -> torch.Tensor:
        return images @ weights["weight"].T

    def features(self, weights: Weights, images: torch.Tensor) -> torch.Tensor:
        return images.double()


def test_the_studys_rounds_are_split_two_to_one() -> None:
    models, selector = FedSMExtra().phases(150)
    assert [(p.name, p.rounds, p.from_best) for p in (models, selector)] == [
        ("models", 100, False),
        ("selector", 50, True),
    ]
    assert FedSMExtra(selector_rounds=3).phases(10)[0].rounds == 7
    with pytest.raises(StudyError, match="leaves no round"):
        FedSMExtra(selector_rounds=10).phases(10)


def test_a_target_is_the_model_with_the_least_loss_and_ties_go_to_the_global_one() -> None:
    """Models y = 1x, 2x, 3x. Truth 2 at x = 1: the second is right. Truth 1.5: the first two tie."""
    models = Models(line(1.0), {"ada": line(2.0), "bea": line(3.0)})
    here = site(batch([1.0], [2.0]), batch([2.0], [6.0]), batch([3.0], [4.5]))
    assert FedSMExtra().targets(here, models) == {"case1.0": 1, "case2.0": 2, "case3.0": 0}


def test_models_are_sent_once_to_whoever_has_not_confirmed() -> None:
    method = FedSMExtra()
    server = FedSMExtra.Server(line(1.0), {"ada": line(2.0)}, line(0.0), False, None, ("bea",), {"ada": 1, "bea": 1})
    cards = site(batch([1.0], [0.0]), roster=("ada", "bea")).roster
    assert method.send(server, cards["ada"], SELECT).models is not None
    assert method.send(server, cards["bea"], SELECT).models is None
    assert method.send(server, cards["ada"], SELECT).global_ is None


def test_a_site_keeps_the_models_and_its_targets() -> None:
    method = FedSMExtra()
    here = site(batch([1.0], [2.0]), roster=("ada", "bea"))
    models = Models(line(1.0), {"ada": line(2.0), "bea": line(3.0)})
    selector = here.task.initial("selector", labels=[GLOBAL, "ada", "bea"])
    got = FedSMExtra.Downlink(None, None, models, selector, None)
    uplink, memory = method.train(here, method.remember(here), got, SELECT)
    assert uplink.holds
    assert memory.targets == {"case1.0": 1}
    again, _ = method.train(here, memory, FedSMExtra.Downlink(None, None, None, selector, None), SELECT)
    assert torch.equal(again.selector["weight"], uplink.selector["weight"])


def test_the_first_phase_keeps_each_model_at_its_best_and_the_second_the_best_super_model() -> None:
    method = FedSMExtra()

    def state(w: float, routes: bool, round: int, **marks: float) -> Best:
        server = FedSMExtra.Server(line(w), {"ada": line(w)}, line(w), routes, None, (), {"ada": 1})
        return Best(server, {key.replace("_", "/", 1): Valid(v, round) for key, v in marks.items()})

    first = state(1.0, False, 1, personal_ada=0.9, other=0.1)
    second = state(2.0, False, 2, personal_ada=0.8, other=0.2)
    kept = method.keep(first, second)
    assert value(kept.server.personal["ada"]) == 1.0
    assert kept.valid["personal/ada"].round == 1
    selecting = method.keep(kept, state(3.0, True, 3, super=0.5))
    assert value(selecting.server.selector) == 3.0
    assert method.keep(selecting, state(4.0, True, 4, super=0.4)) is selecting


def test_an_ensemble_averages_probabilities(federation: Path) -> None:
    """Two models with probabilities .9 and .5 at shares .25 and .75: .25·.9 + .75·.5 = .6."""
    task = toy_study(federation).task
    logits = [torch.tensor([[0.0, p]]).log_softmax(1).reshape(1, 2, 1, 1) for p in (2.1972246, 0.0)]
    blended = task.blend(logits, torch.tensor([[0.25, 0.75]]))
    assert blended.softmax(1)[0, 1].item() == pytest.approx(0.25 * 0.9 + 0.75 * 0.5, abs=1e-5)


@pytest.mark.parametrize(("name", "model"), [("fedsm-extra", "super"), ("fedsm-ensemble", "ensemble")])
def test_a_late_site_still_gets_the_models(name: str, model: str, federation: Path, tmp_path: Path) -> None:
    """cid is away in the first selector round and joins in the second; bytes down show who got the models when."""
    study = toy_study(
        federation, name, study__rounds=4, method__selector_rounds=2, study__away={"cid": [3]}, study__score_every=4
    )
    result = simulation.run(study, tmp_path, workers=0)
    down: dict[Any, int] = {
        (e["round"], e["site"]): e["bytes_down"]
        for e in RunFolder.open(result.folder).events()
        if e["event"] == "train"
    }
    assert down[3, "ada"] > 3 * down[4, "ada"]
    assert down[4, "cid"] == pytest.approx(down[3, "ada"], rel=0.02)
    assert result.summary["headline"]["model"] == model


def test_wrong_fields_and_a_lone_site_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [
        {"pull": 0.0}, {"selector_rounds": -1}, {"selector_lr": 0.0},
        {"selector_training": "x"}, {"route": "case"},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(StudyError, match=rf"\[method\] {next(iter(wrong))} = "):
            FedSMExtra(**wrong)
    alone = site(batch([1.0], [0.0]))
    with pytest.raises(StudyError, match="two sites"):
        FedSMEnsemble().check(alone.task, alone.roster, alone.local)


def test_the_selector_trains_as_fedsms_does() -> None:
    """Synchronised sends a gradient, "paper" steps on every batch, "moments" steps once and sends moments."""
    here = site(batch([1.0], [2.0]), batch([2.0], [4.0]), roster=("ada", "bea"))
    models = Models(line(1.0), {"ada": line(2.0), "bea": line(3.0)})
    selector = here.task.initial("selector", labels=[GLOBAL, "ada", "bea"])
    sent = {}
    for training in ("synchronised", "paper", "moments"):
        method = FedSMExtra(selector_training=training, selector_lr=0.1)
        got = FedSMExtra.Downlink(None, None, models, selector, None)
        sent[training], _ = method.train(here, method.remember(here), got, SELECT)
        server = FedSMExtra.Server(line(0.0), {}, selector, True, None, (), {"ada": 1, "bea": 1})
        merged = method.merge(server, {"ada": sent[training]}, SELECT)
        assert not torch.equal(merged.selector["weight"], selector["weight"])
        assert (merged.selector_state is None) == (training == "paper")
    one_step = (sent["moments"].selector["weight"] - selector["weight"]).abs()
    assert one_step[sent["synchronised"].selector["weight"].abs() > 1e-4].mean() == pytest.approx(0.1, rel=1e-3)
    assert (sent["moments"].selector_state.step, sent["moments"].steps, sent["paper"].steps) == (1, 0, 2)
    assert [reply.selector_state is None for reply in sent.values()] == [True, True, False]


def test_slices_or_volumes_are_weighed_by_both() -> None:
    """Two slices the selector sees differently: one decision for the volume, or one each."""
    task = site(batch([1.0], [0.0]), roster=("ada", "bea")).task
    selector = task.initial("selector", labels=[GLOBAL, "ada", "bea"])
    images = torch.tensor([[1.0], [-3.0]])
    for kind in (FedSMExtra, FedSMEnsemble):
        released = kind.Release(line(1.0), {"ada": line(2.0), "bea": line(3.0)}, selector, "ada")
        chances = {}
        for route in ("volume", "slice"):
            choices = kind(route=route).deploy(task, None, released).answer(images, volume=True).choices
            chances[route] = [tuple(choice.chances.values()) for choice in choices]
        assert chances["volume"][0] == chances["volume"][1]
        assert chances["slice"][0] != chances["slice"][1]


def test_the_models_phase_is_scored_by_the_models_it_has(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm-extra", study__rounds=2, method__selector_rounds=1, study__score_every=1)
    lines: list[str] = []
    board = _RunStatus()
    result = simulation.run(study, tmp_path, workers=0, watch=lambda event: lines.append(board.take(event)))
    scored = [event for event in RunFolder.open(result.folder).events() if event["event"] == "score"][:2]
    assert [(event["phase"], event["model"]) for event in scored] == [("models", "global"), ("selector", "super")]
    said = [line for line in lines if "round 1/2" in line]
    assert len(said) == 1 and "validation dice 0." in said[0] and "of the global model" in said[0]


# ------------------------------------------------------------------------------------------------ in closed form

closed = partial(FedSMExtra, selector_training="regression")


def test_a_regression_takes_two_exchanges_and_no_rounds() -> None:
    assert [(p.name, p.rounds, p.counts, p.from_best) for p in closed().phases(9)] == [
        ("models", 9, True, False), ("losses", 1, False, True), ("strength", 1, False, False),
    ]  # fmt: skip
    with pytest.raises(StudyError, match="selector_rounds = 3: a regression needs no rounds"):
        closed(selector_rounds=3)
    with pytest.raises(StudyError, match="selector_training = 'regression'"):
        FedSMEnsemble(selector_training="regression")


def test_a_run_in_closed_form_routes_and_no_selector_travels(federation: Path, tmp_path: Path) -> None:
    """cid is away when losses are taken: it gets the models with the next exchange, and its own model can be chosen."""
    changes = {"method__selector_training": "regression", "study__away": {"cid": ["losses"]}}
    result = simulation.run(toy_study(federation, "fedsm-extra", **changes), tmp_path, workers=0)
    sent = [event for event in RunFolder.open(result.folder).events() if event["event"] == "train"]
    assert [(e["phase"], e["site"]) for e in sent if e["phase"] != "models"] == [
        ("losses", "ada"), ("losses", "bea"), ("strength", "ada"), ("strength", "bea"), ("strength", "cid"),
    ]  # fmt: skip
    down = {e["site"]: e["bytes_down"] for e in sent if e["phase"] == "strength"}
    assert down["cid"] > 1.5 * down["ada"]
    server = packet_files.load(result.folder / "best.safetensors", FedSMExtra.Server)
    assert server.selector is None and server.regression.strength in STRENGTHS
    assert server.regression.sums.n == 8 + 12
    assert result.summary["headline"]["model"] == "super"
    assert "site_mean" in result.summary["headline"]
    _, predictor = open_predictor(result.folder)
    (choice, *_) = predictor.answer(torch.rand((2, 1, 16, 16))).choices
    assert list(choice.chances) == [GLOBAL, "ada", "bea", "cid"]


def test_it_chooses_the_model_whose_expected_loss_is_least() -> None:
    """Features are the image x itself; losses at x: 1 for the global model, x for ada's. Below 1 ada's is better."""
    x = torch.linspace(0, 2, 21, dtype=torch.float64)[:, None]
    found = replace(regression([sums_of(torch.cat([x, torch.ones_like(x), x], 1))], 2), strength=1e-9)
    router = RegressionRouter(Seen(), line(1.0), found, [GLOBAL, "ada"])
    model = SuperModel(Seen(), line(10.0), {"ada": line(1.0)}, router, 0.0, "ada")
    near, far = model.answer(torch.tensor([[0.9], [1.1]])).choices
    assert (near.of, near.why) == ("ada", "the model of ada is expected to have the least loss")
    assert (far.of, far.why.partition(" (")[0]) == ("", "the selector chose the global model")
    assert [c.of for c in model.answer(torch.tensor([[0.2], [1.2]]), volume=True).choices] == ["ada", "ada"]


class ByVolumes(Seen):
    """The same, and volumes decide."""

    decides = "volume"

    def score(self, output: torch.Tensor, truth: torch.Tensor, full: bool, *_: Any, **__: Any) -> list[CaseScore]:
        return [CaseScore("y", "error", float(output.mean()))]


@pytest.mark.parametrize(("by_volume", "expected"), [(True, 0.7), (False, (0.2 + 12.0) / 2)])
def test_a_strength_is_judged_by_what_decides_however_slices_are_routed(by_volume: bool, expected: float) -> None:
    """Slices at .2 and 1.2, ada's model w = 1 below 1, else the global model w = 10; a volume's score is their mean."""
    x = torch.linspace(0, 2, 21, dtype=torch.float64)[:, None]
    forecast = LossForecast(regression([sums_of(torch.cat([x, torch.ones_like(x), x], 1))], 2))
    here = replace(site(replace(batch([0.2, 1.2], [0.0, 0.0]), volume="scan")), task=ByVolumes())
    models = Models(line(10.0), {"ada": line(1.0)})
    scores, cases = scores_by_strength(here, models, forecast, by_volume)
    assert (scores[0], cases) == (pytest.approx(expected), 1)
    _, cases = scores_by_strength(replace(here, task=Seen()), models, forecast, by_volume)
    assert cases == 2


def test_runs_of_before_are_read(tmp_path: Path) -> None:
    server = FedSMExtra.Server(line(1.0), {"ada": line(2.0)}, line(3.0), True, None, (), {"ada": 1})
    packet = tree.flatten(server)
    old = packet.header.replace(r",\"regression\":null", "").replace(r"\"regression\":null,", "")
    assert old != packet.header
    packet_files.write(tree.Packet(old, packet.tensors), tmp_path / "old.safetensors")
    assert packet_files.load(tmp_path / "old.safetensors", FedSMExtra.Server).regression is None
