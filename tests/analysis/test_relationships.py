"""APPLE's p is read from the memories of a simulation, and drawn; runs round by round."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from consilium.analysis.analyse import analyse
from consilium.analysis.finding import Options
from consilium.analysis.progress import draw, progress_of
from consilium.analysis.relationships import own_share_curves, scheduler_curve, site_curves
from consilium.errors import RunError, StudyError
from consilium.reports.figures import relation_map
from consilium.reports.page import write_page
from consilium.reports.reading import read_run
from consilium.reports.relationships import read_relationships
from consilium.run_folder import RunFolder
from consilium.simulation import run
from tests.toy import toy_study

pytestmark = pytest.mark.xdist_group("analysis")  # what its tests share is made once

SITES = ("ada", "bea", "cid")


@pytest.fixture(scope="module")
def apple(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds, scored each; cid is away in the second."""
    study = toy_study(
        federation, "apple", study__score_every=1, study__away={"cid": [2]}, method__relation_lr=0.01, local__epochs=2
    )
    return run(study, tmp_path_factory.mktemp("apple"), workers=0).folder


@pytest.fixture(scope="module")
def fedavg(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = toy_study(federation, "fedavg", study__rounds=2, study__score_every=1)
    return run(study, tmp_path_factory.mktemp("fedavg"), workers=0).folder


def test_p_over_rounds_is_in_the_memories(apple: Path) -> None:
    found = read_relationships(read_run(apple))
    assert found.sites == SITES
    assert found.p0 == pytest.approx({"ada": 8 / 30, "bea": 12 / 30, "cid": 10 / 30})
    assert found.rounds == {"ada": (1, 2, 3), "bea": (1, 2, 3), "cid": (1, 3)}
    assert {site: rows.shape for site, rows in found.p.items()} == {"ada": (3, 3), "bea": (3, 3), "cid": (2, 3)}
    assert len({row.tobytes() for row in found.p["ada"]}) == 3
    assert found.own("bea").tolist() == found.p["bea"][:, 1].tolist()
    matrix = found.matrix()
    assert matrix["cid"] == dict(zip(SITES, found.p["cid"][-1].tolist()))
    assert found.friend("cid") == max(("ada", "bea"), key=lambda site: matrix["cid"][site])
    json.dumps(found.to_json(), allow_nan=False)


def test_figures_show_the_numbers(apple: Path) -> None:
    found = read_relationships(read_run(apple))
    (axes,) = site_curves(found, "cid").axes
    lines = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in lines] == [[0, 1, 3]] * 3
    for j, (site, line) in enumerate(zip(SITES, lines)):
        assert list(line.get_ydata()) == pytest.approx([found.p0[site], *found.p["cid"][:, j]])
    assert [line.get_linewidth() for line in lines] == [1.1, 1.1, 2.2]
    (axes,) = own_share_curves(found).axes
    assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx(
        [found.p[s][-1, i] for i, s in enumerate(SITES)]
    )
    shown = relation_map(found.matrix(), found.sites).axes[0]
    assert [text.get_text() for text in shown.texts] == [f"{v:.3f}" for s in SITES for v in found.matrix()[s].values()]
    assert len(shown.patches) == 3
    (axes,) = scheduler_curve([1.0, 0.5, 0.0], "cosine").axes
    assert list(axes.lines[0].get_ydata()) == [1.0, 0.5, 0.0]


def test_analyse_draws_them_for_runs_of_apple(apple: Path, fedavg: Path, tmp_path: Path) -> None:
    files = analyse([apple, fedavg], ["progress", "relationships"], tmp_path, Options(site="bea"))
    mark = f"-{apple.name}"
    names = {f"{name}{mark}" for name in ("relationships", "relationships-bea", "self-relationships", "scheduler")}
    assert {path.stem for path in files if path.suffix == ".png"} == {*names, "progress"}
    facts = json.loads((tmp_path / f"relationships{mark}.json").read_text())
    assert "most else from" in facts["caption"]
    with pytest.raises(StudyError, match="there is no site 'dan'; the runs have"):
        analyse([apple], ["relationships"], tmp_path, Options(site="dan"))
    with pytest.raises(RunError, match="relationships: method 'fedavg' learns none"):
        analyse([fedavg], ["relationships"], tmp_path)


@pytest.mark.slow
def test_a_run_without_memories_has_no_map(apple: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(apple, copy, ignore=shutil.ignore_patterns("sites"))
    with pytest.raises(RunError, match="p is at the hospitals"):
        read_relationships(read_run(copy))
    write_page([read_run(copy)], tmp_path / "without.html")
    write_page([read_run(apple)], tmp_path / "with.html")
    title = "Which hospitals help which</h2>"
    assert title in (tmp_path / "with.html").read_text()
    assert title not in (tmp_path / "without.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_an_analysed_run_shows_them_once(apple: Path, tmp_path: Path) -> None:
    """With all four figures of the analysis, and what the numbers mean."""
    copy = tmp_path / "run"
    shutil.copytree(apple, copy)
    analyse([copy], ["relationships"])
    write_page([read_run(copy)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    titles = re.findall(r"<h[23]>(Which hospitals help which[^<]*)</h[23]>", page)
    assert titles == ["Which hospitals help which: APPLE"]
    assert page.count("A row of the map is a hospital") >= 1


def test_progress_is_losses_and_test_scores_as_measured(apple: Path, fedavg: Path) -> None:
    view = read_run(apple)
    found = progress_of(view)
    trains = [event for event in view.events if event["event"] == "train"]
    for round_ in (1, 2, 3):
        losses = [event["loss"] for event in trains if event["round"] == round_]
        assert len(losses) == (2 if round_ == 2 else 3)
        assert found.loss[round_] == pytest.approx(sum(losses) / len(losses))
    assert found.test.rounds == (1, 2, 3)
    events = RunFolder.open(apple).events()
    scores = [event["test"] for event in events if event["event"] == "score" and event["phase"] == "train"]
    assert list(found.test.site_mean) == pytest.approx([score["site_mean"] for score in scores])
    assert found.test.sites["bea"][-1] == pytest.approx(scores[-1]["sites"]["bea"])
    figure = draw({"APPLE": found, "FedAvg": progress_of(read_run(fedavg))}, "Dice")
    drawn = [axes for axes in figure.axes if axes.lines]
    assert [axes.get_title(loc="left") for axes in drawn] == ["Training loss", "Test Dice", *SITES]
    assert all(len(axes.lines) == 2 for axes in drawn)
    assert np.allclose(drawn[1].lines[0].get_ydata(), found.test.site_mean)
