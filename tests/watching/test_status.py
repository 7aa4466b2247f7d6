"""Where a run stands, from its journal."""

from __future__ import annotations

import datetime
import fcntl
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from consilium.errors import RunError
from consilium.watching.listing import as_table, list_runs
from consilium.watching.sources import JobSource, RunSource
from consilium.watching.status import metrics_of, status_of
from tests.watching.journals import START, TWO_ROUNDS, ended, trained, write_run


def test_a_journal_says_rounds_sites_scores_and_who_was_rejected() -> None:
    status = status_of(TWO_ROUNDS, "r", "running")
    assert (status.method, status.round, status.rounds) == ("fedsm", 2, 10)
    assert (status.bytes_up, status.bytes_down) == (300, 900)
    assert status.seconds_per_round == 4.0  # the median of 3 and 5
    assert status.seconds_left == 4.0 * 8
    ada, bea = status.sites["ada"], status.sites["bea"]
    assert (ada.state, ada.round, ada.loss, ada.score) == ("trained", 2, 0.6, 0.75)
    assert (bea.state, bea.round, bea.why) == ("rejected", 1, "its update is not finite")
    assert status.curve.rounds == [1, 2]
    assert status.curve.site_mean == pytest.approx([0.6, 0.5])
    assert status.curve.sites == {"ada": [0.5, 0.75], "bea": [0.7, 0.25]}
    (event,) = status.events
    assert (event["event"], event["site"], event["round"]) == ("refused", "bea", 2)


def test_the_time_left_counts_what_lies_between_rounds() -> None:
    """Rounds take 2 s each, but one ends only every 10 s: scoring is between them."""
    times = [f"2026-01-01T00:00:{second:02d}.000+00:00" for second in (0, 10, 20, 30)]
    events = [{**event, "time": time} for event, time in zip([START, *(ended(r, 2.0) for r in (1, 2, 3))], times)]
    status = status_of(events, "r", "running")
    assert (status.seconds_per_round, status.seconds_left) == (2.0, 10.0 * 7)
    assert status_of(events, "r", "finished").seconds_left is None


def test_losses_are_curves_of_few_points_and_the_last() -> None:
    losses = status_of(TWO_ROUNDS, "r", "running").losses
    assert (losses.rounds, losses.sites) == ([1, 2], {"ada": [0.9, 0.6], "bea": [0.8, None]})
    assert losses.site_mean == pytest.approx([0.85, 0.6])
    many = status_of([START, *(trained("ada", r, 1 / r) for r in range(1, 1000))], "r", "running").losses
    assert len(many.rounds) <= 201 and (many.rounds[0], many.rounds[-1]) == (1, 999)


def test_an_outlier_that_was_merged_is_told() -> None:
    odd = {**trained("bea", 3), "firewall": {"verdict": "odd", "why": "9 times as long as its past"}}
    *_, event = status_of([*TWO_ROUNDS, odd], "r", "running").events
    assert (event["event"], event["site"], event["why"]) == ("outlier, merged", "bea", "9 times as long as its past")


def test_what_repeats_from_round_to_round_is_one_line() -> None:
    def missing(site: str, round: int) -> dict[str, object]:
        return {"event": "lost", "phase": "train", "round": round, "site": site, "why": "no answer"}

    events = [START, missing("bea", 3), *(missing("ada", r) for r in range(5, 105)), missing("bea", 99)]
    told = status_of(events, "r", "running").events
    assert [(e["site"], e["round"], e.get("until")) for e in told] == [
        ("bea", 3, None),
        ("ada", 5, 104),
        ("bea", 99, None),
    ]


def test_a_page_never_shows_test_scores() -> None:
    assert "0.99" not in json.dumps(status_of(TWO_ROUNDS, "r", "running").to_json())


def test_phases_beside_the_papers_rounds_do_not_count_as_rounds() -> None:
    status = status_of([START, ended(1, 2.0), ended(11, 60.0, "calibrate")], "r", "running")
    assert (status.round, status.phase, status.seconds_per_round) == (1, "calibrate", 2.0)


def test_what_follows_training_changes_no_sites_round_or_loss() -> None:
    """A calibration sends no loss of training."""
    after = {**trained("ada", 3, 0.0), "phase": "calibrate"}
    ada = status_of([*TWO_ROUNDS, after, ended(3, 1.0, "calibrate")], "r", "finished").sites["ada"]
    assert (ada.round, ada.loss, ada.bytes_up) == (2, 0.6, 300)


def test_a_site_that_joins_late_has_gaps_before_and_one_that_leaves_after() -> None:
    later = {**TWO_ROUNDS[4], "round": 3, "valid": {"site_mean": 0.4, "sites": {"cid": 0.4}}}
    curve = status_of([*TWO_ROUNDS, later], "r", "running").curve
    assert curve.sites == {"ada": [0.5, 0.75, None], "bea": [0.7, 0.25, None], "cid": [None, None, 0.4]}


def test_metrics_are_prometheus_text() -> None:
    text = metrics_of(status_of([START, trained('a"d\\a', 1)], "r", "running"))
    assert 'consilium_round{run="r"} 0.0' in text
    assert 'consilium_site_loss{run="r",site="a\\"d\\\\a"} 0.5' in text
    assert "consilium_site_validation" not in text  # nothing was scored
    for line in text.splitlines():
        assert line.startswith(("# HELP consilium_", "# TYPE consilium_", "consilium_"))


def test_the_state_of_a_run_folder(tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", [])
    assert RunSource(new).state() == "not begun"
    with (new / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunSource(new).state() == "starting"
    run = write_run(tmp_path / "run")
    assert RunSource(run).state() == "interrupted"
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunSource(run).state() == "running"
    (run / "summary.json").write_text("{}")
    assert RunSource(run).state() == "finished"
    with pytest.raises(RunError, match="is not a run"):
        RunSource(tmp_path)


def test_a_journal_that_grows_is_read_again_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", TWO_ROUNDS[:4])
    source = RunSource(run)
    assert source.status().round == 1
    text = write_run(tmp_path / "longer").joinpath("journal.jsonl").read_text()
    (run / "journal.jsonl").write_text(text[:-40])
    assert source.status().round == 2


def test_a_run_named_by_a_dot_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_run(tmp_path / "run"))
    assert RunSource(Path()).status().run == "run"
    with pytest.raises(RunError, match=r"`consilium runs \.\.`"):
        list_runs(Path())


def test_a_job_is_asked_only_for_what_is_new() -> None:
    asked: list[int] = []

    def journal(after: int) -> list[object]:
        asked.append(after)
        return TWO_ROUNDS[after : after + 5]

    source = JobSource("job", journal, lambda: False)  # type: ignore[arg-type]
    assert [source.status().round for _ in range(2)] == [1, 2]
    assert asked == [0, 5]


@pytest.mark.parametrize(
    ("events", "over", "state"),
    [
        ([], False, "not begun"),
        (TWO_ROUNDS, False, "running"),
        (TWO_ROUNDS, True, "interrupted"),  # stopped, or the server's process of it died
        ([], True, "interrupted"),
        ([*TWO_ROUNDS, {"event": "finish", "seconds": 1.0}], True, "finished"),
    ],
)
def test_a_job_that_ended_early_is_not_finished(events: list[Mapping[str, Any]], over: bool, state: str) -> None:
    assert JobSource("job", lambda after: events[after:], lambda: over).status().state == state


def test_runs_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", [])
    (write_run(tmp_path / "broken") / "journal.jsonl").write_text("no event\n")
    (write_run(tmp_path / "cut") / "study.toml").write_text("foo = [")
    now = datetime.datetime(2026, 1, 1, 2, 0, 30, tzinfo=datetime.UTC)
    assert as_table(list_runs(tmp_path), now) == [
        "run     method  state        round  validation  last event",
        "broken  -       damaged      -      -           -",
        "cut     -       damaged      -      -           -",
        "one     fedsm   interrupted  2/10   dice 0.500  2 hours ago",
        "two     -       not begun    -      -           -",
    ]


def test_runs_under_a_hospitals_rules_are_listed_too(tmp_path: Path) -> None:
    """`run --policy` puts them one folder further down."""
    write_run(tmp_path / "policy-1a2b3c4d/one")
    assert [line.run for line in list_runs(tmp_path)] == ["policy-1a2b3c4d/one"]


def test_runs_one_folder_further_down_are_listed_too(tmp_path: Path) -> None:
    """As of a suite with a folder of its own; what only holds a study is no run there."""
    for name in ("one", "suite/two", "suite/policy-1a2b3c4d/three", "suite/far/down/four"):
        write_run(tmp_path / name)
    write_run(tmp_path / "export/super_model", [])
    write_run(tmp_path / "one/sites/ada", [])
    found = ["one", "suite/policy-1a2b3c4d/three", "suite/two"]
    assert [line.run for line in list_runs(tmp_path)] == found
    (tmp_path / "study.toml").write_text("")  # a study beside the runs does not make the folder a run
    assert [line.run for line in list_runs(tmp_path)] == found


def test_a_folder_without_runs_is_refused_with_what_to_name(tmp_path: Path) -> None:
    write_run(tmp_path / "demo/runs/one")
    for place, words in {
        "demo/runs/one": "is one run; name the folder that holds it: `consilium runs .*demo/runs`",
        "": "holds no run folders; .*demo/runs does",
        "nowhere": "there is no folder .*nowhere",
        "demo/runs/one/study.toml": "there is no folder .*study.toml",
    }.items():
        with pytest.raises(RunError, match=words):
            list_runs(tmp_path / place)


def test_watching_does_not_load_torch() -> None:
    code = "import sys, consilium.watching.server, consilium.watching.listing; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
