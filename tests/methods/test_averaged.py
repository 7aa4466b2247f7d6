"""Averaging over rounds on the server: by hand, and never sent back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import packet_files, simulation
from consilium.contract import Interrupted, crash_after, run_in_process, state
from consilium.errors import StudyError
from consilium.method import Method
from consilium.methods.averaged import Averaged, Release, check_averaging
from consilium.methods.fedavg import FedAvg
from consilium.methods.fedsm import FedSM
from consilium.methods.fedsm_extra import FedSMExtra
from consilium.methods.menu_net import MENUNet
from consilium.methods.scaffold import Scaffold
from consilium.run_folder import RunFolder
from consilium.site import Round, SiteCard
from consilium.validation import check_settings
from consilium.weights import Weights
from tests.learning.small import Line, line, value
from tests.toy import toy_study

ROSTER = {"ada": SiteCard("ada", 0, 1, ("y",))}


def after(rounds: int, since: float, cycle: int, method: Averaged | None = None) -> Any:
    """The server after rounds whose models are 1, 2, 3, …"""
    method = method or Averaged(FedAvg(), Release(since, cycle))
    server = method.start(Line(), ROSTER)
    for step in range(rounds):
        reply = {"ada": FedAvg.Uplink(line(step + 1.0), 0.0, 1)}
        server = method.merge(server, reply, Round(step, "train", step, 10))
    return server


@pytest.mark.parametrize(
    ("since", "cycle", "taken"),
    [(0.5, 1, [6, 7, 8, 9, 10]), (0.5, 2, [6, 8, 10]), (0.75, 2, [8, 10]), (0.79, 4, [10]), (0.1, 3, [4, 7, 10])],
)
def test_the_mean_of_every_cycle_th_round_by_hand(since: float, cycle: int, taken: list[int]) -> None:
    method = Averaged(FedAvg(), Release(since, cycle))
    server = after(10, since, cycle, method)
    assert server.n == len(taken)
    assert value(method.release(server, None).global_) == pytest.approx(sum(taken) / len(taken))


def test_what_is_sent_to_train_is_never_the_mean() -> None:
    method = Averaged(FedAvg(), Release(0.5, 1))
    server = after(9, 0.5, 1, method)
    sent = method.send(server, ROSTER["ada"], Round(9, "train", 9, 10))
    assert sent is not None
    assert (value(sent.global_), value(method.release(server, None).global_)) == (9.0, pytest.approx(7.5))


def test_before_averaging_begins_the_release_is_the_rounds_own() -> None:
    method = Averaged(FedAvg(), Release(0.5, 1))
    assert value(method.release(after(5, 0.5, 1, method), None).global_) == 5.0


def test_methods_without_one_shared_model_are_refused() -> None:
    for method in (FedSM(), FedSMExtra()):
        with pytest.raises(StudyError, match="swa_from"):
            check_averaging(method)


def test_all_else_is_the_methods_own() -> None:
    """What the method says of itself, and every function but `keep`, which judges the mean."""
    told = {name for name, kind in Method.__annotations__.items() if "ClassVar" in kind}
    done = {name for name in vars(Method) if not name.startswith("_") and callable(getattr(Method, name))} - {"Memory"}
    assert done - {"remembers"} - vars(Averaged).keys() == {"keep"}
    for inner in (FedAvg(), Scaffold(), MENUNet()):
        outer = Averaged(inner, Release(0.5, 1))
        for name in told - {"Server"}:
            assert getattr(outer, name) == getattr(inner, name), name
        assert outer.not_private() == inner.not_private()


def test_updates_are_measured_as_without_averaging(federation: Path) -> None:
    study = toy_study(federation, "menu-net", release__swa_from=0.5)
    method: Any = study.method
    roster = {"ada": SiteCard("ada", 0, 1, study.task.labels)}
    server, round = method.start(study.task, roster), Round(0, "train", 0, 3)
    sent = method.send(server, roster["ada"], round)
    assert method.started_from(server, roster["ada"], sent).keys() == {"decoder", "encoders/blob"}


def test_patients_are_protected_as_without_averaging(federation: Path) -> None:
    study = toy_study(federation, release__swa_from=0.5, privacy__unit="patient", privacy__noise=1.0, privacy__clip=1.0)
    check_settings(study)


def models(result: simulation.Result) -> tuple[Weights, Weights]:
    """The last round's own model, and what is released."""
    method = RunFolder.open(result.folder).study.method
    server = packet_files.load(result.folder / "last.safetensors", method.Server)
    return (server.now if isinstance(method, Averaged) else server).global_, method.release(server, None).global_


@pytest.fixture(scope="module")
def both(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[float, simulation.Result]:
    place = tmp_path_factory.mktemp("averaged")
    return {
        since: run_in_process(toy_study(federation, release__swa_from=since, release__swa_cycle=1), place)
        for since in (0.0, 0.3)
    }


def test_training_goes_on_as_without_averaging(both: Mapping[float, simulation.Result]) -> None:
    (plain, shown), (own, mean) = (models(both[since]) for since in (0.0, 0.3))
    assert plain.digest == shown.digest == own.digest
    assert mean.digest != own.digest
    assert not all(torch.equal(mean[name], own[name]) for name in mean)


def test_scores_are_those_of_the_mean(both: Mapping[float, simulation.Result]) -> None:
    plain, averaged = (RunFolder.open(both[since].folder).rows() for since in (0.0, 0.3))
    assert [row.value for row in plain if row.round == 3] != [row.value for row in averaged if row.round == 3]
    assert {row.model for row in averaged} == {"global"}


def test_resume_is_the_uninterrupted_run(
    federation: Path, tmp_path: Path, both: Mapping[float, simulation.Result]
) -> None:
    with pytest.raises(Interrupted):
        run_in_process(
            toy_study(federation, release__swa_from=0.3, release__swa_cycle=1), tmp_path, crash_after("train", 3)
        )
    (path,) = tmp_path.iterdir()
    assert state(simulation.resume(path, workers=0)) == state(both[0.3])


def test_a_study_without_averaging_keeps_its_hash(federation: Path) -> None:
    plain, written = toy_study(federation), toy_study(federation, release__swa_from=0.0)
    assert plain.hash == written.hash != toy_study(federation, release__swa_from=0.5).hash
    assert "release" not in plain.tables()
