"""`run --policy hospital.toml`: a simulated site goes by a real hospital's rules, log of what left included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consilium import simulation
from consilium.cli.main import main
from consilium.errors import StudyError
from consilium.policy import left
from consilium.rehearsal import put_rules, read_rules, runs_under
from consilium.run_folder import RunFolder
from consilium.study import Study
from tests.toy import toy_study


def hospital(folder: Path, site: str = "bea", limits: str = "", labels: str = '["blob"]') -> Path:
    path = folder / f"{site}.toml"
    path.write_text(f'site = "{site}"\ndata = "d"\nmemory = "m"\nlabels = {labels}\n[limits]\n{limits}\n')
    return path


def rehearse(study: Study, rules: Path, runs: Path) -> RunFolder:
    found = read_rules([rules], study)
    folder = RunFolder.create(study, runs_under(found, runs))
    put_rules(found, folder.path)
    simulation.go_on(folder, workers=0)
    return folder


def events(folder: RunFolder, kind: str) -> list[Any]:
    return [event for event in folder.events() if event["event"] == kind]


def test_a_limit_of_rounds_is_met_as_in_a_federation(federation: Path, tmp_path: Path) -> None:
    folder = rehearse(toy_study(federation), hospital(tmp_path, limits="rounds = 1"), tmp_path / "runs")
    lost = [(event["site"], event["round"], event["why"]) for event in events(folder, "lost")]
    assert lost == [("bea", number, "its hospital.toml allows no more rounds") for number in (2, 3)]
    assert folder.finished


def test_what_left_is_in_the_log_and_cases_have_aliases(federation: Path, tmp_path: Path) -> None:
    folder = rehearse(toy_study(federation), hospital(tmp_path), tmp_path / "runs")
    log = list(left(folder.path / "sites" / "bea"))
    assert [line["what"] for line in log].count("train") == 3
    assert {line["what"] for line in log} == {"card", "train", "score", "deliver"}
    assert not (tmp_path / "m").exists()  # a rehearsal spends nothing of the real hospital's
    cases = {row.site: row.case for row in folder.rows()}
    assert cases["ada"].startswith("ada")
    assert "bea" not in cases["bea"]


def test_rules_alone_change_no_bit(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "scaffold")
    ruled = rehearse(study, hospital(tmp_path), tmp_path / "runs")
    plain = simulation.run(study, tmp_path / "runs", workers=0).folder
    assert ruled.path != plain
    assert (ruled.path / "last.safetensors").read_bytes() == (plain / "last.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("limits", "labels", "why"),
    [
        ('refused = ["fedavg"]', '["blob"]', "does not allow the method"),
        ("epsilon = 1.0", '["blob"]', "demands differential privacy"),
        ("", '["cup"]', "names other labels"),
    ],
)
def test_a_refusal_is_the_sentence_of_the_roll_call(
    limits: str, labels: str, why: str, federation: Path, tmp_path: Path
) -> None:
    rules = hospital(tmp_path, limits=limits, labels=labels)
    with pytest.raises(StudyError, match=f"site 'bea' cannot take part: .*{why}"):
        rehearse(toy_study(federation), rules, tmp_path / "runs")


def test_a_scoring_too_many_leaves_the_site_out_of_that_score(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__score_every=1)
    folder = rehearse(study, hospital(tmp_path, limits="scorings = 2"), tmp_path / "runs")
    why = {(event["site"], event["why"]) for event in events(folder, "unscored")}
    assert why == {("bea", "its hospital.toml allows no more scorings")}
    assert len([line for line in left(folder.path / "sites" / "bea") if line["what"] == "score"]) == 2


def test_the_command_takes_a_policy(
    federation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "study.toml").write_text(toy_study(federation, study__rounds=1).to_toml())
    rules = hospital(tmp_path, limits="total_bytes = 1")
    arguments = ["run", str(tmp_path / "study.toml"), "--workers", "0", "--runs", str(tmp_path / "runs"), "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--policy", str(rules)])
    assert not ended.value.code
    run = Path(json.loads(capsys.readouterr().out)["run"])
    assert {event["site"] for event in events(RunFolder.open(run), "lost")} == {"bea"}
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--policy", str(hospital(tmp_path, "eve"))])
    assert ended.value.code == 2
    assert "is of site 'eve'; the federation has ada, bea, cid" in capsys.readouterr().err
