"""Skipping, choosing, failing, and the table: with runs that take no time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consilium.errors import RunError, StudyError, WorkError
from consilium.run_folder import RunFolder
from consilium.scores.rows import ScoreRow
from consilium.scores.statistics import paired
from consilium.simulation import Result
from consilium.study import Study
from consilium.suites import estimating, load_suite, run_suite, running
from consilium.suites.planning import Planned, rows
from consilium.suites.rendering import MARK
from consilium.suites.running import outlook
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


def test_the_time_is_told_before_and_while_it_runs(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is estimated at 60 s and takes no time, so the estimate of the others falls."""
    choose = '[choose]\n"local.lr" = [0.1, 0.01]\n'
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]\nseeds = [0, 1]', choose)
    fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))
    tried: list[Study] = []
    monkeypatch.setattr(estimating, "tried_times", tried.append)
    monkeypatch.setattr(estimating, "estimated_seconds", lambda study, times, workers: 60.0)
    teller = Teller()
    run_suite(suite, tmp_path / "runs", watch=teller, estimated=True)
    assert len(tried) == 1  # the learning rate costs nothing
    told = [line for line in teller.words if "about" in line]
    assert told[0].startswith(
        "3 runs to do, about 3 min on this machine: an estimate from a few timed steps of 1 method"
    )
    assert [line.rpartition(", ")[2] for line in told[1:]] == [
        "about 3 min left", "about a second left", "about a second left",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "count"),
    [
        ('"method.personal" = ["softpull", "apfl"]', 2),
        ('"method.selector_training" = ["synchronised", "discriminant"]', 2),
        ('"task.widths" = [[4, 8], [8, 16]]', 2),
        ('"local.threads" = [1, 2]', 2),
        ('"method.selector_lr" = [0.001, 0.002]\n"method.pull" = [0.5, 0.7]\n"method.confidence" = [0.5, 0.9]', 1),
    ],
)
def test_rows_that_take_other_steps_are_timed_apart(
    grid: str, count: int, tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedsm"]\nseeds = [0, 1]', f"[grid]\n{grid}\n"))
    tried: list[Study] = []
    monkeypatch.setattr(estimating, "tried_times", tried.append)
    monkeypatch.setattr(estimating, "estimated_seconds", lambda study, times, workers: 60.0)
    to_do = [Planned(row, {}, seed) for row in rows(suite) for seed in (0, 1)]
    clock = estimating.estimate(suite, to_do, None, Teller().say)
    assert (len(tried), clock.methods) == (count, 1)


def test_federations_are_timed_apart(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_toy(tmp_path / "other")
    grid = f'[grid]\n"data.federation" = ["{federation}", "{other}"]\n'
    suite = load_suite(write_suite(tmp_path, federation, 'methods = ["fedavg"]\nseeds = [0, 1]', grid))
    tried: list[Study] = []
    monkeypatch.setattr(estimating, "tried_times", tried.append)
    monkeypatch.setattr(estimating, "estimated_seconds", lambda study, times, workers: 60.0)
    to_do = [Planned(row, {}, seed) for row in rows(suite) for seed in (0, 1)]
    estimating.estimate(suite, to_do, None, Teller().say)
    assert [Path(study.data.federation) for study in tried] == [federation, other]


def test_a_suite_that_cannot_be_estimated_runs_all_the_same(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]\nseeds = [0]')
    runs = fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))

    def fail(study: Study) -> None:
        raise WorkError("no memory")

    monkeypatch.setattr(estimating, "tried_times", fail)
    teller = Teller()
    run_suite(suite, tmp_path / "runs", watch=teller, estimated=True)
    assert len(runs.made) == 1 and "the time cannot be estimated: no memory" in teller.words


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


def test_a_choice_at_an_end_of_its_list_is_told(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something beyond it may be better, as long as there is something: not of counts, not below 0."""
    lists = '"local.lr" = [0.1, 0.03, 0.01]\n"local.epochs" = [1, 2, 5]\n'
    own = '[methods.fedprox.choose]\n"method.mu" = [0.0, 0.1, 1.0]\n"local.lr" = [0.1, 0.03]\n"local.epochs" = [1]'
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]', f"[choose]\n{lists}{own}")

    def told(best_lr: float, best_mu: float) -> list[str]:
        def scores(study: Study) -> tuple[Scores, Scores]:
            good = (study.local.lr == best_lr) + (getattr(study.method, "mu", best_mu) == best_mu)
            return flat(0.2 * good + 0.01 * study.local.epochs), flat(0.5)

        fake(monkeypatch, scores)
        notes = run_suite(suite, tmp_path / f"runs-{best_lr}-{best_mu}").tables[0].notes()
        return [note.rpartition("better: ")[2] for note in notes if note.startswith("At an end of what was tried")]

    assert told(0.1, 1.0) == ["FedAvg: lr 0.1, the largest; FedProx: mu 1.0, the largest."]  # two values of lr: no list
    assert told(0.01, 0.0) == ["FedAvg: lr 0.01, the smallest."]
    assert told(0.03, 0.1) == []


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


def test_a_row_with_a_failed_candidate_stays_while_others_are_run(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`only` tries the candidate of another method no more, and waits for it no more."""

    def scores(study: Study) -> tuple[Scores, Scores]:
        if study.local.lr == 0.1 and study.method_name == "fedavg":
            raise WorkError("not finite.")
        return flat(0.4), flat(0.4)

    suite = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]', '[choose]\n"local.lr" = [0.1, 0.01]')
    runs = fake(monkeypatch, scores)
    run_suite(suite, tmp_path / "runs")
    before = len(runs.made)
    result = run_suite(suite, tmp_path / "runs", only=["fedprox"])
    assert [choice.chosen for choice in result.choices] == [{"local.lr": 0.01}, {"local.lr": 0.1}]
    assert [line.name for line in result.tables[0].comparison.lines] == ["FedAvg", "FedProx"]
    assert (result.failed, len(runs.made)) == ((), before)
    failed = json.loads((tmp_path / "runs/toys/choices.json").read_text())["failed"]
    assert failed == [result.choices[0].tried[0].run]
    suite.write_text(suite.read_text().replace("[0.1, 0.01]", "[0.2, 0.01]"))  # what is no candidate now is not kept
    run_suite(suite, tmp_path / "runs", only=["fedprox"])
    assert json.loads((tmp_path / "runs/toys/choices.json").read_text())["failed"] == []


def test_a_suite_that_is_training_is_known_by_its_folder(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compare runs/*` passes it over, hours before its first table."""
    seen = []

    def scores(study: Study) -> tuple[Scores, Scores]:
        seen.append(json.loads((tmp_path / "runs/toys/choices.json").read_text())["rows"])
        return flat(0.4), flat(0.4)

    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]', '[choose]\n"local.lr" = [0.1, 0.01]')
    fake(monkeypatch, scores)
    run_suite(suite, tmp_path / "runs")
    assert [[t["valid_site_mean"] for t in row["tried"]] for row in seen[0]] == [[None, None]]
    assert len(seen) == 2


def test_choices_that_cannot_be_read_are_to_be_removed(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written anew by every call, so nothing has to be restored or trained again."""
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]')
    fake(monkeypatch, lambda study: (flat(0.4), flat(0.4)))
    run_suite(suite, tmp_path / "runs")
    (tmp_path / "runs/toys/choices.json").write_text("{")
    with pytest.raises(RunError, match=r"choices.json cannot be read .*; remove it, the suite writes it again"):
        run_suite(suite, tmp_path / "runs")


def test_of_many_sites_the_means_come_first(tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = write_suite(tmp_path, federation, 'methods = ["fedavg"]')
    fake(monkeypatch, lambda study: (flat(0.4), flat(0.4)))
    sites, means = ["ada", "bea", "cid"], ["site mean", "pooled cases"]
    for many, ordered in ((3, [*sites, *means]), (2, [*means, *sites])):
        monkeypatch.setattr("consilium.reports.tables.MANY", many)
        comparison = run_suite(suite, tmp_path / "runs").tables[0].comparison
        assert [column.title for column in comparison.columns] == ordered


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


def test_the_last_rounds_stand_beside_the_best_one(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rounds with site means 0.2, 0.4 and 0.9 the last two have 0.65; at the second seed 0.1 less."""

    class Rounds(FakeRuns):
        def run(self, study: Study, runs: Path, **how: Any) -> Result:
            result = super().run(study, runs, **how)
            less = 0.1 * study.plan.seed
            about = (study.method.headline, "", "merged", "ada", False, "test", "test0", "blob", "dice")
            rows = [ScoreRow(n, "train", *about, value - less) for n, value in enumerate((0.2, 0.4, 0.9), start=1)]
            RunFolder.open(result.folder).add_scores(rows)
            return result

    fake = Rounds(lambda study: ({"ada": [0.5]}, {"ada": [0.5]}))
    monkeypatch.setattr(running, "simulation", fake)
    path = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedprox"]\nseeds = [0, 1]\nlast_rounds = 2')
    (table,) = run_suite(path, tmp_path / "runs").tables
    head, *body = [[cell.text for cell in line] for line in table.grid()]
    column = head.index("last 2 scored rounds")
    assert [line[column] for line in body] == ["0.6000 ± 0.0707"] * 2
    assert "last 2 scored rounds" in table.to_markdown() and table.to_json()["lines"][0]["last_rounds"] == [
        pytest.approx(0.65),
        pytest.approx(0.55),
    ]


def test_every_metric_has_a_table_and_outside_sites_a_mean(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dice 0.6 inside and 0.2 outside, distances ten times as large: the means with outside are 0.4 and 4."""

    class Both(FakeRuns):
        def rows(self, study: Study, rows: list[ScoreRow]) -> list[ScoreRow]:
            every = [*rows, *(replace(row, site="cid", outside=True, value=0.2) for row in rows)]
            return [*every, *(replace(row, metric="hd95", value=10 * row.value) for row in every)]

    monkeypatch.setattr(running, "simulation", Both(lambda study: ({"ada": [0.6]}, {"ada": [0.6]})))
    head = 'methods = ["fedavg"]\nmetrics = ["dice", "hd95"]'
    paper = PAPER.replace("[paper]", '[paper]\nmetric = "hd95"')
    tables = run_suite(write_suite(tmp_path, federation, head, paper), tmp_path / "runs").tables
    assert [table.comparison.metric for table in tables] == ["dice", "hd95"]
    assert [len(table.papers) for table in tables] == [0, 1]
    for table, expected in zip(tables, ("0.4000", "4.0000"), strict=True):
        titles, line = [[cell.text for cell in cells] for cells in table.grid()]
        assert line[titles.index("mean with outside")] == expected
    assert tables[0].to_json()["lines"][0]["mean_with_outside"] == [pytest.approx(0.4)]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("dicee", "did you mean 'dice'"),
        ("clean_dice", "no score 'clean_dice'"),
        ("slice_dice", "no score 'slice_dice'"),
    ],
)
def test_a_metric_that_the_task_does_not_have_is_refused_before_the_first_run(
    metric: str, said: str, tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = fake(monkeypatch, lambda study: (flat(0.5), flat(0.5)))
    suite = write_suite(tmp_path, federation, f'methods = ["fedavg"]\nmetrics = ["dice", "{metric}"]')
    with pytest.raises(StudyError, match=rf"\[suite\] metrics: .*{said}"):
        run_suite(suite, tmp_path / "runs")
    assert runs.made == []


class SomeDistances(FakeRuns):
    """FedAvg has a distance at both seeds, FedProx at the second only, SCAFFOLD at none: it predicted nothing."""

    def rows(self, study: Study, rows: list[ScoreRow]) -> list[ScoreRow]:
        if study.method_name == "scaffold" or (study.method_name, study.plan.seed) == ("fedprox", 0):
            return rows
        return [*rows, *(replace(row, metric="hd95", value=10 * row.value) for row in rows)]


def test_a_run_without_a_metric_is_left_out_of_its_table_only(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "simulation", SomeDistances(lambda study: (flat(0.5), flat(0.5))))
    head = 'methods = ["fedavg", "fedprox", "scaffold"]\nseeds = [0, 1]\nmetrics = ["dice", "hd95", "hd95_mm"]'
    rest = '[methods.scaffold]\n"local.optimizer" = "sgd"\n"local.momentum" = 0.0\n'
    dice, hd95, millimetres = run_suite(write_suite(tmp_path, federation, head, rest), tmp_path / "runs").tables
    assert [(line.name, line.count) for line in dice.comparison.lines] == [
        ("FedAvg", 2), ("FedProx", 2), ("SCAFFOLD", 2),
    ]  # fmt: skip
    assert [(line.name, line.count) for line in hd95.comparison.lines] == [("FedAvg", 2), ("FedProx", 1)]
    assert hd95.differences["FedProx"].by_seed == {1: pytest.approx(0.0)}
    notes = " ".join(hd95.notes())
    assert "No such score, and so left out: FedProx (seed 0), SCAFFOLD (seeds 0, 1)." in notes
    assert "Not finished" not in notes and "Fewer than" not in notes
    assert not millimetres.comparison.lines and "FedAvg (seeds 0, 1)" in millimetres.to_markdown()


def test_a_seed_without_a_site_mean_has_no_difference(
    tmp_path: Path, federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At seed 0 FedProx has distances outside the federation only."""

    class OutsideOnly(FakeRuns):
        def rows(self, study: Study, rows: list[ScoreRow]) -> list[ScoreRow]:
            far = [replace(row, metric="hd95", value=10 * row.value) for row in rows]
            if (study.method_name, study.plan.seed) == ("fedprox", 0):
                far = [replace(row, outside=True) for row in far if row.site == "cid"]
            return [*rows, *far]

    monkeypatch.setattr(running, "simulation", OutsideOnly(lambda study: (flat(0.5), flat(0.5))))
    head = 'methods = ["fedavg", "fedprox"]\nseeds = [0, 1]\nmetrics = ["hd95"]'
    (table,) = run_suite(write_suite(tmp_path, federation, head), tmp_path / "runs").tables
    assert table.differences["FedProx"].by_seed == {1: pytest.approx(0.0)}


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
    assert "about a second left" in teller.words[-1]
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
