"""A run that ends without a site says so everywhere, and asks the site again when it is back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from consilium import engine, simulation
from consilium.federation.admin import for_federation
from consilium.federation.server_job import lacking
from consilium.hospital import Hospital
from consilium.messages import Request
from consilium.reports.comparing import compare
from consilium.reports.page import write_page
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.scores.summary import unscored
from consilium.wires.flare import FlareAnswer, FlareWire
from tests.federation.test_service_and_wire import Direct, deploy
from tests.toy import SIZES, toy_study


@pytest.fixture
def hospitals(federation: Path, tmp_path: Path) -> dict[str, Hospital]:
    return {
        name: Hospital(name, str(federation / name), str(tmp_path / "hospitals" / name), ("blob",), "cpu")
        for name in SIZES
    }


def away_at_the_end(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
    """cid trains to the end and is away when the final scores are taken."""
    ends = request.do == "deliver" or (request.do == "score" and request.full)
    return FlareAnswer.of("away") if site == "cid" and ends else answer


def go_on(study: Any, hospitals: Mapping[str, Hospital], path: Path, change: Any = None) -> RunFolder:
    """What `consilium federation resume` does at the server."""
    folder = RunFolder.open(path)
    travelling = for_federation(study, tuple(SIZES))
    engine.run(travelling, FlareWire(travelling, folder, Direct(travelling, hospitals, change)), folder)
    return folder


def test_a_best_round_that_nothing_after_could_replace_is_said(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    """cid dies after round 1 of 3: every hospital gets the model of round 1."""

    def dies(site: str, request: Request, answer: FlareAnswer) -> FlareAnswer:
        gone = site == "cid" and request.do != "card" and request.round is not None and request.round.index > 0
        return FlareAnswer.of("away") if gone else answer

    study = toy_study(federation, study__rounds=3, study__score_every=1)
    folder = deploy(study, hospitals, tmp_path / "server", dies)
    why = "2 later rounds could not be chosen, because cid did not score all of them"
    said = f"the best state is that of round 1: {why}."
    assert folder.summary()["best"]["round"] == 1
    warnings = [event["text"] for event in folder.events() if event["event"] == "warning"]
    assert said in warnings
    assert said in lacking(folder, "job")
    folder = go_on(study, hospitals, folder.path)
    assert [event["text"] for event in folder.events() if event["event"] == "warning"] == warnings
    assert (folder.lacking, lacking(folder, "job")) == ([], said)
    again = simulation.run(simulation.with_attendance(study, folder.path), tmp_path / "again", workers=0)
    assert (folder.path / "last.safetensors").read_bytes() == (again.folder / "last.safetensors").read_bytes()
    assert again.summary["best"]["round"] > 1  # a simulation scores all sites, so it can choose another round
    assert lacking(RunFolder.open(again.folder), "job") == ""


@pytest.mark.parametrize("method", ["fedavg", pytest.param("apfl", marks=pytest.mark.federation)])
def test_a_site_away_at_the_end_is_named_and_scored_when_it_is_back(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, method: str
) -> None:
    study = toy_study(federation, method, study__score_every=1)
    calm = deploy(study, hospitals, tmp_path / "calm")
    others = {
        name: Hospital(name, h.data, str(tmp_path / "others" / name), h.labels, "cpu") for name, h in hospitals.items()
    }
    folder = deploy(study, others, tmp_path / "server", away_at_the_end)
    summary = folder.summary()
    assert (summary["unscored"], summary["undelivered"], folder.lacking) == (["cid"], ["cid"], ["cid"])
    assert sorted(summary["headline"]["sites"]) == ["ada", "bea"]
    view = read_run(folder.path)
    table = compare([view])
    assert f"{folder.path.name} has no final scores of cid" in table.caption
    assert table.to_json()["unscored"] == {folder.path.name: ["cid"]}
    write_page([view], tmp_path / "report.html")
    assert "has no final scores of cid" in (tmp_path / "report.html").read_text()

    go_on(study, others, folder.path, away_at_the_end)  # it is still away
    assert RunFolder.open(folder.path).lacking == ["cid"]
    before = (folder.path / "scores.csv").read_bytes()
    folder = go_on(study, others, folder.path)
    summary = folder.summary()
    assert "unscored" not in summary and "undelivered" not in summary
    assert folder.lacking == []
    assert (folder.path / "scores.csv").read_bytes().startswith(before)  # nobody else was asked again
    for part in ("headline", "best", "last"):
        assert summary[part] == calm.summary()[part]
    assert (Path(others["cid"].memory) / folder.path.name / "release.safetensors").exists()
    assert "final scores" not in compare([read_run(folder.path)]).caption


def test_a_crash_while_the_late_scores_are_written_loses_nothing(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = toy_study(federation)
    folder = deploy(study, hospitals, tmp_path / "server", away_at_the_end)
    note = RunFolder.note

    class Crash(Exception):
        pass

    def crash(self: RunFolder, event: str, **facts: Any) -> None:
        if event == "score":
            raise Crash
        note(self, event, **facts)

    monkeypatch.setattr(RunFolder, "note", crash)
    with pytest.raises(Crash):
        go_on(study, hospitals, folder.path)
    monkeypatch.undo()
    folder = go_on(study, hospitals, folder.path)
    places = [
        (r.round, r.phase, r.model, r.of, r.when, r.site, r.split, r.case, r.label, r.metric) for r in folder.rows()
    ]
    assert len(places) == len(set(places))
    assert folder.lacking == []


def test_a_guest_that_is_away_at_the_end_is_named_too(
    hospitals: dict[str, Hospital], federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, study__leave_out=["cid"])
    folder = deploy(study, hospitals, tmp_path / "server", away_at_the_end)
    assert folder.summary()["unscored"] == ["cid"]
    folder = go_on(study, hospitals, folder.path)
    assert sorted(folder.summary()["headline"]["outside"]) == ["cid"]


def test_an_older_journal_says_who_did_not_score() -> None:
    """Its events of the final scores have no list of their own."""
    lines = [
        {"event": "unscored", "round": 2, "phase": "train", "site": "ada"},
        {"event": "score", "round": 2, "phase": "train"},
        {"event": "unscored", "round": 2, "phase": "best", "site": "cid"},
        {"event": "score", "round": 2, "phase": "best"},
        {"event": "score", "round": 3, "phase": "last"},
    ]
    assert unscored(json.loads(json.dumps(lines))) == {"best": ["cid"]}
