"""`consilium analyse`: what suits a run is made, files are named, mistakes are sentences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from consilium.analysis.analyse import ANALYSES, analyse
from consilium.analysis.finding import Options
from consilium.cli import analysis
from consilium.errors import RunError, StudyError, UserError

pytestmark = pytest.mark.xdist_group("analysis")  # what its tests share is made once

QUICK = Options(points=3, directions=1, layout="pca")


def command(*arguments: str) -> list[Path]:
    app = typer.Typer()
    analysis.add_to(app)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [Path(line) for line in result.stdout.splitlines()]


def test_a_fedsm_run_gets_all_but_lambda(finished: Mapping[str, Path], tmp_path: Path) -> None:
    to = tmp_path / "found"
    options = ["--points", "3", "--directions", "2", "--to", str(to), "--site", "bea"]
    files = command(str(finished["guest"]), *options)
    assert sorted(files) == sorted(to.iterdir())
    names = ("gallery", "loss-surface-bea", "features", "gamma")
    assert {path.stem for path in files} == {*names, "counts"}
    for name in names:
        facts = json.loads((to / f"{name}.json").read_text())
        assert facts["title"] and facts["caption"]
        for figure in facts["figures"]:
            assert ElementTree.parse(to / figure).getroot().tag.endswith("svg")
            assert (to / figure).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert (to / "gallery.md").read_text().startswith("| site |")


def test_the_same_run_gives_the_same_bytes(finished: Mapping[str, Path], tmp_path: Path) -> None:
    made = [analyse([finished["guest"]], ["gamma"], tmp_path / name, QUICK) for name in "ab"]
    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_selector_gets_what_suits_it(finished: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished["fedavg"], run)
    files = analyse([run], options=QUICK)
    assert {path.parent for path in files} == {run / "analysis"}
    assert {path.stem for path in files} == {"gallery", "counts", "loss-surface-ada"}


@pytest.mark.slow
def test_several_runs(finished: Mapping[str, Path], tmp_path: Path) -> None:
    """Loss surfaces and λ in one figure, γ of each run under its own name, the sites' images once."""
    runs = [finished["guest"], finished["guest-0.9"]]
    files = analyse(runs, ["gallery", "loss-surface", "gamma", "lambda"], tmp_path, QUICK)
    assert {path.name for path in files if path.suffix == ".json"} == {
        f"gallery-{runs[0].name}.json",
        "loss-surface-ada.json",
        *(f"gamma-{run.name}.json" for run in runs),
        "lambda.json",
    }
    models = json.loads((tmp_path / "loss-surface-ada.json").read_text())["models"]
    assert set(models) == {
        f"FedSM (pull {pull}): {kind} model" for pull in (0.6, 0.9) for kind in ("global", "personal")
    }


@pytest.mark.usefixtures("undrawn")
def test_mistakes_are_sentences(finished: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="there is no analysis 'gama'; did you mean 'gamma'"):
        analyse([finished["guest"]], ["gama"])
    with pytest.raises(RunError, match="has no selector: method 'fedavg'"):
        analyse([finished["fedavg"]], ["features"])
    with pytest.raises(RunError, match="has no γ: method 'fedavg'"):
        analyse([finished["fedavg"]], ["gamma"])
    with pytest.raises(StudyError, match="there is no site 'dan'"):
        analyse([finished["fedavg"]], ["loss-surface"], options=Options(site="dan"))
    with pytest.raises(RunError, match="is not a run"):
        analyse([tmp_path])
    (tmp_path / "file").touch()
    told: list[str] = []
    with pytest.raises(UserError, match="choose another place with --to"):
        analyse([finished["fedavg"]], ["gallery"], tmp_path / "file", say=told.append)
    assert told == []  # nothing was computed in vain


def test_an_unfinished_run_names_resume(finished: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished["fedavg"], run, ignore=shutil.ignore_patterns("summary.json"))
    with pytest.raises(RunError, match="is not finished; continue it with `consilium resume"):
        analyse([run])


def test_data_that_moved_are_asked_for(finished: Mapping[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished["guest"], run)
    study = (run / "study.toml").read_text()
    place = next(line for line in study.splitlines() if line.startswith("federation = "))
    (run / "study.toml").write_text(study.replace(place, 'federation = "/no/such/place"'))
    with pytest.raises(RunError, match="not at /no/such/place any more"):
        analyse([run])


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_memories_is_still_readable(finished: Mapping[str, Path], tmp_path: Path) -> None:
    """As one fetched from a real federation, whose sites keep their memories."""
    run = tmp_path / "run"
    shutil.copytree(finished["guest"], run, ignore=shutil.ignore_patterns("sites"))
    assert analyse([run], ["loss-surface"], options=QUICK)


def test_every_analysis_is_named_in_the_help() -> None:
    assert set(analysis.NAMES.split(", ")) == set(ANALYSES)
