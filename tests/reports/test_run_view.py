"""Reading run folders: what a report sees, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from consilium.errors import RunError
from consilium.reports import drawings
from consilium.reports.grouping import groups
from consilium.reports.reading import Headline, RunView, flat, read_run, settings

SMALL = {"hk": (3, 0.8, 0.75), "basel": (4, 0.7, 0.72)}


def test_a_finished_run(four: list[RunView]) -> None:
    fedsm = four[3]
    assert (fedsm.method, fedsm.seed, fedsm.kind) == ("fedsm", 0, "federated")
    assert fedsm.headline == Headline("super", "dice", "mean")
    assert [run.kind for run in four] == ["bound", "local", "federated", "federated"]
    assert settings(fedsm)["local.lr"] == 0.001
    assert fedsm.origin["versions"]["torch"] == "2.13.0"


def test_the_best_rows_give_the_summary_again(four: list[RunView]) -> None:
    for run in four:
        assert run.summary is not None
        assert run.headline is not None
        rows = [row for row in run.best_rows if row.split == "test" and row.metric == "dice" and row.label == "mean"]
        own = [row for row in rows if row.model == run.headline.model and row.of in ("", row.site)]
        hk = [row.value for row in own if row.site == "hk"]
        assert sum(hk) / len(hk) == pytest.approx(run.summary["headline"]["sites"]["hk"])


def test_rows_marked_best_come_before_those_of_the_best_round(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    with (folder / "scores.csv").open("a") as file:
        file.write("36,best,global,,merged,hk,0,test,x,disc,dice,0.5\n")
    assert {row.case for row in read_run(folder).best_rows} == {"x"}


def test_the_curve_is_the_validation_site_mean_by_round(four: list[RunView]) -> None:
    curve = four[2].curve
    assert curve.rounds == tuple(range(4, 41, 4))
    assert set(curve.sites) == {"hk", "basel"}
    assert curve.site_mean[0] == pytest.approx((curve.sites["hk"][0] + curve.sites["basel"][0]) / 2)
    assert curve.site_mean[0] < curve.site_mean[-1]


def test_a_model_that_is_made_after_training_leaves_the_curve_to_the_one_scored_in_training(
    run_folder: Callable[..., Path],
) -> None:
    """FedSM with its selector in closed form has no super model before the last round."""
    folder = run_folder("fedsm", sites=SMALL)
    lines = (folder / "scores.csv").read_text().splitlines()
    (folder / "scores.csv").write_text("".join(f"{line}\n" for line in lines if ",super," not in line))
    assert read_run(folder).curve.rounds == ()
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"event": "score", "round": 4, "phase": "train", "model": "global"}) + "\n")
    curve = read_run(folder).curve
    assert (curve.model, curve.rounds) == ("global", tuple(range(4, 41, 4)))
    drawn = drawings.curves(groups([read_run(folder)]), {"FedSM": "#000000"})
    assert drawn is not None and "FedSM: its global model" in drawn.alt


def test_a_setting_that_is_empty_is_not_in_a_name(run_folder: Callable[..., Path]) -> None:
    runs = [read_run(run_folder("fedavg", sites=SMALL, settings={"away": away})) for away in ([], ["hk"])]
    assert [group.name for group in groups(runs)] == ["FedAvg", "FedAvg (away ['hk'])"]


def test_an_unfinished_run_has_a_curve_and_no_summary(run_folder: Callable[..., Path]) -> None:
    run = read_run(run_folder("fedsm", sites=SMALL, finished=False, seed=3))
    assert run.summary is None
    assert (run.method, run.seed) == ("fedsm", 3)
    assert run.headline == Headline("super", "dice", "mean")
    assert len(run.curve.rounds) == 10
    assert run.best_rows == []


def test_a_run_that_has_only_begun(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("fedsm", sites=SMALL, finished=False)
    (folder / "scores.csv").unlink()
    (folder / "journal.jsonl").unlink()
    run = read_run(folder)
    assert (run.rows, run.events, run.headline, run.curve.rounds) == ([], [], None, ())


def test_a_repeated_event_counts_once_and_a_cut_one_not_at_all(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    lines = [{"event": "train", "round": 1, "site": "hk", "loss": loss} for loss in (0.5, 0.4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "journal.jsonl").write_text(text + '{"event": "train", "round": 2, "si')
    assert read_run(folder).events == [lines[1]]


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("study.toml", None, "not a run"),
        ("study.toml", "rounds =", "cannot read"),
        ("study.toml", "[study]\nseed = 1\n", "names no method"),
        ("summary.json", '{"method": "fed', "cannot read .*`consilium resume` writes it again"),
        ("origin.json", '{"versions', "cannot read .*restore it, or repeat the run"),
        ("summary.json", "[]", "JSON object"),
        ("summary.json", '{"method": "fedavg"}', "not a run's summary"),
    ],
)
def test_a_damaged_folder_is_refused(run_folder: Callable[..., Path], file: str, text: str | None, says: str) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(RunError, match=says):
        read_run(folder)


def test_a_damaged_journal_names_its_line(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("fedavg", sites=SMALL)
    (folder / "journal.jsonl").write_text("{}\nnonsense\n{}\n")
    with pytest.raises(RunError, match="line 2"):
        _ = read_run(folder).events


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run"):
        read_run(tmp_path / "nowhere")


def test_flat_names() -> None:
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": {"e": {"f": 2}}})) == {"a.b": 1, "a.c": {}, "d.e.f": 2}
