"""Sites left out in turn: one line per method, a column per unseen site, and whom the selector asks there."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from consilium.errors import StudyError
from consilium.reports.reading import read_run
from consilium.reports.tables import SITE_MEAN, Column
from consilium.scores.views import by_case
from consilium.suites import load_suite, run_suite
from consilium.suites.planning import Planned, rows, study_of
from tests.suites.bench import Teller, write_suite

GRID = '[grid]\n"study.leave_out" = [["ada"], ["bea"]]'
PAPER = """
[paper]
caption = "Table 5"
about = "selection"
columns = ["global model"]
[paper.rows]
"Client 1" = ["0.02"]
"""


def test_a_site_left_out_is_taken_from_the_base_sites(tmp_path: Path, federation: Path) -> None:
    path = write_suite(tmp_path, federation, 'methods = ["fedavg"]', GRID)
    path.write_text(path.read_text().replace("[base.study]", '[base.study]\nsites = ["cid", "bea", "ada"]'))
    suite = load_suite(path)
    studies = [study_of(suite, Planned(row, {}, 0)) for row in rows(suite)]
    assert [(s.plan.sites, s.plan.leave_out) for s in studies] == [
        (("cid", "bea"), ("ada",)),
        (("cid", "ada"), ("bea",)),
    ]


def test_a_site_in_both_lists_of_the_base_is_still_a_mistake(tmp_path: Path, federation: Path) -> None:
    path = write_suite(tmp_path, federation, 'methods = ["fedavg"]')
    both = '[base.study]\nsites = ["bea", "ada"]\nleave_out = ["ada"]'
    path.write_text(path.read_text().replace("[base.study]", both))
    with pytest.raises(StudyError, match="'ada' is in both sites and leave_out"):
        run_suite(path, tmp_path / "runs", workers=0)


@pytest.mark.slow
def test_the_tables_of_unseen_sites(tmp_path: Path, federation: Path) -> None:
    trained = (
        '\n[methods.fedsm]\n"method.selector_training" = "synchronised"'  # the closed form asks only the global model
    )
    path = write_suite(tmp_path, federation, 'methods = ["fedavg", "fedsm"]', GRID + trained + PAPER)
    teller = Teller()
    result = run_suite(path, tmp_path / "runs", workers=0, watch=teller)
    (table,) = result.tables
    (asked,) = result.selections

    assert [line.name for line in table.comparison.lines] == ["FedAvg", "FedSM: its global model", "FedSM"]
    assert [column.title for column in table.comparison.columns][:3] == ["ada (outside)", "bea (outside)", "site mean"]
    for line in table.comparison.lines:
        ends, entrant = {}, table.entrants[line.name]
        for site, standing in zip(("ada", "bea"), entrant.standings, strict=True):
            about = entrant.about(standing.runs[0])
            entry = standing.runs[0].entry(about.model, about.metric, about.label)
            ends[site] = entry["outside"][site]
            assert site not in entry["sites"]
            assert line.cells[Column("outside", site)].value == pytest.approx(ends[site])
        assert line.cells[SITE_MEAN].value == pytest.approx(statistics.fmean(ends.values()))
    gap = table.differences["FedSM"]
    fedavg, _, fedsm = (line.cells[SITE_MEAN].value for line in table.comparison.lines)
    assert gap.value == pytest.approx(fedsm - fedavg)
    assert gap.cases == 6  # three test cases at each unseen site

    assert [(line.site, line.kind) for line in asked.lines[:3]] == [
        ("ada", "γ = 0"), ("ada", "γ of the run"), ("ada", "oracle_gamma"),
    ]  # fmt: skip
    for zero, run, oracle in (asked.lines[:3], asked.lines[3:]):
        assert "global" not in zero.shares and zero.gammas == (0.0,)
        assert sum(zero.shares.values()) == sum(run.shares.values()) == pytest.approx(1)
        assert oracle.score.value >= max(zero.score.value, run.score.value) - 1e-9
        cell = table.comparison.lines[2].cells[Column("outside", run.site)]
        assert run.score.value == pytest.approx(cell.value, abs=1e-6)  # the sweep at the run's γ is the run
    texts = result.to_markdown()
    assert "oracle_gamma" in texts and "### Table 5: the paper's figures" in texts
    assert json.loads(json.dumps(result.to_json()))["selections"][0]["lines"][0]["kind"] == "γ = 0"
    assert sum("at every γ" in word for word in teller.words) == 2
    teller.words.clear()
    again = run_suite(path, tmp_path / "runs", workers=0, watch=teller)
    assert (teller.words, again.to_json()) == ([], result.to_json())


def test_a_half_run_suite_has_no_mean_over_other_sites(tmp_path: Path, federation: Path) -> None:
    """One of two turns is finished: its column is shown, and no mean that others' means could be held against."""
    path = write_suite(
        tmp_path, federation, 'methods = ["fedavg"]', '[grid]\n"study.leave_out" = [["ada"], ["nobody"]]'
    )
    result = run_suite(path, tmp_path / "runs", workers=0)
    assert [failure.why.split(";")[0] for failure in result.failed] == ["there is no site 'nobody'"]
    (line,) = result.tables[0].comparison.lines
    assert set(line.cells) == {Column("outside", "ada")}
    view = read_run(next(path for path in (tmp_path / "runs").iterdir() if (path / "summary.json").exists()))
    assert by_case(view.best_rows, "global", "dice", "mean", "test", outside=True).keys() == {"ada"}
