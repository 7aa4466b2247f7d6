"""A user's own code in files beside the study: the five examples of docs/extending.md, and what goes wrong."""

from __future__ import annotations

import csv
import json
import re
import runpy
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilium import extensions, simulation
from consilium.cli.main import app
from consilium.errors import RunError, StudyError
from consilium.export.exporting import export_run
from consilium.extensions import code_hash, code_hashes, named_code, registered
from consilium.hospital import read_hospital
from consilium.run_folder import RunFolder
from consilium.study_reading import load_study
from consilium.toy_federation import write_toy
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`(\w+\.(?:py|toml))`:\n\n```\w+\n(.*?)^```", PAGE, re.S | re.M))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files and the toy federation."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_toy(tmp_path / "data")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path


def consilium(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


def test_the_page_has_its_five_examples() -> None:
    assert set(FILES) == {"mine.py", "mine.toml", "steps.py", "steps.toml", "median.py", "squares.py", "tracker.py"}


@pytest.mark.xdist_group("monai")  # exports use it
def test_a_network_and_a_loss(here: Path) -> None:
    """Trained, reported, exported, used where the file is not; a change of the file is noticed."""
    study = load_study(here / "mine.toml")
    assert sum(p.numel() for p in study.task.network().parameters()) == 6 * 9 + 6 + 2 * 6 + 2  # width = 6
    result = simulation.run(study, here / "runs", workers=0)
    consilium("report", result.folder, "--to", here / "page.html")
    export_run(result.folder, here / "out", check=False)  # the slow tier checks it in a fresh process
    changed = here / "mine.py"
    text = changed.read_text()
    changed.unlink()
    consilium("predict", here / "out", here / "data/ada/images/ada000.png", "--to", here / "masks")
    assert (here / "masks/ada000.png").exists()
    changed.write_text(text.replace("** 2", "** 3"))
    with pytest.raises(RunError, match=r"the plug-in file mine\.py has changed"):
        simulation.run(load_study(here / "mine.toml"), here / "runs", workers=0)


@pytest.mark.slow
def test_an_exported_network_is_checked_in_a_fresh_process(here: Path) -> None:
    result = simulation.run(load_study(here / "mine.toml"), here / "runs", workers=0)
    assert "outputs differ by at most" in consilium("export", result.folder, "--to", here / "out")


def test_an_augmentation_a_score_and_a_step(here: Path) -> None:
    study = load_study(here / "steps.toml")
    result = simulation.run(study, here / "runs", workers=0)
    rows = [row for row in RunFolder.open(result.folder).rows() if row.metric == "own_area_ratio"]
    assert {row.site for row in rows} == {"ada", "bea", "cid"}
    tables = study.tables()
    assert tables["preprocess"]["steps"] == ["steps.py:square_root"]
    moved = here / "moved"
    moved.mkdir()
    for name in ("steps.py", "steps.toml"):
        (here / name).rename(moved / name)
    assert load_study(moved / "steps.toml", [f"data.federation={here / 'data'}"]).hash == study.hash


def test_a_method(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    said = consilium("methods", "median.py:Median")
    assert "every weight is the median over sites" in said
    assert "inertia = 0.0" in said
    assert code_hash(f"{here}/median.py:Median") in said
    kept = consilium("contract", "median.py:Median").splitlines()
    assert len(kept) == 6
    assert all(line.startswith("kept") for line in kept), kept


def test_a_broken_method_is_told_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts its merges in the module: a resumed run is another."""
    monkeypatch.chdir(here)
    counted = "SEEN.append(1)\n        new = Weights({k: t + len(SEEN) / 100 for k, t in middle.items()})"
    Path("forgetful.py").write_text("SEEN = []\n" + FILES["median.py"].replace("new = Weights(middle)", counted))
    done = CliRunner().invoke(app, ["contract", "forgetful.py:Median"])
    assert done.exit_code != 0
    assert "BROKEN  a killed run that is resumed has the same bits" in done.output


def test_a_phantom(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    assert "north" in consilium("phantom", "squares.py:draw", "--to", "squares", "--cases", "9")
    assert len(list(Path("squares/south/images").iterdir())) == 9


@pytest.mark.slow
def test_a_suite_compares_it(here: Path) -> None:
    suite = here / "suite.toml"
    suite.write_text(
        '[suite]\nname = "own"\nmethods = ["fedavg", "median.py:Median"]\nseeds = [0]\n'
        "[base.study]\nrounds = 1\n"
        '[base.data]\nfederation = "data"\n[base.local]\nbatch_size = 8\n'
        '[base.task]\nwidths = [4, 8]\nresidual_units = 0\n'
    )  # fmt: skip
    consilium("suite", suite, "--runs", here / "runs")
    (table,) = here.rglob("table.json")
    assert "median.py:Median" in json.dumps(json.loads(table.read_text()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("task.network='nowhere.py:Net'", "there is no file nowhere.py here or beside the study"),
        ("task.network='mine.py:Nett'", "cannot import"),
        ("task.network='mine.py:Nett'", "there is no 'Nett' in it; did you mean 'Net'?"),
        ("task.loss='mine.py'", "must be one of dice, dice+ce, or your own file.py:name"),
        ("task.scores=['dice']", "'dice' names no function"),
        ("preprocess.steps=['clahe']", "'clahe' names no function"),
        ("task.augment=['blurr']", "there is no 'blurr'"),
        ("method.name='mine.py:Net'", "is not a method"),
        ("task.depth=3", "has no key 'depth'"),
    ],
)
def test_mistakes(here: Path, change: str, sentence: str) -> None:
    with pytest.raises(StudyError, match=re.escape(sentence)):
        load_study(here / "mine.toml", [change]).task  # noqa: B018


def test_a_field_may_not_hide_a_verb(here: Path) -> None:
    (here / "median.py").write_text(FILES["median.py"].replace("inertia", "keep"))
    with pytest.raises(StudyError, match="the field 'keep' hides the function"):
        load_study(here / "mine.toml", ["method.name='median.py:Median'"])


def test_a_file_that_raises_is_a_sentence(here: Path) -> None:
    (here / "mine.py").write_text("import math\n\nraise OSError('no such thing')\n")
    with pytest.raises(StudyError, match=re.escape("OSError: no such thing (line 3).")):
        load_study(here / "mine.toml")


def test_a_hospital_allows_code_by_name_and_hash(here: Path) -> None:
    """Before anything is imported: a listed file runs, a changed one does not, an unlisted one does not."""
    study = load_study(here / "mine.toml")
    full = f"{here}/mine.py:Net"
    place = here / "hospital"
    place.mkdir()
    own = place / "mine.py"
    own.write_text(FILES["mine.py"])
    assert code_hash(full) == code_hash(f"{own}:Net")

    def hospital(code: list[str]) -> Path:
        path = place / "hospital.toml"
        path.write_text(
            f'site = "ada"\ndata = "{here}/data/ada"\nmemory = "memory"\nlabels = ["blob"]\n'
            f"[limits]\ncode = {json.dumps(code)}\n"
        )
        return path

    hashes = [f"mine.py:{name} {code_hash(full)}" for name in ("Net", "focal")]
    here_too = read_hospital(hospital(hashes)).study(study.to_toml())
    assert here_too.code == {"mine.py": str(own)}
    with pytest.raises(PermissionError, match=r"does not allow the code mine\.py:focal"):
        read_hospital(hospital(hashes[:1])).study(study.to_toml())
    own.write_text("raise SystemExit('it was imported')\n")
    with pytest.raises(PermissionError, match="its hash is another"):
        read_hospital(hospital(hashes)).study(study.to_toml())
    own.write_text(FILES["mine.py"])
    with pytest.raises(StudyError, match=re.escape(f"mine.py:Net {code_hash(full)}")):
        read_hospital(hospital(["mine.py:Net"]))


def test_files_beside_are_hashed_too(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import x\ny = x\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    name = f"{tmp_path}/a.py:y"
    before = code_hashes([name])
    assert set(before) == {"a.py", "b.py"}
    (tmp_path / "b.py").write_text("x = 2\n")
    assert code_hashes([name]) != before


def test_entry_points_are_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package gives a short name to its class; packages are looked at once per process."""
    point = EntryPoint("focal", "other.package:FocalAvg", "consilium.methods")
    looked: list[str] = []

    def installed(group: str) -> list[EntryPoint]:
        looked.append(group)
        return [point] if group == point.group else []

    monkeypatch.setattr(extensions, "entry_points", installed)
    registered.cache_clear()
    try:
        for _ in range(2):
            assert named_code({"method": {"name": "focal"}}) == ("other.package:FocalAvg",)
        assert named_code({"method": {"name": "fedavg"}}) == ()
        assert looked == ["consilium.methods"]
    finally:
        registered.cache_clear()


def test_a_tracker_in_twenty_lines(here: Path) -> None:
    """Every loss and every validation score of the journal is in its table, test scores only at the end."""
    tracker = runpy.run_path(str(here / "tracker.py"))
    result = tracker["train"](here / "mine.toml", here / "figures.csv", runs=here / "runs", workers=0)
    rows = list(csv.DictReader((here / "figures.csv").read_text().splitlines()))
    losses = {(row["round"], row["figure"]): float(row["value"]) for row in rows if row["figure"].startswith("loss/")}
    events = [json.loads(line) for line in (result.folder / "journal.jsonl").read_text().splitlines()]
    trained = [event for event in events if event["event"] == "train"]
    assert losses == {(str(e["round"]), f"loss/{e['site']}"): e["loss"] for e in trained}
    places = [row["figure"].split("/")[0] for row in rows if "/dice/" in row["figure"]]
    assert places.index("best") > max(i for i, place in enumerate(places) if place == "valid")
    body = FILES["tracker.py"].partition("class ")[2].rpartition("def train")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20
