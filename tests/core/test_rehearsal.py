"""`run --policy hospital.toml`: a simulated site goes by a real hospital's rules, log of what left included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consilium import simulation
from consilium.cli.main import main
from consilium.errors import StudyError
from consilium.extensions import code_hash
from consilium.left_log import left
from consilium.rehearsal import objections, put_rules, read_rules, runs_under
from consilium.reports.comparing import compare
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.study import Study
from tests.cli.terminal import Outcome, call, refused
from tests.toy import SIZES, toy_study


def hospital(folder: Path, site: str = "bea", limits: str = "", labels: str = '["blob"]') -> Path:
    path = folder / f"{site}.toml"
    path.write_text(f'site = "{site}"\ndata = "d"\nmemory = "m"\nlabels = {labels}\n[limits]\n{limits}\n')
    return path


def rehearse(study: Study, rules: Path, runs: Path) -> RunFolder:
    found = read_rules([rules], study)
    folder = RunFolder.create(study, runs_under(found, runs))
    put_rules(found, folder.path, study)
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
    """As in a federation, the site is left out and the others go on."""
    study = toy_study(federation, study__rounds=1)
    folder = rehearse(study, hospital(tmp_path, limits=limits, labels=labels), tmp_path / "runs")
    (said,) = events(folder, "left out")
    assert said["site"] == "bea"
    assert why in said["why"]
    assert {event["site"] for event in events(folder, "train")} == {"ada", "cid"}
    assert {row.site for row in folder.rows()} == {"ada", "cid"}
    simulation.resume(folder.path, workers=0)  # finished, and still the same run


@pytest.mark.parametrize("same", [True, False])
def test_code_lies_beside_the_real_rules(same: bool, federation: Path, tmp_path: Path) -> None:
    """The rehearsal's copy of them is in another folder."""
    steps = [tmp_path / place / "step.py" for place in ("study", "hospital")]
    for step in steps:
        step.parent.mkdir()
        step.write_text("def same(array, spacing):\n    return array\n")
    study = toy_study(federation, study__rounds=1, preprocess__steps=[f"{steps[0]}:same"])
    allowed = f"step.py:same {code_hash(f'{steps[1]}:same')}"
    if not same:
        steps[1].write_text("def same(array, spacing):\n    return 2 * array\n")
    rules = hospital(steps[1].parent, limits=f'code = ["{allowed}"]')
    said = list(objections(read_rules([rules], study), study).notes)
    folder = rehearse(study, rules, tmp_path / "runs")
    assert ["its hash is another" in line for line in said] == ([] if same else [True])
    assert [event["site"] for event in events(folder, "left out")] == ([] if same else ["bea"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"study__sites": ["ada", "bea"]}, "1 of 2 sites are left, and a run begins with at least 2"),
        ({"method__name": "pooled"}, "pooled training needs all of them"),
        ({"study__min_sites": 3}, "a run begins with at least 3"),
        ({"study__sites_per_round": 3}, "there are 2 sites. Left out: bea: its hospital.toml names other labels"),
    ],
)
def test_who_is_left_must_be_enough(changes: dict[str, Any], why: str, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, **changes)
    with pytest.raises(StudyError) as error:
        rehearse(study, hospital(tmp_path, labels='["cup"]'), tmp_path / "runs")
    assert why in str(error.value)
    rules = read_rules([hospital(tmp_path, labels='["cup"]')], study)
    assert why.partition(". Left out")[0] in objections(rules, study).refused  # a dry run says so too


def test_who_is_left_must_draw_every_label(organs: Path, tmp_path: Path) -> None:
    study = toy_study(organs, data__annotated={"cid": ["round"]})
    with pytest.raises(StudyError, match="no site that is left annotates 'square'; left out: bea: "):
        rehearse(study, hospital(tmp_path, labels='["cup"]'), tmp_path / "runs")
    said = objections(read_rules([hospital(tmp_path, labels='["cup"]')], study), study).refused
    assert "no site that trains annotates 'square'" in said
    assert said.endswith("Left out: bea.")


@pytest.mark.parametrize("limits", ["", 'refused = ["fedavg"]'])
def test_the_same_command_again_finds_its_run_and_other_rules_make_another(
    limits: str, federation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules are an input of the run, whoever they leave out."""
    (tmp_path / "study.toml").write_text(toy_study(federation, study__rounds=1).to_toml())
    arguments = ["run", str(tmp_path / "study.toml"), "--workers", "0", "--runs", str(tmp_path / "runs"), "--json"]

    def once(rules: str) -> Path:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--policy", str(hospital(tmp_path, limits=rules))])
        assert not ended.value.code
        return Path(json.loads(capsys.readouterr().out)["run"])

    run = once(limits)
    before = (run / "journal.jsonl").read_bytes()
    assert once(limits) == run
    assert (run / "journal.jsonl").read_bytes() == before  # it was finished: nothing was trained
    assert once("rounds = 5") != run


def test_a_scoring_too_many_leaves_the_site_out_of_that_score(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__score_every=1)
    folder = rehearse(study, hospital(tmp_path, limits="scorings = 2"), tmp_path / "runs")
    why = {(event["site"], event["why"]) for event in events(folder, "unscored")}
    assert why == {("bea", "its hospital.toml allows no more scorings")}
    assert len([line for line in left(folder.path / "sites" / "bea") if line["what"] == "score"]) == 2


def test_the_command_takes_a_policy(federation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.toml").write_text(toy_study(federation, study__rounds=1).to_toml())
    rules = hospital(tmp_path, limits="bytes = 1")
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


def test_a_dry_run_says_what_the_rules_would(federation: Path, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(toy_study(federation, study__rounds=3).to_toml())

    def tried(**rules: str) -> Outcome:
        return call("run", tmp_path / "study.toml", "--dry-run", "--json", "--policy", hospital(tmp_path, **rules))

    (no_folder,) = tried().document["notes"]
    assert "is no folder" in no_folder
    for rules, why in (
        ({"labels": '["cup"]'}, "bea would be left out: the study has"),
        ({"limits": 'methods = ["fedprox"]'}, "bea would be left out: hospital.toml does not allow this method"),
        ({"limits": "approval = true"}, "bea would be left out: hospital.toml asks for approval"),
        ({"limits": "rounds = 2"}, "bea could stop answering: the study asks for up to 3 rounds, "),
        ({"limits": "layers = 1"}, "bea would be left out: "),
    ):
        assert any(why in note for note in tried(**rules).document["notes"]), rules
    (tmp_path / "study.toml").write_text(toy_study(federation, study__rounds=3, study__sites=["ada", "bea"]).to_toml())
    told = tried(labels='["cup"]')
    assert told.status == 2
    for said in (told.err, told.document["refused"]):
        assert "1 of 2 sites are left, and a run begins with at least 2" in said
    refused(tried(limits="rounds = -1"), "[limits] rounds = -1")
    refused(tried(limits="bites = 1"), "bites")
    refused(call("run", tmp_path / "study.toml", "--dry-run", "--policy", tmp_path / "no.toml"), "cannot read")


def test_a_hospital_counts_its_whole_table_and_is_asked_nothing_after_a_refusal(
    federation: Path, tmp_path: Path
) -> None:
    study = toy_study(federation, preprocess__size=[16, 16])
    needed = sum(SIZES["bea"]) * 16 * 16 * (4 + 1)  # bytes of the cases of all splits, with their masks

    def said(limits: str) -> list[str]:
        return list(objections(read_rules([hospital(tmp_path, limits=limits)], study), study).notes)

    assert said(f"cache_bytes = {needed}") == []
    why = f"[limits] cache_bytes = {needed - 1}, and the preprocessed images take {needed}."
    assert said(f"cache_bytes = {needed - 1}\nrounds = 2") == [f"bea would be left out: {why}"]


def test_a_guest_is_asked_for_no_rounds(federation: Path, tmp_path: Path) -> None:
    rules = hospital(tmp_path, limits="rounds = 1\nscorings = 1")
    for guest, words in ((["bea"], ["scorings"]), ([], ["rounds", "scorings"])):
        study = toy_study(federation, study__leave_out=guest)
        said = list(objections(read_rules([rules], study), study).notes)
        assert [any(f" {word}, hospital.toml" in line for line in said) for word in words] == [True] * len(words)
        assert len(said) == len(words)


def test_only_what_a_site_is_asked_for_can_end_it(federation: Path, tmp_path: Path) -> None:
    """In pooled training another site makes the updates; a site that the study does not name is asked for nothing."""
    rules = hospital(tmp_path, limits="rounds = 1\nscorings = 100")
    pooled = toy_study(federation, "pooled")
    assert objections(read_rules([rules], pooled), pooled).notes == ()
    path = rehearse(pooled, rules, tmp_path / "runs").path
    assert {event["event"] for event in RunFolder.open(path).events()} & {"lost", "unscored"} == set()
    others = toy_study(federation, study__sites=["ada", "cid"])
    forbidding = hospital(tmp_path, limits='methods = ["fedprox"]\nscorings = 1')
    assert objections(read_rules([forbidding], others), others).notes == ()


def test_rehearsals_are_compared_with_each_other_and_with_plain_runs(federation: Path, tmp_path: Path) -> None:
    """A hospital's name of its table changes with the seed; its cases do not."""
    rules, runs = hospital(tmp_path), tmp_path / "runs"
    found = [rehearse(toy_study(federation, study__seed=seed), rules, runs).path for seed in (0, 1)]
    plain = RunFolder.create(toy_study(federation, study__seed=0), runs)
    simulation.go_on(plain, workers=0)
    both = compare([read_run(path) for path in found])
    assert (both.unlike, [line.count for line in both.lines]) == ((), [2])
    assert [again for again, _ in compare([read_run(path) for path in (*found, plain.path)]).repeated]
