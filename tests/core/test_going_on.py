"""Going on with a run: only with the sites, cases and memories it began with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from consilium import engine, simulation, site_opening
from consilium.contract import Interrupted, crash_after, run_in_process
from consilium.engine import scoring
from consilium.errors import RunError, StudyError
from consilium.method import Best, Valid
from consilium.methods.fedsm import FedSM
from consilium.methods.local import LocalTraining
from consilium.prediction import open_predictor
from consilium.run_files.states import States
from consilium.run_folder import RunFolder
from consilium.site import Round
from consilium.weights import SiteName
from consilium.wires.in_process import InProcess
from tests.learning.small import line, value
from tests.toy import toy_study


@pytest.fixture
def own(federation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(federation, tmp_path / "own"))


def stopped(study: Any, runs: Path) -> Path:
    with pytest.raises(Interrupted):
        run_in_process(study, runs, crash_after("round", 1))
    (folder,) = runs.iterdir()
    return folder


def test_a_stop_right_after_the_first_commit_can_be_resumed(federation: Path, tmp_path: Path) -> None:
    """The round is committed before its event is written: the journal has a start, but no round."""
    folder = stopped(toy_study(federation), tmp_path / "runs")
    journal = folder / "journal.jsonl"
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if '"round", ' not in line))
    assert simulation.resume(folder, workers=0).summary["headline"]["site_mean"] > 0


class Eager(InProcess):
    """Sites have trained a round as soon as its orders are out."""

    def ask(self, requests: Mapping[SiteName, Any]) -> Iterator[tuple[SiteName, Any]]:
        return iter(list(super().ask(requests)))


@pytest.mark.parametrize("method", ["scaffold", "apple"])
def test_a_round_that_was_never_written_is_made_again(
    method: str, federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites train on while the server writes a round; if it dies then, they still remember the round before."""
    study = toy_study(federation, method, study__rounds=3, study__score_every=3, local__batch_size=4)
    calm = run_in_process(study, tmp_path / "calm")
    commit = States.commit

    def dies(states: States, round: Round, *state: Any, **more: Any) -> Any:
        if round.index == 1:
            raise Interrupted
        return commit(states, round, *state, **more)

    folder = RunFolder.create(study, tmp_path / "runs")
    monkeypatch.setattr(States, "commit", dies)
    with pytest.raises(Interrupted):
        engine.run(study, Eager(study, folder.path), folder)
    monkeypatch.undo()
    assert {event["round"] for event in folder.events() if event["event"] == "train"} == {1, 2}
    simulation.resume(folder.path, workers=0)
    for file in ("last.safetensors", "best.safetensors", "scores.csv"):
        assert (folder.path / file).read_bytes() == (calm.folder / file).read_bytes(), file


def test_what_a_killed_process_was_writing_is_swept(federation: Path, tmp_path: Path) -> None:
    folder = stopped(toy_study(federation, "scaffold"), tmp_path / "runs")
    places = ("store", "server", "sites/ada/memory")
    drafts = [folder / place / f".{name}.4711" for place in places for name in ("0123abcd.safetensors", "00001.json")]
    for draft in drafts:
        draft.write_bytes(b"half a model")
    kept = folder / "store/.gitkeep"
    kept.touch()
    simulation.resume(folder, workers=0)
    assert not [path for path in drafts if path.exists()]
    assert kept.exists()


def test_changed_cases_are_refused(own: Path, tmp_path: Path) -> None:
    folder = stopped(toy_study(own), tmp_path / "runs")
    table = own / "ada/cases.csv"
    swapped = table.read_text().replace(",train,", ",x,").replace(",test,", ",train,").replace(",x,", ",test,")
    table.write_text(swapped)
    with pytest.raises(RunError, match="'ada' has other cases"):
        simulation.resume(folder, workers=0)


def test_a_newer_version_goes_on(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stopped(toy_study(federation), tmp_path / "runs")
    monkeypatch.setattr(site_opening, "__version__", "99.0")
    assert simulation.resume(folder, workers=0).summary["headline"]["site_mean"] > 0


def test_another_site_is_refused(own: Path, tmp_path: Path) -> None:
    folder = stopped(toy_study(own), tmp_path / "runs")
    shutil.copytree(own / "cid", own / "dan")
    toml = own / "dan/site.toml"
    toml.write_text(toml.read_text().replace("cid", "dan"))
    with pytest.raises(RunError, match="'dan'"):
        simulation.resume(folder, workers=0)


def test_a_refused_study_leaves_no_folder(federation: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError):
        simulation.run(toy_study(federation, study__min_sites=9), tmp_path / "runs", workers=0)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_site_without_validation_cases_keeps_its_latest_model() -> None:
    def state(w: float, round: int) -> Best:
        server = LocalTraining.Server({"ada": line(w), "bea": line(w)})
        return Best(server, {"local/ada": Valid(1.0 / round, round)})

    kept = LocalTraining().keep(state(1.0, 1), state(2.0, 2)).server.local
    assert {name: value(weights) for name, weights in kept.items()} == {"ada": 1.0, "bea": 2.0}
    server = FedSM.Server(line(1.0), {"ada": line(1.0)}, line(1.0), None, None, 0.0, {"ada": 1})
    later = FedSM.Server(line(2.0), {"ada": line(2.0)}, line(2.0), None, None, 0.0, {"ada": 1})
    assert value(FedSM().keep(Best(server, {}), Best(later, {})).server.personal["ada"]) == 2.0


def test_everyone_adapts_though_few_are_drawn(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedavg-finetune", study__sites_per_round=1)
    folder = RunFolder.open(simulation.run(study, tmp_path, workers=0).folder)
    adapted = {row.site for row in folder.rows() if row.phase == "best" and row.when == "adapted"}
    assert adapted == {"ada", "bea", "cid"}


@pytest.mark.parametrize(
    ("method", "fields"),
    [("fedavg-finetune", {}), pytest.param("fedsm", {"method__best": "joint"}, marks=pytest.mark.slow)],
)
def test_the_last_rounds_memories_outlive_a_phase_that_starts_from_the_best(
    method: str, fields: dict[str, Any], federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adaptation goes on from the best round's memory; the last round's is still wanted for its scores."""
    valid = scoring._valid

    def falling(run: Any, rows: Any, round: Round) -> dict[str, Valid]:
        return {key: Valid(1.0 / round.number, round.number) for key in valid(run, rows, round)}

    monkeypatch.setattr(scoring, "_valid", falling)
    study = toy_study(federation, method, study__rounds=3, study__score_every=1, local__batch_size=4, **fields)
    calm = run_in_process(study, tmp_path / "calm")
    assert (calm.summary["best"]["round"], calm.summary["last"]["round"]) == (1, 3)
    with pytest.raises(Interrupted):
        run_in_process(study, tmp_path / "runs", crash_after("round", 4))
    (folder,) = (tmp_path / "runs").iterdir()
    simulation.resume(folder, workers=0)
    assert (folder / "scores.csv").read_bytes() == (calm.folder / "scores.csv").read_bytes()


def test_the_last_state_has_its_own_memories(federation: Path, tmp_path: Path) -> None:
    """Adaptation belongs to the best state; the last one is scored as it was when the rounds ended."""
    folder = RunFolder.open(simulation.run(toy_study(federation, "fedavg-finetune"), tmp_path, workers=0).folder)
    when = {
        phase: {row.when for row in folder.rows() if (row.phase, row.model) == (phase, "personal")}
        for phase in ("best", "last")
    }
    assert when == {"best": {"adapted"}, "last": {"merged"}}


@pytest.mark.parametrize("name", ["apfl", "pfedme"])
def test_a_personal_model_that_never_left_can_be_used(name: str, federation: Path, tmp_path: Path) -> None:
    result = simulation.run(toy_study(federation, name), tmp_path, workers=0)
    _, predictor = open_predictor(result.folder, "bea")
    assert (predictor.model, predictor.of) == ("personal", "bea")
    assert open_predictor(result.folder)[1].model == "global"


def test_labels_a_site_does_not_annotate_are_not_scored(own: Path, tmp_path: Path) -> None:
    toml = own / "federation.toml"
    toml.write_text(toml.read_text().replace('labels = ["blob"]', 'labels = ["blob", "ring"]'))
    study = toy_study(own, data__annotated={"ada": ["ring"]})
    rows = RunFolder.open(simulation.run(study, tmp_path / "runs", workers=0).folder).rows()
    assert {row.label for row in rows if row.site == "ada"} == {"ring"}
    assert {row.label for row in rows if row.site == "bea"} == {"blob", "ring"}
