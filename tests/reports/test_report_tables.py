"""The comparison table: who stands where, and with which numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from consilium.errors import RunError
from consilium.methods import METHODS
from consilium.reports.comparing import compare
from consilium.reports.grouping import repeated
from consilium.reports.page import write_page
from consilium.reports.reading import FIXED_STATES, RunView, read_run
from consilium.reports.tables import POOLED, SITE_MEAN, Cell, Column, TextCell, rich_table, to_fit
from consilium.suites.rendering import rich_tables

SMALL = {"hk": (3, 0.8, 0.75), "basel": (4, 0.7, 0.72)}


def test_lines_are_those_of_the_paper(four: list[RunView]) -> None:
    table = compare(four)
    assert [(line.name, line.kind) for line in table.lines] == [
        ("Pooled (bound)", "bound"),
        ("basel local", "elsewhere"),
        ("hk local", "elsewhere"),
        ("Local (own site)", "local"),
        ("FedAvg", "federated"),
        ("FedSM: its global model", "part"),
        ("FedSM", "federated"),
    ]
    assert [column.title for column in table.columns] == ["basel", "hk", "site mean", "pooled cases"]


def test_numbers_are_those_of_the_summary(four: list[RunView]) -> None:
    fedsm = compare(four).lines[-1]
    assert four[3].summary is not None
    headline = four[3].summary["headline"]
    assert fedsm.cells[SITE_MEAN] == Cell(headline["site_mean"])
    assert fedsm.cells[POOLED] == Cell(headline["pooled"])
    assert fedsm.cells[Column("site", "hk")] == Cell(headline["sites"]["hk"])
    assert fedsm.interval is not None
    assert fedsm.interval[0] < headline["site_mean"] < fedsm.interval[1]


def test_a_local_model_elsewhere(four: list[RunView]) -> None:
    basel, hk, own = compare(four).lines[1:4]
    site = Column("site", "hk")
    assert own.cells[site] == hk.cells[site]
    assert basel.cells[site].value < hk.cells[site].value
    both = [basel.cells[Column("site", name)].value for name in SMALL]
    assert basel.cells[SITE_MEAN].value == pytest.approx(sum(both) / 2)
    assert basel.cells[POOLED].value == pytest.approx((3 * both[0] + 4 * both[1]) / 7)


def test_bold_is_the_best_federated_method(four: list[RunView]) -> None:
    table = compare(four)
    assert table.best(SITE_MEAN) == {"FedSM"}
    assert compare(four[:3]).best(SITE_MEAN) == frozenset()  # one alone leads nothing
    text = table.to_markdown()
    assert f"**{table.lines[-1].cells[SITE_MEAN].value:.4f}**" in text
    assert f"**{table.lines[0].cells[SITE_MEAN].value:.4f}**" not in text


@pytest.mark.parametrize("prefix", ["", "clean_"])
@pytest.mark.parametrize(
    ("metric", "leader"),
    [("dice", "FedSM"), ("false_positive_volume", "FedAvg"), ("missed", "FedAvg"), ("volume_error_abs", "FedAvg"),
     ("hd95_mm", "FedAvg"), ("volume_error", None)],
)  # fmt: skip
def test_bold_goes_by_what_is_good_in_a_score(
    four: list[RunView], metric: str, leader: str | None, prefix: str
) -> None:
    """FedSM has the higher figures. A signed error is neither better high nor better low: nothing is bold."""
    table = replace(compare(four), metric=prefix + metric)
    assert table.best(SITE_MEAN) == ({leader} if leader else frozenset())


def test_seeds_become_mean_and_deviation(run_folder: Callable[..., Path]) -> None:
    runs = [read_run(run_folder("fedavg", sites=SMALL, seed=seed)) for seed in (0, 1, 2)]
    (line,) = compare(runs).lines
    values = [run.summary["headline"]["site_mean"] for run in runs if run.summary]
    mean = sum(values) / 3
    assert line.count == 3
    assert line.interval is None
    assert line.cells[SITE_MEAN].value == pytest.approx(mean)
    assert line.cells[SITE_MEAN].sd == pytest.approx((sum((v - mean) ** 2 for v in values) / 2) ** 0.5)
    assert "| FedAvg | 3 | " in compare(runs).to_markdown()


def test_other_settings_are_another_line(run_folder: Callable[..., Path]) -> None:
    runs = [read_run(run_folder("fedsm", sites=SMALL, settings={"pull": pull})) for pull in (0.7, 0.25)]
    lines = [line.name for line in compare(runs).lines if line.kind == "federated"]
    assert lines == ["FedSM (pull 0.7)", "FedSM (pull 0.25)"]


def test_a_run_named_twice_counts_once(four: list[RunView]) -> None:
    assert compare([four[2], read_run(four[2].folder)]).lines[0].count == 1


def test_outside_sites_have_their_own_columns(run_folder: Callable[..., Path]) -> None:
    table = compare([read_run(run_folder("fedavg", sites=SMALL, outside=("hk",)))])
    assert [column.title for column in table.columns] == ["basel", "site mean", "pooled cases", "hk (outside)"]
    cells = table.lines[0].cells
    assert cells[SITE_MEAN].value == cells[Column("site", "basel")].value


def test_json_has_the_promised_keys_and_no_nan(four: list[RunView]) -> None:
    found = json.loads(json.dumps(compare(four).to_json(), allow_nan=False))
    assert [row["method"] for row in found["rows"]] == ["pooled", "local", "fedavg", "fedsm"]
    assert found["rows"][3].keys() >= {"run", "method", "seed", "headline", "interval", "against_first"}
    assert "against_first" not in found["rows"][0]
    gap = found["rows"][2]["against_first"]
    assert gap["difference"] == pytest.approx(
        found["rows"][2]["headline"]["site_mean"] - found["rows"][0]["headline"]["site_mean"]
    )
    assert gap["low"] <= gap["difference"] <= gap["high"]
    assert gap["cases"] == 7


def test_the_terminal_table_loses_no_digit(four: list[RunView]) -> None:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(compare(four).to_rich())
    console.file.close()
    text = console.export_text()
    for line in compare(four).lines:
        assert f"{line.cells[POOLED].value:.4f}" in text


def test_no_interval_without_the_cases_behind_the_mean(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    lines = (folder / "scores.csv").read_text().splitlines(keepends=True)
    (folder / "scores.csv").write_text("".join(line for line in lines if "hk-test-000" not in line))
    assert compare([read_run(folder)]).lines[0].interval is None


def test_unfinished_runs_are_left_out_and_named(run_folder: Callable[..., Path], four: list[RunView]) -> None:
    begun = read_run(run_folder("scaffold", sites=SMALL, finished=False))
    table = compare([*four, begun])
    assert table.unfinished == (begun.name,)
    assert begun.name in table.caption
    with pytest.raises(RunError, match="resume"):
        compare([begun])
    with pytest.raises(RunError, match="no run"):
        compare([])


def test_runs_of_different_tasks_are_refused(run_folder: Callable[..., Path], four: list[RunView]) -> None:
    folder = run_folder("fedavg", sites=SMALL, seed=9)
    summary = json.loads((folder / "summary.json").read_text())
    summary["headline"]["metric"] = "accuracy"
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunError, match="one task at a time"):
        compare([four[2], read_run(folder)])


def about(folder: Path, task: str, labels: list[str]) -> RunView:
    """A run that says what it learns."""
    with (folder / "study.toml").open("a") as file:
        file.write(f'[facts]\ntask = "{task}"\nlabels = {json.dumps(labels)}\ndimensions = 2\n')
    return read_run(folder)


def test_runs_of_different_labels_are_refused(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Both have a mean Dice, but of different things; a page refuses them as a table does, finished or not."""
    eyes = about(run_folder("fedavg", sites=SMALL), "segmentation", ["disc", "cup"])
    organs = about(run_folder("fedsm", sites=SMALL, finished=False), "segmentation", ["liver"])
    words = "segmentation of disc, cup, .* a 2-D segmentation of liver; name runs of one task at a time"
    with pytest.raises(RunError, match=words):
        compare([eyes, organs])
    with pytest.raises(RunError, match=words):
        write_page([eyes, organs], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_means_over_different_sites_are_not_held_against_each_other(run_folder: Callable[..., Path]) -> None:
    fewer = {"hk": SMALL["hk"]}
    runs = [read_run(run_folder("fedavg", sites=SMALL)), read_run(run_folder("fedsm", sites=fewer))]
    table = compare(runs)
    assert [column.title for column in table.columns] == ["basel", "hk", "site mean", "pooled cases"]
    assert table.grid()[2][1].text == "–"  # FedSM was not scored in Basel
    assert table.best(SITE_MEAN) == table.best(POOLED) == frozenset()
    assert table.best(Column("site", "hk")) == {"FedSM"}
    assert "do not have the same sites" in table.caption


def test_sites_with_other_cases_are_named(run_folder: Callable[..., Path]) -> None:
    folders = [run_folder(method, sites=SMALL) for method in ("fedavg", "fedsm")]
    for folder, table in zip(folders, ("a1", "b2")):
        origin = json.loads((folder / "origin.json").read_text())
        origin["sites"] = {"hk": {"table": table}, "basel": {"table": "c3"}}
        (folder / "origin.json").write_text(json.dumps(origin))
    table = compare([read_run(folder) for folder in folders])
    assert table.unlike == ("hk",)
    assert "Not the same cases in all runs, and so not to be compared: hk." in table.caption
    assert table.best(Column("site", "hk")) == table.best(SITE_MEAN) == frozenset()
    assert table.best(Column("site", "basel")) == {"FedAvg"}


def test_markdown_escapes_bars(run_folder: Callable[..., Path]) -> None:
    text = compare([read_run(run_folder("fedavg", sites={"a|b": (2, 0.8, 0.8)}))]).to_markdown()
    assert "a\\|b" in text


# -------------------------------------------------------------------------------------------------- fair tables


def test_a_super_models_own_global_model_stands_beside_fedavg(four: list[RunView]) -> None:
    """What FedSM gains over FedAvg is routing and whatever else differs; its global model tells them apart."""
    table = compare(four)
    part = next(line for line in table.lines if line.kind == "part")
    assert four[3].summary is not None
    told = four[3].summary["best"]["scores"]["global"]["dice"]["mean"]
    assert part.cells[SITE_MEAN] == Cell(told["site_mean"])
    assert part.interval is not None and part.interval[0] < told["site_mean"] < part.interval[1]
    assert part.name not in table.best(SITE_MEAN)
    assert "own global model is what to hold against FedAvg" in table.caption
    assert f"| FedSM: its global model | {part.cells[Column('site', 'basel')].value:.4f}" in table.to_markdown()


def with_state(folder: Path, state: str) -> RunView:
    study = folder / "study.toml"
    study.write_text(study.read_text().replace("[local]", f'[local]\noptimizer_state = "{state}"'), encoding="utf-8")
    return read_run(folder)


@pytest.fixture
def mixed(run_folder: Callable[..., Path]) -> list[RunView]:
    """FedAvg fresh, FedSM kept, as version 0.1 had them; FedProx both ways; SCAFFOLD, which fixes it."""
    states = [("fedavg", "fresh"), ("fedsm", "kept"), ("fedprox", "kept"), ("scaffold", "fresh")]
    runs = [with_state(run_folder(method, sites=SMALL), state) for method, state in states]
    return [*runs, with_state(run_folder("fedprox", sites=SMALL, settings={"mu": 0.01}), "fresh")]


@pytest.mark.usefixtures("undrawn")
def test_no_table_mixes_optimiser_states(mixed: list[RunView], tmp_path: Path) -> None:
    whole = compare(mixed)
    tables = {table.state: [row[0].text for row in table.grid()[1:]] for table in whole.apart()}
    assert whole.best(SITE_MEAN) == frozenset()
    assert [name.partition(" (")[0] for name in tables["fresh"]] == ["FedAvg", "SCAFFOLD", "FedProx"]
    kept = [name.partition(" (")[0] for name in tables["kept"]]
    assert kept == ["FedSM: its global model", "FedSM", "FedProx", "SCAFFOLD †"]
    text = whole.to_markdown()
    assert text.count("at the round best on validation, optimiser state") == 2
    assert "Optimisers keep their state from round to round. † fixes its optimiser's state otherwise" in text
    assert "Optimisers start every round without a state." in text
    assert {line["optimizer_state"] for line in whole.to_json()["lines"]} == {"kept", "fresh"}
    write_page(mixed, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("at the round best on validation, optimiser state") == 2
    assert "FedSM: its global model" in page
    assert "Optimiser state fresh: Over" in page and "Optimiser state kept: Over" in page


def test_one_state_is_one_table_and_says_which(mixed: list[RunView]) -> None:
    (table,) = compare(mixed[:1] + mixed[3:4]).apart()
    assert "Optimisers start every round without a state." in table.caption
    assert "†" not in table.to_markdown()
    assert table.best(SITE_MEAN)


def test_methods_that_fix_the_state_are_known_to_reports() -> None:
    assert {name: kind.optimizer_state for name, kind in METHODS.items() if kind.optimizer_state} == FIXED_STATES


def test_a_run_of_0_1_has_the_state_it_was_trained_with(run_folder: Callable[..., Path]) -> None:
    facts = '\n[facts]\ntask = "segmentation"\nlabels = ["disc", "cup"]\ndimensions = 2\nchannels = 3\n'
    plan = "score_every = 5\nleave_out = []\naway = {}\nsites_per_round = 0\nmin_sites = 1\ndeadline = 3600\n"
    plan += 'keep_rounds = "last-two"\n'  # with seed: what a run writes of [study], whether it was given or not
    states = {}
    for method in ("fedavg", "local"):
        folder = run_folder(method, sites=SMALL)
        study = folder / "study.toml"
        study.write_text(study.read_text().replace("[study]\n", f"[study]\n{plan}") + facts, encoding="utf-8")
        states[method] = read_run(folder).optimizer_state
    assert states == {"fedavg": "fresh", "local": "kept"}


def test_of_many_sites_a_narrow_terminal_shows_a_row_each(run_folder: Callable[..., Path]) -> None:
    """Twelve columns of numbers do not fit into 100; broken numbers would be other numbers."""
    sites = {f"site{i:02d}": (3, 0.8, 0.75) for i in range(1, 13)}
    table = compare([read_run(run_folder(method, sites=sites)) for method in ("fedavg", "fedsm")])
    assert [column.title for column in table.columns] == ["site mean", "pooled cases", *sites]  # the means first
    shown = {}
    for width in (100, 180):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table.to_rich(width))
        shown[width] = [line.split() for line in capture.get().splitlines() if line.strip()]
    assert [row[0] for row in shown[100] if row[0] in sites] == list(sites)
    assert ["method", "FedAvg"] in [row[:2] for row in shown[100]]
    assert [row[0] for row in shown[180] if row[0] in ("FedAvg", "FedSM", *sites)] == ["FedAvg", "FedSM"]


def test_a_table_that_fits_no_better_stays(four: list[RunView]) -> None:
    grid = compare(four).grid()
    assert to_fit(grid, 200) is grid
    assert to_fit([row[:2] for row in grid], 10)[0][0].text == "method"
    assert len(to_fit([row[:2] for row in grid], 10)) == len(grid)


@pytest.mark.parametrize(("renderer", "least"), [("report", 65), ("suite", 61)])
def test_numbers_are_whole_wherever_a_table_fits_in_some_way(renderer: str, least: int) -> None:
    """`least`: names of 19 letters and two columns of 18, with margins of 3 each and 1, or 2 each."""
    heads = ["method", "against FedAvg-long", "95 % interval", *(f"site{i:02d}" for i in range(12))]
    rows = [[f"Fed{j}", "+0.1111", "+0.2222 to +0.3333", *["0.1234"] * 12] for j in range(2)]
    grid = [[TextCell(text) for text in row] for row in (heads, *rows)]
    for width in range(least, 200):
        made = rich_table("t", to_fit(grid, width)) if renderer == "report" else rich_tables("t", grid, [], [])[0]
        console = Console(width=width)
        with console.capture() as capture:
            console.print(made)
        shown = capture.get()
        assert (shown.count("0.1234"), shown.count("+0.2222 to +0.3333")) == (24, 2), width
        assert max(map(len, shown.splitlines())) <= width


def test_the_same_run_again_is_no_second_seed(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    first, other = (run_folder("fedavg", sites=SMALL, seed=seed) for seed in (0, 1))
    copy = shutil.copytree(first, tmp_path / "copies" / first.name)
    renamed = shutil.copytree(first, tmp_path / "copies" / "another-name")
    text = (renamed / "study.toml").read_text()
    (renamed / "study.toml").write_text(re.sub('^name = ".*"', 'name = "another"', text, count=1, flags=re.M))
    both = compare([read_run(run) for run in (first, other)])
    again = compare([read_run(run) for run in (first, copy, renamed, other)])
    assert again.lines == both.lines and again.lines[0].count == 2
    kept = f"runs/{first.name}"
    assert again.repeated == ((f"copies/{first.name}", kept), ("another-name", first.name))
    assert "counts once" in again.caption and len(again.to_json()["rows"]) == 4
    assert compare([read_run(first), read_run(copy)]).lines[0].interval is not None


def test_the_same_seed_with_other_scores_is_a_row_of_its_own(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Noise drawn anew, another version, rules of hospitals: no repeat, and no second seed either."""
    first, other = (run_folder("fedavg", sites=SMALL, seed=seed) for seed in (0, 1))
    changed = shutil.copytree(first, tmp_path / "later" / first.name)
    summary = json.loads((changed / "summary.json").read_text())
    summary["best"]["scores"]["global"]["dice"]["mean"]["site_mean"] = 0.5
    (changed / "summary.json").write_text(json.dumps(summary))
    for order in ((first, other, changed), (changed, other, first)):  # seeds of one folder stay together
        table = compare([read_run(run) for run in order])
        assert not table.repeated
        lines = {(line.count, line.name) for line in table.lines}
        assert lines == {(2, "FedAvg (runs)"), (1, f"FedAvg ({first.name})")}
    beside = shutil.copytree(changed, first.with_name("again"))
    names = [line.name for line in compare([read_run(run) for run in (first, other, beside)]).lines]
    assert names == [f"FedAvg ({run.name})" for run in (first, other, beside)]


def test_an_unfinished_run_is_no_repeat(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    under_way = run_folder("fedavg", sites=SMALL, finished=False)
    copy = shutil.copytree(under_way, tmp_path / "copies" / under_way.name)
    assert repeated([read_run(under_way), read_run(copy)]) == {}


def test_an_unfinished_run_does_not_take_the_place_of_its_seed(run_folder: Callable[..., Path]) -> None:
    """A run that was interrupted, the same again beside it, and another seed."""
    runs = [run_folder("fedavg", sites=SMALL, seed=seed) for seed in (0, 1)]
    stopped = shutil.copytree(runs[0], runs[0].with_name("a-stopped-run"))
    (stopped / "summary.json").unlink()
    (line,) = compare([read_run(run) for run in (stopped, *runs)]).lines
    assert (line.name, line.count) == ("FedAvg", 2)


def test_how_often_was_scored_is_no_name_where_something_else_differs(run_folder: Callable[..., Path]) -> None:
    runs = [run_folder("fedavg", sites=SMALL, settings={"shares": shares}) for shares in ("cases", "uniform")]
    for run, every in zip(runs, (2, 4)):
        text = (run / "study.toml").read_text()
        (run / "study.toml").write_text(text.replace("seed = 0\n", f"seed = 0\nscore_every = {every}\n"))
    lines = compare([read_run(run) for run in runs]).lines
    assert [line.name for line in lines] == ["FedAvg (shares cases)", "FedAvg (shares uniform)"]
