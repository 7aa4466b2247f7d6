"""A suite with real training on the toy federation, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from consilium import simulation
from consilium.cli import suites
from consilium.contract import Interrupted, crash_after, run_in_process, state
from consilium.errors import WorkError
from consilium.suites import load_suite, run_suite
from consilium.suites.planning import Planned, folder_of, rows, study_of
from tests.suites.bench import Teller, write_suite

HEAD = 'methods = ["local", "fedavg"]\nseeds = [0, 1]'


def command() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    suites.add_to(app)
    return app


def test_an_interrupted_run_goes_on_and_equals_an_uninterrupted_one(tmp_path: Path, federation: Path) -> None:
    path = write_suite(tmp_path, federation, 'methods = ["fedavg"]')
    suite, runs, teller = load_suite(path), tmp_path / "runs", Teller()
    study = study_of(suite, Planned(rows(suite)[0], {}, 0))
    with pytest.raises(Interrupted):
        run_in_process(study, runs, crash_after("round", 1))
    run_suite(path, runs, workers=0, watch=teller)
    assert teller.words == ["run 1 of 1: FedAvg, seed 0 (going on)"]
    events = [json.loads(line)["event"] for line in (folder_of(study, runs) / "journal.jsonl").read_text().splitlines()]
    assert events.count("start") == events.count("resume") == 1
    whole = run_in_process(study, tmp_path / "whole")
    assert state(whole) == (folder_of(study, runs) / "last.safetensors").read_bytes()


def test_the_command_runs_skips_and_prints_the_table(tmp_path: Path, federation: Path) -> None:
    paper = '[paper]\ncaption = "Table 3"\ncolumns = ["ada"]\nrows = {Theirs = [0.25]}'
    path, runs = write_suite(tmp_path, federation, HEAD, paper), tmp_path / "runs"
    arguments = ["suite", str(path), "--runs", str(runs), "--workers", "0"]
    first = CliRunner().invoke(command(), arguments)
    assert first.exit_code == 0, first.output
    assert "run 4 of 4: FedAvg, seed 1" in first.stderr
    assert "Local (own site)" in first.stdout and "ada local" in first.stdout
    assert "Table 3: the paper's figures (their data, their machines)" in first.stdout
    listed = CliRunner().invoke(command(), [*arguments, "--dry-run"])
    assert listed.stdout.count("done") == 4
    more = CliRunner().invoke(command(), [*arguments, "--seed", "1", "--seed", "2", "--dry-run"])
    assert (more.stdout.count("done"), more.stdout.count("to do")) == (2, 2)
    again = CliRunner().invoke(command(), [*arguments, "--json"])
    document = json.loads(again.stdout)
    assert (document["failed"], again.stderr) == ([], "")
    lines = {line["name"]: line for line in document["tables"][0]["lines"]}
    names = [name for name in lines if name.endswith("local")]
    assert names == ["ada local", "bea local", "cid local"]
    own = lines["Local (own site)"]["sites"]
    assert own["bea"] == lines["bea local"]["sites"]["bea"]  # a site's own model is the same in both rows
    assert lines["FedAvg"]["difference"] is None
    assert lines["Local (own site)"]["difference"]["by_seed"].keys() == {"0", "1"}


def test_a_failed_run_is_said_and_the_exit_is_a_failure(tmp_path: Path, federation: Path) -> None:
    """SCAFFOLD refuses Adam when its run starts; FedAvg is trained all the same."""
    path = write_suite(tmp_path, federation, 'methods = ["scaffold", "fedavg"]')
    done = CliRunner().invoke(command(), ["suite", str(path), "--runs", str(tmp_path / "runs"), "--workers", "0"])
    assert isinstance(done.exception, WorkError)  # main turns it into exit status 1
    assert "One run of the suite failed" in str(done.exception)
    assert "SCAFFOLD, seed 0" in str(done.exception) and "plain SGD" in str(done.exception)
    assert "FedAvg" in done.stdout


@pytest.mark.xdist_group("pool")
def test_a_shared_pool_forgets_finished_runs(tmp_path: Path, federation: Path, pool: object) -> None:
    """Worker processes hold no more open files after a pool's second run than after its first."""

    def open_files() -> int:
        return sum(len(list(Path(f"/proc/{process.pid}/fd").iterdir())) for process in pool.processes)  # type: ignore[attr-defined]

    path = write_suite(tmp_path, federation, 'methods = ["fedavg"]\nseeds = [0, 1]')
    suite, seen = load_suite(path), []
    for seed in (0, 1):
        study = study_of(suite, Planned(rows(suite)[0], {}, seed))
        simulation.run(study, tmp_path / "runs", pool=pool)  # type: ignore[arg-type]
        seen.append(open_files())
    assert seen[1] <= seen[0], seen
