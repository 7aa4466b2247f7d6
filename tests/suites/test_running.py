"""Skipping, choosing, failing, and the table: with runs that take no time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from consilium.errors import StudyError, WorkError
from consilium.scores import paired
from consilium.study import Study
from consilium.suites import run_suite, running
from consilium.suites.running import outlook
from consilium.suites.tables import MARK
from tests.suites.bench import FakeRuns, Scores, Teller, write_suite
from tests.toy import write_toy

PAPER = """
[paper]
caption = "Table 9"
columns = ["ada", "site mean"]
[paper.rows]
"Their FedAvg" = [0.5, ""]
"""


def flat(value: float) -> Scores:
    return {site: [value, value] for site in ("ada", "bea", "cid")}


def fake(monkeypatch: pytest.MonkeyPatch, scores: Any) -> FakeRuns:
    made = FakeRuns(scores)
    monkeypatch.setattr(running, "simulation", made)
    return made


def test_what_is_done_is_skipped(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]\nseeds = [0, 1]')
    runs = fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))
    run_suite(suite, tmp_path / "runs")
    # seed by seed, so that an interrupted suite has whole tables
    assert [(s.method_name, s.plan.seed) for s in runs.made] == [
        ("fedavg", 0), ("fedprox", 0), ("fedavg", 1), ("fedprox", 1),
    ]  # fmt: skip
    runs.made.clear()
    teller = Teller()
    run_suite(suite, tmp_path / "runs", watch=teller)
    assert (runs.made, teller.words) == ([], [])


def test_validation_chooses_where_test_disagrees(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation prefers lr 0.01, test prefers 0.1: 0.01 is taken, for all seeds."""

    def scores(study: Study) -> tuple[Scores, Scores]:
        return (flat(0.9), flat(0.2)) if study.local.lr == 0.01 else (flat(0.3), flat(0.8))

    head = 'methods = ["fedavg"]\nseeds = [3, 4]'
    suite = write_suite(tmp_path, federation, head, '[choose]\n"local.lr" = [0.1, 0.01]')
    runs = fake(monkeypatch, scores)
    result = run_suite(suite, tmp_path / "runs")
    assert [(s.local.lr, s.plan.seed) for s in runs.made] == [(0.1, 3), (0.01, 3), (0.01, 4)]
    kept = json.loads((tmp_path / "runs" / "toys" / "choices.json").read_text())
    assert kept["seed"] == 3
    (row,) = kept["rows"]
    assert row["chosen"] == {"local.lr": 0.01}
    assert [t["valid_site_mean"] for t in row["tried"]] == pytest.approx([0.3, 0.9])
    assert "0.8" not in json.dumps(kept)  # no test score is even written there
    (line,) = result.tables[0].to_json()["lines"]
    assert (line["site_mean"], line["chosen"]) == ({"value": pytest.approx(0.2), "sd": 0.0}, {"local.lr": 0.01})


def test_of_equal_candidates_the_first_is_taken_and_another_seed_may_choose(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = 'methods = ["fedavg"]\nseeds = [0, 1]\nchoose_seed = 9'
    suite = write_suite(tmp_path, federation, head, '[choose]\n"local.lr" = [0.1, 0.01]')
    runs = fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))
    run_suite(suite, tmp_path / "runs")
    assert [(s.local.lr, s.plan.seed) for s in runs.made] == [(0.1, 9), (0.01, 9), (0.1, 0), (0.1, 1)]


def test_nothing_is_chosen_without_validation_cases(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]', '[choose]\n"local.lr" = [0.1, 0.01]')
    fake(monkeypatch, lambda study: ({}, flat(0.5)))
    with pytest.raises(StudyError, match="no validation score, so nothing can be chosen by it"):
        run_suite(suite, tmp_path / "runs")


def test_a_failing_run_does_not_stop_the_others(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(study: Study) -> tuple[Scores, Scores]:
        if study.method_name == "fedprox":
            raise WorkError("the disk is full.") if study.plan.seed else ZeroDivisionError("by zero")
        return flat(0.5), flat(0.5)

    suite = write_suite(tmp_path, federation, 'methods = ["fedprox", "fedavg"]\nseeds = [0, 1]')
    runs, teller = fake(monkeypatch, scores), Teller()
    result = run_suite(suite, tmp_path / "runs", watch=teller)
    assert len(runs.made) == 4
    assert [f.why for f in result.failed] == ["ZeroDivisionError: by zero", "the disk is full."]
    assert "FedProx, seed 1 failed: the disk is full." in teller.words
    assert [line.name for line in result.tables[0].comparison.lines] == ["FedAvg"]
    assert "left out: FedProx" in result.to_markdown()
    runs.scores = lambda study: (flat(0.5), flat(0.5))
    again = run_suite(suite, tmp_path / "runs")
    assert (again.failed, len(runs.made)) == ((), 6)  # only the two that failed


def test_a_failed_candidate_is_not_chosen(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(study: Study) -> tuple[Scores, Scores]:
        if study.local.lr == 0.1:
            raise WorkError("not finite.")
        return flat(0.4), flat(0.4)

    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]', '[choose]\n"local.lr" = [0.1, 0.01]')
    fake(monkeypatch, scores)
    result = run_suite(suite, tmp_path / "runs")
    assert result.choices[0].chosen == {"local.lr": 0.01}
    assert len(result.failed) == 1


def test_the_numbers_of_the_table_by_hand(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        ("fedavg", 0): {"ada": [0.5, 0.7], "bea": [0.8]},  # 0.6, 0.8: site mean 0.7, pooled 2.0 / 3
        ("fedavg", 1): {"ada": [0.7, 0.7], "bea": [0.9]},  # 0.7, 0.9: 0.8, 2.3 / 3
        ("fedprox", 0): {"ada": [0.6, 0.8], "bea": [0.8]},  # 0.7, 0.8: 0.75
        ("fedprox", 1): {"ada": [0.8, 0.8], "bea": [1.0]},  # 0.8, 1.0: 0.9
    }
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]\nseeds = [0, 1]', PAPER)
    fake(monkeypatch, lambda study: (flat(0.5), values[study.method_name, study.plan.seed]))
    result = run_suite(suite, tmp_path / "runs")
    fedavg, fedprox = result.tables[0].to_json()["lines"]
    assert fedavg["sites"]["ada"] == {"value": pytest.approx(0.65), "sd": pytest.approx(0.1 / 2**0.5)}
    assert fedavg["site_mean"] == {"value": pytest.approx(0.75), "sd": pytest.approx(0.1 / 2**0.5)}
    assert fedavg["pooled"]["value"] == pytest.approx(4.3 / 6)
    assert fedavg["difference"] is None
    gap = fedprox["difference"]
    assert gap["value"] == pytest.approx(0.075)
    assert gap["by_seed"] == {0: pytest.approx(0.05), 1: pytest.approx(0.1)}
    assert gap["sd"] == pytest.approx(0.05 / 2**0.5)
    # the same patients in both seeds: a case counts once, with its mean over the seeds
    by_hand = paired(
        {"ada": {"0": 0.1, "1": 0.1}, "bea": {"0": 0.05}}, {"ada": {"0": 0.0, "1": 0.0}, "bea": {"0": 0.0}}
    )
    assert by_hand is not None
    assert (gap["cases"], gap["low"], gap["high"]) == (3, pytest.approx(by_hand.low), pytest.approx(by_hand.high))
    assert "| FedProx | 2 | **0.7500 ± 0.0707** |" in result.to_markdown()
    assert "| +0.0750 ± 0.0354 |" in result.to_markdown()


def test_the_papers_figures_are_marked(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]', PAPER)
    fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))
    result = run_suite(suite, tmp_path / "runs")
    ours, theirs = (tmp_path / "runs/toys/table.md").read_text().split(f"### Table 9: {MARK}")
    assert "FedAvg" in ours and "Their" not in ours
    assert "| Their FedAvg | 0.5000 | – |" in theirs
    assert result.to_json()["tables"][0]["papers"][0]["whose"] == MARK
    assert json.loads((tmp_path / "runs/toys/table.json").read_text())["suite"] == "toys"


def test_only_and_the_outlook(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = 'methods = ["fedavg", "fedsm"]\nseeds = [0, 1]'
    suite = write_suite(tmp_path, federation, head, '[choose]\n"method.pull" = [0.5, 0.7]')
    runs, folder = fake(monkeypatch, lambda study: (flat(0.5), flat(0.5))), tmp_path / "runs"
    states = [(p.title, p.state) for p in outlook(suite, folder)]
    assert states == [
        ("FedSM, seed 0, trying pull 0.5", "to do"),
        ("FedSM, seed 0, trying pull 0.7", "to do"),
        ("FedAvg, seed 0", "to do"),
        ("FedAvg, seed 1", "to do"),
        ("FedSM, seed 1 with what is chosen", "after choosing"),
    ]
    assert not folder.exists()
    teller = Teller()
    run_suite(suite, folder, watch=teller, only=["fedsm"])
    assert [s.method_name for s in runs.made] == ["fedsm"] * 3
    assert [words.split(",")[0] for words in teller.words] == [f"run {k} of 3: FedSM" for k in (1, 2, 3)]
    assert "about 0 s left" in teller.words[-1]
    assert [p.state for p in outlook(suite, folder)] == ["done", "done", "to do", "to do", "done"]
    with pytest.raises(StudyError, match="--only fedprox: the suite has no such method"):
        run_suite(suite, folder, only=["fedprox"])


def test_phantoms_are_drawn_once_and_not_mistaken_for_others(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, int]] = []

    def draw(kind: str, folder: Path, cases: int | None, size: int | None, seed: int, **more: Any) -> None:
        drawn.append((folder.name, seed))
        write_toy(folder)

    monkeypatch.setattr("consilium.suites.drawing.write_phantom", draw)
    monkeypatch.chdir(tmp_path)
    rest = '[phantom]\nkind = "retina"\nto = "eyes"\ncases = 40\neach_seed = true\n'
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]\nseeds = [0, 2]', rest)
    suite.write_text(suite.read_text().replace(f'[base.data]\nfederation = "{federation}"\n', ""))
    runs = fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))
    assert [(p.state, p.folder) for p in outlook(suite)] == [("to do", None)] * 2
    run_suite(suite)
    run_suite(suite)
    assert drawn == [("eyes-s0", 0), ("eyes-s2", 2)]
    assert [Path(s.data.federation).name for s in runs.made] == ["eyes-s0", "eyes-s2"]
    suite.write_text(suite.read_text().replace("cases = 40", "cases = 41"))
    with pytest.raises(StudyError, match=r"eyes-s0 was drawn as .*, not as \[phantom\] says"):
        run_suite(suite)


# -------------------------------------------------------------------------------------------------- optimiser states

STATES = '"local.optimizer_state" = ["kept", "fresh"]'


def by_state(study: Study) -> tuple[Scores, Scores]:
    """FedAvg is a little better with kept states, FedProx much better with fresh ones; the tests say the opposite."""
    if study.method_name == "scaffold":
        return flat(0.5), flat(0.5)
    valid = {"fedavg": {"kept": 0.62, "fresh": 0.6}, "fedprox": {"kept": 0.5, "fresh": 0.6}}
    level = valid[study.method_name][study.local.optimizer_state] - (0.01 if study.local.lr == 0.1 else 0)
    return flat(level), flat(1 - level)


SCAFFOLD = """
[methods.scaffold]
"local.optimizer" = "sgd"
"local.momentum" = 0.0
"""


def test_the_optimiser_state_is_chosen_once_for_all_methods(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means over methods of their best: kept 0.56, fresh 0.60. So FedAvg, alone better with kept, is fresh as well."""
    rest = f'[choose]\n{STATES}\n"local.lr" = [0.1, 0.01]\n{SCAFFOLD}'
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox", "scaffold"]\nseeds = [0, 1]', rest)
    runs = fake(monkeypatch, by_state)
    teller = Teller()
    run_suite(suite, tmp_path / "runs", only=["fedavg"], watch=teller)
    assert {study.plan.seed for study in runs.made} == {0}  # nothing is chosen before all have been tried
    assert any("chosen for all methods at once" in words for words in teller.words)
    result = run_suite(suite, tmp_path / "runs")
    chosen = {choice.row.method: choice.chosen for choice in result.choices}
    taken = {"local.optimizer_state": "fresh", "local.lr": 0.01}
    assert (chosen["fedavg"], chosen["fedprox"]) == (taken, taken)
    assert chosen["scaffold"] is not None and "local.optimizer_state" not in chosen["scaffold"]
    told = json.loads((tmp_path / "runs" / "toys" / "choices.json").read_text())["for_all"]
    assert told["valid_site_mean"] == pytest.approx({"kept": 0.56, "fresh": 0.6})
    (table,) = result.tables
    assert table.comparison.states == ("fresh",)
    assert [p.state for p in outlook(suite, tmp_path / "runs")] == ["done"] * 13


def test_in_the_grid_each_state_has_a_table(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = f"[grid]\n{STATES}\n{SCAFFOLD}"
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox", "scaffold"]', rest)
    fake(monkeypatch, by_state)
    kept, fresh = run_suite(suite, tmp_path / "runs").tables
    for table, state in ((kept, "kept"), (fresh, "fresh")):
        assert [line.name for line in table.comparison.lines] == ["FedAvg", "FedProx", "SCAFFOLD"]
        assert table.comparison.title.endswith(f", optimiser state {state}")
        assert set(table.differences) == {"FedProx", "SCAFFOLD"}
    assert kept.differences["FedProx"].value == pytest.approx(0.5 - 0.38)
    assert [row[0].text for row in kept.grid()[1:]] == ["FedAvg", "FedProx", "SCAFFOLD †"]
    assert [row[0].text for row in fresh.grid()[1:]] == ["FedAvg", "FedProx", "SCAFFOLD"]


def test_the_base_speaks_for_methods_that_leave_the_state_open(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = f'optimizer_state = "kept"\n{SCAFFOLD}'  # it goes on with [base.local]
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "scaffold"]', rest)
    runs = fake(monkeypatch, by_state)
    run_suite(suite, tmp_path / "runs")
    assert {s.method_name: s.local.optimizer_state for s in runs.made} == {"fedavg": "kept", "scaffold": "fresh"}


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (
            '[methods.fedprox]\n"local.optimizer_state" = "fresh"',
            "'FedAvg' and 'FedProx' do not have the same local.opt",
        ),
        (f'[methods.fedprox]\n"local.optimizer_state" = "fresh"\n[choose]\n{STATES}', "and no table mixes them"),
        (f'[methods.fedprox]\n"local.optimizer_state" = "fresh"\n[grid]\n{STATES}', "and no table mixes them"),
        (f"[methods.fedprox.choose]\n{STATES}", "is chosen once for all methods, because no table mixes them"),
        ('[methods.fedprox]\n"method.optimizer_state" = "fresh"', 'it is "local.optimizer_state" now'),
    ],
)
def test_a_table_that_would_mix_states_is_refused(rest: str, said: str, tmp_path: Path, federation: Path) -> None:
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]', rest)
    with pytest.raises(StudyError, match=re.escape(said)):
        run_suite(suite, tmp_path / "runs")
