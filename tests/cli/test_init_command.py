"""`consilium init`: the study it writes loads, runs, and explains itself; mistakes get a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from consilium.data.site_folder import read_federation
from consilium.first_study import Sample, study_text, suggest_method, training_size
from consilium.methods import METHODS
from consilium.study_reading import load_study
from tests.cli.terminal import call, refused


@pytest.mark.usefixtures("no_report")
def test_the_first_study_runs_and_every_line_has_a_comment(federation: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "study.toml"
    done = call("init", "--federation", federation, "--rounds", 1, "--to", file, "--yes")
    assert (done.status, done.out.strip()) == (0, str(file)), done.err
    assert "fedsm" in done.err
    lines = [line for line in file.read_text().splitlines() if " = " in line]
    assert len(lines) > 12
    assert [line for line in lines if "  # " not in line] == []
    changes = ["--set", "task.widths=[4, 8]", "--set", "task.selector_widths=[4]", "--set", "task.augment=[]"]
    ran = call("run", file, "--runs", tmp_path / "runs", "--workers", 0, *changes)
    assert ran.status == 0, ran.err


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_gets_a_study_that_loads(method: str, federation: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    assert call("init", "--federation", federation, "--method", method, "--to", file, "--yes").status == 0
    assert load_study(file).method_name == method


def test_sites_that_annotate_different_labels_get_ufps(organs: Path, federation: Path) -> None:
    assert suggest_method(read_federation(organs)) == "ufps"
    assert suggest_method(read_federation(federation)) == "fedsm"


@pytest.mark.parametrize(
    ("size", "dimensions", "expected"),
    [((64, 64), 2, (64, 64)), ((600, 800), 2, (192, 256)), ((30, 200, 200), 3, (16, 96, 96)), ((28, 28), 2, (28, 28))],
)
def test_training_size_by_hand(size: tuple[int, ...], dimensions: int, expected: tuple[int, ...]) -> None:
    assert training_size(size, dimensions) == expected


@pytest.mark.parametrize(
    ("types", "lowest", "line"),
    [({"uint8"}, 0.0, 'normalise = "unit"'), ({"int16"}, 0.0, "percentiles = [0.5, 99.5]")],
)
def test_the_numbers_decide_how_they_are_scaled(types: set[str], lowest: float, line: str, federation: Path) -> None:
    sample = Sample((64, 64), frozenset(types), lowest, 5)
    text = study_text(read_federation(federation), sample, Path("data"), "fedavg", 100)
    assert line in text
    assert "batch_size = 5" in text


def test_a_terminal_is_asked(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def prompt(question: str, **options: object) -> object:
        asked.append(question.split()[0])
        answers = {"Folder": str(federation), "File": str(tmp_path / "asked.toml")}
        return answers.get(asked[-1], options.get("default"))

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", prompt)
    assert call("init").status == 0
    assert asked == ["Folder", "Method", "Rounds", "File"]
    assert load_study(tmp_path / "asked.toml").plan.rounds == 100


def _unsplit(folder: Path) -> None:
    for table in folder.glob("*/cases.csv"):
        text = table.read_text()
        table.write_text(text.replace(",train,", ",,").replace(",valid,", ",,").replace(",test,", ",,"))


def _no_validation(folder: Path) -> None:
    table = sorted(folder.glob("*/cases.csv"))[0]
    table.write_text(table.read_text().replace(",valid,", ",train,"))


@pytest.mark.parametrize(
    ("spoil", "words"), [(_unsplit, "cases without a split"), (_no_validation, "no validation cases")]
)
def test_missing_splits_are_named(spoil: Callable[[Path], None], words: str, federation: Path, tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    shutil.copytree(federation, folder)
    spoil(folder)
    refused(call("init", "--federation", folder, "--to", tmp_path / "s.toml", "--yes"), words, "consilium check")
    assert not (tmp_path / "s.toml").exists()


def test_mistakes_are_refused(federation: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.toml"
    there.write_text("mine")
    refused(call("init", "--yes"), "--federation is missing")
    refused(call("init", "--federation", federation, "--to", there, "--yes"), "exists already")
    refused(
        call("init", "--federation", federation, "--method", "fedsn", "--to", tmp_path / "a.toml", "--yes"), "fedsm"
    )
    assert there.read_text() == "mine"
    assert not (tmp_path / "a.toml").exists()
