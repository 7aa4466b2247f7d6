"""Runs in the tools people use: what they get, and that they cannot change or end a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import consilium.tracking
from consilium.contract import run_in_process, state
from consilium.errors import RunStopped, StudyError, WorkError
from consilium.run_folder import RunFolder
from consilium.simulation import Result
from consilium.tracking import Ending, figures_of, tracked
from tests.toy import toy_study

pytestmark = pytest.mark.xdist_group("tracking")


@pytest.fixture(scope="module")
def plain(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run without trackers."""
    return run_in_process(toy_study(federation, study__rounds=2), tmp_path_factory.mktemp("plain"))


def expected(result: Result) -> dict[str, list[tuple[int, float]]]:
    """What every tracker must hold of a run, from its journal."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in RunFolder.open(result.folder).events():
        for name, value in figures_of(event).items():
            found.setdefault(name, []).append((event["round"], value))
    return found


def test_figures_of_events() -> None:
    train = {"event": "train", "phase": "train", "round": 3, "site": "ada", "loss": 0.5, "bytes_up": 10, "seconds": 2.0}
    assert figures_of(train) == {"loss/ada": 0.5, "seconds/ada": 2.0, "bytes_up/ada": 10.0}
    both = {"valid": {"site_mean": 0.4, "sites": {"ada": 0.5}}, "test": {"site_mean": 0.9, "sites": {}}}
    score = {"event": "score", "phase": "train", "round": 3, "model": "global", "metric": "dice", **both}
    told = {"valid/global/dice/site_mean": 0.4, "valid/global/dice/ada": 0.5}
    assert figures_of(score) == told  # no test score while it trains
    ended = {f"best/{name}": value for name, value in told.items()}
    assert figures_of({**score, "phase": "best"}) == {**ended, "best/test/global/dice/site_mean": 0.9}
    assert figures_of({**train, "phase": "teacher", "loss": None, "bytes_up": None}) == {"teacher/seconds/ada": 2.0}
    assert figures_of({"event": "warning", "text": "x"}) == {}


def test_tensorboard_holds_the_journals_figures(federation: Path, tmp_path: Path, plain: Result) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of tensorboard's own imports
        study = toy_study(federation, study__rounds=2, study__track=["tensorboard"])
        result = run_in_process(study, tmp_path)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    found = {name: [(e.step, e.value) for e in board.Scalars(name)] for name in board.Tags()["scalars"]}
    told = expected(result)
    assert found.keys() == told.keys()
    for name, points in told.items():
        assert [step for step, _ in found[name]] == [round for round, _ in points]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points])
    assert result.folder.name == plain.folder.name  # who looks on changes neither the study's hash
    assert state(result) == state(plain)  # nor a bit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_holds_the_journals_figures_and_a_resumed_run_goes_on(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'consilium[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    study = toy_study(federation, study__rounds=2, study__track=["mlflow"])
    result = run_in_process(study, tmp_path)
    assert "INFO mlflow" not in capfd.readouterr().err
    from mlflow.tracking import MlflowClient

    from consilium.tracking.mlflow import open_tracker

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("consilium").experiment_id])
    told = expected(result)
    assert run.data.metrics.keys() == told.keys()
    for name, points in told.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [m.step for m in history] == [round for round, _ in points]
        assert [m.value for m in history] == pytest.approx([value for _, value in points])
    assert run.data.params["method.name"] == "fedavg"
    assert run.info.status == "FINISHED"
    for how, status in (("interrupted", "KILLED"), ("failed", "FAILED"), ("finished", "FINISHED")):
        again = open_tracker(result.folder)
        again.settings(study.tables())
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
        again.close(how)
        assert client.get_run(run.info.run_id).info.status == status
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # W&B's own
def test_wandb_stays_offline(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'consilium[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    result = run_in_process(toy_study(federation, study__rounds=1, study__track=["wandb"]), tmp_path)
    (folder,) = (result.folder / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


class Failing:
    """A tool whose server has gone."""

    def settings(self, study: Mapping[str, Any]) -> None: ...

    def figures(self, values: Mapping[str, float], round: int) -> None:
        raise ConnectionError("the server has gone")

    def note(self, name: str, text: str, round: int) -> None: ...

    def close(self, how: Ending) -> None: ...


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "interrupted"),  # as Ctrl-C, which is no Exception either
        (RunStopped("by the administrator"), "interrupted"),
        (WorkError("a full disk"), "failed"),
    ],
)
def test_a_tool_is_told_how_a_run_ended(
    error: BaseException | None, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Module(Failing):
        def close(self, how: Ending) -> None:
            told.append(how)

        @classmethod
        def open_tracker(cls, folder: Path) -> Module:
            return cls()

    monkeypatch.setattr(consilium.tracking, "import_module", lambda name: Module)
    with pytest.raises(type(error)) if error else nullcontext(), tracked(["tensorboard"], tmp_path, {}, print):
        if error:
            raise error
    assert told == [how]


def test_a_tool_that_fails_ends_no_run(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Result
) -> None:
    class Module:
        @staticmethod
        def open_tracker(folder: Path) -> Failing:
            return Failing()

    monkeypatch.setattr(consilium.tracking, "import_module", lambda name: Module)
    result = run_in_process(toy_study(federation, study__rounds=2, study__track=["tensorboard"]), tmp_path)
    assert state(result) == state(plain)
    texts = [event["text"] for event in RunFolder.open(result.folder).events() if event["event"] == "warning"]
    assert texts == ["tensorboard failed and is not told any more: ConnectionError: the server has gone"]


def test_a_tool_that_cannot_be_opened_ends_no_run(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Result
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry'")

    monkeypatch.setattr(consilium.tracking, "import_module", absent)
    result = run_in_process(toy_study(federation, study__rounds=2, study__track=["tensorboard"]), tmp_path)
    assert state(result) == state(plain)
    events = RunFolder.open(result.folder).events()
    assert events[0]["event"] == "start"  # a journal that begins otherwise would be that of a run
    why = "tensorboard cannot be opened and is left out: ModuleNotFoundError: No module named 'opentelemetry'"
    assert [event["text"] for event in events if event["event"] == "warning"] == [why]


def test_unknown_and_missing_tools_are_said(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StudyError, match="there is no 'tensorbord'; choose from tensorboard, mlflow, wandb"):
        toy_study(federation, study__track=["tensorbord"])
    monkeypatch.setattr(consilium.tracking, "find_spec", lambda name: None)
    with pytest.raises(StudyError, match=r"pip install 'consilium\[mlflow\]'"):
        run_in_process(toy_study(federation, study__track=["mlflow"]), tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
