"""The suites in studies/: they are sound, and the paper's figures are copied right."""

from __future__ import annotations

import shutil
import statistics
import tomllib
from pathlib import Path

import pytest

from consilium.data.phantoms import write_phantom
from consilium.suites import load_suite
from consilium.suites.planning import Planned, candidates, reference, rows, study_of, trials, without
from tests.toy import write_toy

STUDIES = Path(__file__).parents[2] / "studies"
SUITES = sorted(STUDIES.glob("fedsm_table*.toml"))
APPLE = sorted([*STUDIES.glob("apple_table*.toml"), STUDIES / "apple_small.toml"])
APPLE_PAPER = tomllib.loads((STUDIES / "apple_paper.toml").read_text(encoding="utf-8"))
PAPER = tomllib.loads((STUDIES / "fedsm_paper.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_is_sound(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert path.read_text(encoding="utf-8").startswith(f"# consilium suite studies/{path.name}\n")
    suite = load_suite(path)
    assert suite.papers
    quick_turns = path.stem == "fedsm_table5_11_12_quick"  # every site in turn is enough for minutes
    assert len(suite.heading.seeds) == (1 if quick_turns else 3)
    assert (suite.phantom is not None) == path.stem.endswith("_quick")
    monkeypatch.chdir(tmp_path)
    kind = "prostate" if "table4" in path.stem else "retina"
    first = tmp_path / "any"  # any federation of the right dimensions will do to make the studies
    write_phantom("prostate", first, 18, 32, 0) if kind == "prostate" else write_toy(first)
    for seed in suite.heading.seeds:
        shutil.copytree(
            first, tmp_path / (f"{suite.phantom.to}-s{seed}" if suite.phantom else f"data/{kind}{seed or ''}")
        )
    for row in rows(suite):
        for planned in trials(suite, row):
            study_of(suite, planned)
    assert reference(suite).method == (
        "fedavg" if path.stem.split("_")[1] in ("table3", "table4", "table5", "table9") else "fedsm"
    )


@pytest.mark.parametrize("path", APPLE, ids=lambda path: path.stem)
def test_an_apple_suite_is_sound(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every study can be made, and every method makes as many steps: adaptation counts as the rounds it replaces."""
    assert path.read_text(encoding="utf-8").startswith(f"# consilium suite studies/{path.name}\n")
    suite = load_suite(path)
    assert suite.papers and (suite.phantom is not None) == path.stem.endswith("_quick")
    monkeypatch.chdir(tmp_path)
    write_phantom("digits", tmp_path / "any", 200, 8, sites=3)  # any classification will do to make the studies
    for to in suite.grid["data.federation"]:
        name = f"{to}-s0" if suite.phantom else to
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(tmp_path / "any")
    epochs = set()
    first = suite.grid["data.federation"][0]
    for row in (row for row in rows(suite) if row.settings["data.federation"] == first):
        for chosen in candidates(suite, row)[:: max(1, len(candidates(suite, row)) - 1)]:  # first and last
            study = study_of(suite, Planned(row, chosen, 0))
            epochs.add(study.plan.rounds * study.local.epochs + getattr(study.method, "finetune_epochs", 0))
    assert len(epochs) == 1, epochs
    names = list(dict.fromkeys(without(row, "data.federation").name for row in rows(suite)))
    assert len(names) == {"table1": 10, "small": 10, "table2": 10, "table3": 1}[path.stem.split("_")[1]]


def test_the_papers_budget_of_eleven_is_no_budget() -> None:
    """Its tables 1 and 2 print these rows twice; a digit copied wrongly would show."""
    one, two = APPLE_PAPER["table1"]["rows"], APPLE_PAPER["table2"]["rows"]
    assert (one["FedFomo"], one["APPLE, μ = 0"]) == (two["FedFomo, M = 11"], two["APPLE, M = 11"])


def test_the_two_forms_run_the_same_methods_and_stand_beside_the_same_tables() -> None:
    for quick in (path for path in SUITES if path.stem.endswith("_quick")):
        one, two = load_suite(quick), load_suite(quick.with_stem(quick.stem.removesuffix("_quick")))
        assert (list(one.kinds), one.papers, one.grid) == (list(two.kinds), two.papers, two.grid)


@pytest.mark.parametrize("table", ["table3", "table4", "table6", "table9", "table10", "table12"])
def test_the_papers_client_average_is_the_mean_of_its_clients(table: str) -> None:
    """A digit copied wrongly would show; 0.001, because the paper's own figures are rounded means of three runs."""
    for name, values in PAPER[table]["rows"].items():
        assert statistics.fmean(values[:6]) == pytest.approx(values[6], abs=1e-3), name


@pytest.mark.parametrize("table", ["table5", "table11"])
def test_the_papers_selection_frequencies_sum_to_one(table: str) -> None:
    for name, values in PAPER[table]["rows"].items():
        assert sum(float(value or 0) for value in values[1:8]) == pytest.approx(1, abs=0.011), name


def test_table_3_is_the_mean_of_tables_9_and_10() -> None:
    for name, values in PAPER["table9"]["rows"].items():
        mean = [(a + b) / 2 for a, b in zip(values, PAPER["table10"]["rows"][name], strict=True)]
        assert mean == pytest.approx(PAPER["table3"]["rows"][name], abs=1.5e-2), name


def test_the_documented_file_is_a_suite(tmp_path: Path) -> None:
    text = (STUDIES.parent / "docs" / "suites.md").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    shutil.copy(STUDIES / "fedsm_quick_base.toml", tmp_path)
    suite = load_suite(tmp_path / "mine.toml")
    assert [row.method for row in rows(suite)].count("fedsm") == 5
