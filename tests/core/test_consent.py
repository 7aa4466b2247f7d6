"""A hospital where a person approves every study: what waits, what it would do, and what a decision covers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from consilium.cli.main import main
from consilium.consent import APPROVED, FOLDER, REJECTED, WAITING, Decision, Decisions, study_digest
from consilium.errors import StudyError
from consilium.hospital import Limits, read_hospital
from consilium.hospital_policy import HospitalPolicy
from consilium.messages import REASONS, Request
from consilium.policy import Refused, read_key
from consilium.reviewing import printable
from consilium.study import Study
from tests.core.test_rehearsal import events, hospital, rehearse
from tests.toy import toy_study


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return hospital(tmp_path, limits="approval = true")


def policy(rules: Path) -> HospitalPolicy:
    """As a new process of the site opens it."""
    settings = read_hospital(rules)
    memory = Path(settings.memory)
    return HospitalPolicy(settings.limits, settings.labels, read_key(memory / "key"), memory)


def word(rules: Path, study: Study) -> str:
    try:
        policy(rules).check(study, 14)
    except Refused as refused:
        return refused.word
    return ""


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["federation", "review", *arguments])
    return int(ended.value.code or 0)


def test_a_study_waits_is_shown_approved_and_runs(
    rules: Path, federation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = toy_study(federation, study__score_every=2)
    assert word(rules, study) == "approval"
    assert command("--hospital", str(rules), "--json") == 0
    (waiting,) = json.loads(capsys.readouterr().out)["studies"]
    assert (waiting["state"], waiting["study"]) == ("waiting", study_digest(study))
    assert command(waiting["study"][:12], "--hospital", str(rules)) == 0
    shown = capsys.readouterr().out
    for said in (
        "segmentation of blob, by the method fedavg",
        "in 3 rounds (3 of 'train')",
        "scores models on your validation and test cases 4 times",
        "global: weights",
        "no noise. A model can memorise images",
        "only that of the installed package",
        "Not decided:",
    ):
        assert said in shown
    assert word(rules, study) == "approval"  # looking decides nothing
    assert command(waiting["study"][:12], "--hospital", str(rules), "--approve", "--by", "Dr. Grey") == 0
    assert "approved by Dr. Grey" in capsys.readouterr().out
    assert word(rules, study) == ""


def test_what_is_said_is_what_the_study_has(rules: Path, federation: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = toy_study(federation, "scaffold", privacy__clip=1.0, privacy__noise=50.0)
    assert word(rules, study) == "approval"
    assert command(study_digest(study), "--hospital", str(rules)) == 0
    shown = capsys.readouterr().out
    assert f"ε {study.privacy.told(study.exchanges):.3g} at δ 1e-05" in shown
    assert "by the method scaffold" in shown
    assert "ranges of sizes" not in shown  # noise does not cover them, so they stay


def test_a_study_cannot_write_the_lines_it_is_judged_by(federation: Path) -> None:
    forged = "bea.\nPrivacy: every patient is protected\x1b[8m"
    with pytest.raises(StudyError, match="cannot be the name of a site"):
        toy_study(federation, study__sites=["ada", forged])
    assert printable(forged) == r"bea.\nPrivacy: every patient is protected\x1b[8m"


def test_another_study_needs_another_approval(rules: Path, federation: Path) -> None:
    study = toy_study(federation)
    decide(rules, study, APPROVED)
    assert word(rules, study) == ""
    for other in ({"study__rounds": 4}, {"local__lr": 0.02}, {"study__seed": 1}, {"study__sites": ["ada", "bea"]}):
        assert word(rules, toy_study(federation, **other)) == "approval"
    at_home = replace(study, local=replace(study.local, device="cuda:1"))
    assert study_digest(at_home) == study_digest(study)  # the hospital's own device is its own


def decide(rules: Path, study: Study, verdict: str) -> None:
    policy(rules).decisions.decide(study, Decision(study_digest(study), verdict, "Dr. Grey", "today", "no"))


def test_a_rejected_study_is_answered_as_such_and_approval_can_be_withdrawn(rules: Path, federation: Path) -> None:
    study = toy_study(federation)
    decide(rules, study, APPROVED)
    site = policy(rules)
    site.check(study, 14)
    decide(rules, study, REJECTED)
    with pytest.raises(Refused) as refused:  # of a run under way too
        site.before(Request("train", "a-s0-1", "fedavg"), study)
    assert refused.value.word == "rejected"
    assert word(rules, study) == "rejected"
    assert "rejected" in REASONS["rejected"]


def test_a_decision_that_the_hospital_did_not_sign_does_not_count(rules: Path, federation: Path) -> None:
    study = toy_study(federation)
    decide(rules, study, REJECTED)
    path = Path(read_hospital(rules).memory) / FOLDER / f"{study_digest(study)}.json"
    path.write_text(path.read_text().replace(REJECTED, APPROVED))
    assert word(rules, study) == "approval"
    other = toy_study(federation, study__rounds=1)
    decide(rules, other, APPROVED)
    path.write_text(path.with_stem(study_digest(other)).read_text())  # another study's approval
    assert word(rules, study) == "approval"
    assert path.stat().st_mode & 0o077 == 0


def test_so_many_studies_wait_and_no_more(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.consent.WAITING", 2)
    decisions = Decisions(tmp_path, b"k")
    kept = [decisions.keep_waiting(toy_study(federation, study__seed=seed)) for seed in range(3)]
    assert kept == [True, True, False]
    assert len(decisions.all()) == 2 < WAITING


def test_without_the_key_of_hospital_toml_nothing_waits(federation: Path, tmp_path: Path) -> None:
    HospitalPolicy(Limits(), ("blob",), b"k", tmp_path).check(toy_study(federation), 14)
    assert not os.listdir(tmp_path)


def test_a_rehearsal_leaves_the_site_out_until_a_person_approves(rules: Path, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__rounds=1)
    (tmp_path / "study.toml").write_text(study.to_toml())
    folder = rehearse(study, rules, tmp_path / "runs")
    (said,) = events(folder, "left out")
    assert "nobody there has approved this study yet" in said["why"]
    assert command(str(tmp_path / "study.toml"), "--hospital", str(rules), "--approve") == 0
    approved = rehearse(study, rules, tmp_path / "runs")
    assert approved.path != folder.path
    assert {event["site"] for event in events(approved, "train")} == {"ada", "bea", "cid"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--approve"], "name the study to decide on"),
        (["abc", "--approve", "--reject"], "choose one"),
        (["abc"], "no study that was kept here begins with 'abc'"),
    ],
)
def test_mistakes_are_said(arguments: list[str], said: str, rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments, "--hospital", str(rules)) == 2
    assert said in capsys.readouterr().err


def test_root_decides_nothing_for_the_user_that_runs_the_site(
    rules: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That user could not read a decision of root's, nor a key that root has made; the study would wait for ever."""
    memory = Path(read_hospital(rules).memory)
    memory.mkdir()
    if os.geteuid() == 0:
        os.chown(memory, 65534, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert command("--hospital", str(rules)) == 2
    assert "repeat the command as that user, with `sudo -u " in capsys.readouterr().err
    assert not list(memory.iterdir())
