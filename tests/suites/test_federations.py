"""A grid over federations: a line per method, a column per federation, and phantoms cut in several ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consilium.data.site_folder import read_federation
from consilium.errors import StudyError
from consilium.study import Study
from consilium.suites import load_suite, run_suite, running
from consilium.suites.drawing import missing
from consilium.suites.federations import short_names
from consilium.suites.planning import rows
from consilium.suites.running import outlook
from tests.suites.bench import FakeRuns, Scores, write_suite
from tests.toy import write_toy

GRID = '[grid]\n"data.federation" = ["data/east", "data/west"]\n"method.mu" = [0.1, 1.0]\n'
PAPER = '[paper]\ncaption = "Table 1, in %"\ndigits = 1\ncolumns = ["east", "west"]\nrows = {Theirs = [51.44, ""]}\n'
PHANTOM = '[phantom]\nkind = "digits"\nto = "drawn"\ncases = 400\nsize = 8\npartitions = ["pathological", "practical"]'


def suite_of_two(tmp_path: Path, rest: str) -> Path:
    for name in ("east", "west"):
        write_toy(tmp_path / "data" / name)
    path = write_suite(tmp_path, tmp_path, 'methods = ["fedavg", "fedprox"]\nseeds = [0, 1]', rest)
    path.write_text(path.read_text().replace(f'[base.data]\nfederation = "{tmp_path}"\n', ""))
    return path


def scores(study: Study) -> tuple[Scores, Scores]:
    """East is 0.2 easier than west, FedProx 0.1 better than FedAvg with its larger μ, a seed adds 0.02."""
    easy = 0.2 if Path(study.data.federation).name == "east" else 0.0
    better = 0.1 if getattr(study.method, "mu", 0.0) == 1.0 else 0.0
    value = 0.5 + easy + better + 0.02 * study.plan.seed
    return {"ada": [value], "bea": [value]}, {"ada": [value, value], "bea": [value - 0.1, value - 0.1]}


def test_methods_by_federations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = suite_of_two(tmp_path, GRID + PAPER)
    monkeypatch.setattr(running, "simulation", FakeRuns(scores, "accuracy"))
    result = run_suite(path, tmp_path / "runs", workers=0)
    assert result.tables == ()
    assert [table.figure for table in result.federations] == ["best", "bmcta", "last", "difference"]
    best, bmcta, _, gap = result.federations
    assert [[cell.text for cell in line] for line in best.grid()] == [
        ["method", "east", "west"],
        ["FedAvg", "0.6600 ± 0.0141", "0.4600 ± 0.0141"],
        ["FedProx (mu 0.1)", "0.6600 ± 0.0141", "0.4600 ± 0.0141"],
        ["FedProx (mu 1.0)", "0.7600 ± 0.0141", "0.5600 ± 0.0141"],
    ]
    assert bmcta.lines["FedAvg"] == best.lines["FedAvg"] and "chosen on the test cases" in bmcta.title
    assert [[cell.text for cell in line][1] for line in gap.grid()[1:]] == [
        "+0.0000 ± 0.0000 (+0.0000 to +0.0000)", "+0.1000 ± 0.0000 (+0.1000 to +0.1000)",
    ]  # fmt: skip
    text = result.to_markdown()
    assert "| Theirs | 51.4 | – |" in text and "the paper's figures (their data, their machines)" in text
    lines = json.loads(json.dumps(result.to_json()))["federations"][0]["lines"]
    assert lines[0]["federations"]["data/west"]["value"] == pytest.approx(0.46)


def test_sites_with_one_test_case_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def few(study: Study) -> tuple[Scores, Scores]:
        valid, test = scores(study)
        return valid, {**test, "bea": test["bea"][:1]} if Path(study.data.federation).name == "east" else test

    monkeypatch.setattr(running, "simulation", FakeRuns(few))
    gap = run_suite(suite_of_two(tmp_path, GRID), tmp_path / "runs", workers=0).federations[-1]
    assert gap.figure == "difference"
    assert [note for note in gap.notes if note.startswith("One test case only")] == [
        "One test case only: bea (east). Its own spread is unknown; the interval takes that of the other sites' cases."
    ]


def test_one_row_is_compared_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = suite_of_two(tmp_path, '[grid]\n"data.federation" = ["data/east", "data/west"]\n')
    path.write_text(path.read_text().replace('["fedavg", "fedprox"]', '["fedavg"]'))
    monkeypatch.setattr(running, "simulation", FakeRuns(scores, "accuracy"))
    result = run_suite(path, tmp_path / "runs", workers=0)
    assert [table.figure for table in result.federations] == ["best", "bmcta", "last"]


def test_a_row_is_compared_once_the_reference_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "simulation", FakeRuns(scores))
    path = suite_of_two(tmp_path, GRID)
    first = run_suite(path, tmp_path / "runs", workers=0, only=["fedprox"])
    assert [table.figure for table in first.federations] == ["best", "last"]
    both = run_suite(path, tmp_path / "runs", workers=0)
    assert [table.figure for table in both.federations] == ["best", "last", "difference"]


def test_a_column_that_is_not_finished_is_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = suite_of_two(tmp_path, GRID)

    def only_east(study: Study) -> tuple[Scores, Scores]:
        if Path(study.data.federation).name == "west":
            raise StudyError("west is closed")
        return scores(study)

    monkeypatch.setattr(running, "simulation", FakeRuns(only_east))
    best = run_suite(path, tmp_path / "runs", workers=0).federations[0]
    assert [cell.text for cell in best.grid()[1]] == ["FedAvg", "0.6600 ± 0.0141", "–"]
    assert "Not finished and left out: FedAvg (federation data/west)" in best.notes[1]


def test_choices_stand_in_a_table_beside_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rest = '[grid]\n"data.federation" = ["data/east", "data/west"]\n[choose]\n"method.mu" = [0.1, 1.0]\n'
    paper = PAPER.replace("[paper]", '[paper]\nabout = "choices"')
    monkeypatch.setattr(running, "simulation", FakeRuns(scores))
    result = run_suite(suite_of_two(tmp_path, rest + paper), tmp_path / "runs", workers=0)
    *_, gap, chosen = result.federations
    assert (chosen.figure, gap.papers, len(chosen.papers)) == ("chosen", (), 1)
    assert [[cell.text for cell in line] for line in chosen.grid()] == [
        ["setting", "east", "west"], ["FedProx: mu", "1.0", "1.0"],
    ]  # fmt: skip
    assert chosen.notes == ()  # two values are no search


def test_a_choice_at_an_end_is_told_with_its_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rest = '[grid]\n"data.federation" = ["data/east", "data/west"]\n[choose]\n"method.mu" = [0.01, 0.1, 1.0]\n'
    monkeypatch.setattr(running, "simulation", FakeRuns(scores))
    (note,) = run_suite(suite_of_two(tmp_path, rest), tmp_path / "runs", workers=0).federations[-1].notes
    assert note.endswith("FedProx (federation data/east): mu 1.0, the largest; "
                         "FedProx (federation data/west): mu 1.0, the largest.")  # fmt: skip


def test_federations_of_the_same_name_keep_their_paths() -> None:
    assert short_names(["a/x", "b/y"]) == {"a/x": "x", "b/y": "y"}
    assert short_names(["a/x", "b/x"]) == {"a/x": "a/x", "b/x": "b/x"}


def test_digits_are_drawn_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = suite_of_two(tmp_path, PHANTOM)
    assert [p.state for p in outlook(path)] == ["to do"] * 8  # two methods, two federations, two seeds
    suite = load_suite(path)
    assert [row.settings for row in rows(suite)][:2] == [
        {"data.federation": "drawn-pathological"}, {"data.federation": "drawn-practical"},
    ]  # fmt: skip
    for drawing in missing(suite):
        drawing.draw()
    assert missing(suite) == []
    held = {
        name: [len({case.label for case in site.cases}) for site in read_federation(tmp_path / name).sites.values()]
        for name in ("drawn-pathological", "drawn-practical")
    }
    assert held == {"drawn-pathological": [2] * 12, "drawn-practical": [10] * 12}
    path.write_text(path.read_text().replace("cases = 400", "cases = 410"))
    with pytest.raises(StudyError, match="drawn-pathological was drawn as"):
        missing(load_suite(path))


def test_federations_are_named_or_drawn_not_both(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"\[grid\] names federations and the suite draws them"):
        load_suite(suite_of_two(tmp_path, GRID + PHANTOM))
