"""The round loop by hand: sites with 1, 2 and 6 cases each add their number to x, the server takes the mean."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consilium import simulation
from consilium.contract import Interrupted, crash_after
from consilium.errors import RunError, StudyError, WorkError
from consilium.messages import Envelope, Reply
from consilium.run_folder import RunFolder
from consilium.tree import flatten
from tests.core.counting import SITES, Counting, Desk, counting_study, go
from tests.toy import toy_study


def events(folder: RunFolder, kind: str) -> list[Any]:
    return [event for event in folder.events() if event["event"] == kind]


def last_x(folder: RunFolder) -> float:
    return float(folder.states.last(Counting()).server.x)


# ---------------------------------------------------------------------------------------------- attendance


def test_everyone_answers(federation: Path, tmp_path: Path) -> None:
    """x grows by (1 + 2 + 6)/3 = 3 a round."""
    desk = Desk(SITES)
    folder = go(counting_study(federation), desk, tmp_path)
    assert desk.asked == [(1, ["ada", "bea", "cid"]), (2, ["ada", "bea", "cid"]), (3, ["ada", "bea", "cid"])]
    assert [list(orders.values()) for orders in desk.orders] == [[0.0] * 3, [3.0] * 3, [6.0] * 3]
    assert last_x(folder) == 9.0
    assert desk.closed == 1


def test_a_site_that_is_away_is_not_asked(federation: Path, tmp_path: Path) -> None:
    """Round 2 without cid: 3 + (1 + 2)/2 = 4.5; round 3 again with all: 7.5."""
    desk = Desk(SITES)
    folder = go(counting_study(federation, away={"cid": (2,)}), desk, tmp_path)
    assert desk.asked[1] == (2, ["ada", "bea"])
    assert last_x(folder) == 7.5
    (away,) = events(folder, "away")
    assert (away["round"], away["phase"], away["site"]) == (2, "train", "cid")


def test_a_draw_of_sites_is_seeded(federation: Path, tmp_path: Path) -> None:
    desks = [Desk(SITES) for _ in range(3)]
    for number, (desk, seed) in enumerate(zip(desks, (0, 0, 1))):
        go(counting_study(federation, sites_per_round=2, seed=seed, rounds=8), desk, tmp_path / str(number))
    assert all(len(names) == 2 for _, names in desks[0].asked)
    assert desks[0].asked == desks[1].asked
    assert desks[0].asked != desks[2].asked
    assert len({tuple(names) for _, names in desks[0].asked}) > 1


def test_a_draw_is_among_those_present(federation: Path, tmp_path: Path) -> None:
    desk = Desk(SITES)
    go(counting_study(federation, sites_per_round=2, away={"bea": (1, 2, 3)}), desk, tmp_path)
    assert [names for _, names in desk.asked] == [["ada", "cid"]] * 3


def test_guests_are_scored_as_outside_and_do_not_train(federation: Path, tmp_path: Path) -> None:
    desk = Desk({"ada": 1, "bea": 2}, guests=("cid",), value=lambda round, site, split: 0.1 if site == "cid" else 0.5)
    folder = go(counting_study(federation, rounds=1), desk, tmp_path)
    assert desk.asked == [(1, ["ada", "bea"])]
    released = desk.scored[0][2]
    assert {name: release.home for name, release in released.items()} == {"ada": "ada", "bea": "bea", "cid": "outside"}
    assert last_x(folder) == 1.5  # (1 + 2)/2: no share for the guest
    headline = folder.summary()["headline"]
    assert headline["sites"] == {"ada": 0.5, "bea": 0.5}
    assert (headline["site_mean"], headline["outside"]) == (0.5, {"cid": 0.1})
    assert {row.site: row.outside for row in folder.rows()} == {"ada": False, "bea": False, "cid": True}
    assert desk.delivered["cid"].home == "outside"


def test_guests_of_a_real_study_have_no_share(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, study__leave_out=["cid"], study__rounds=1, local__batch_size=8)
    result = simulation.run(study, tmp_path, workers=0)
    server = RunFolder.open(result.folder).server(study.method)
    assert dict(server.n) == {"ada": 8, "bea": 12}
    assert set(result.summary["headline"]["sites"]) == {"ada", "bea"}
    assert set(result.summary["headline"]["outside"]) == {"cid"}


def test_guests_of_a_pooled_study_are_outside(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "pooled", study__leave_out=["cid"], study__rounds=1, local__batch_size=8)
    result = simulation.run(study, tmp_path, workers=0)
    assert set(result.summary["headline"]["sites"]) == {"ada", "bea"}
    assert set(result.summary["headline"]["outside"]) == {"cid"}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"away": {"ada": (2,), "bea": (1, 2), "cid": (2, 3)}}, r"\[study\] away: every site is away in round 2; .*"),
        (
            {"away": {"ada": (3,), "bea": (3,)}, "min_sites": 2},
            r"\[study\] min_sites = 2: round 3 can have 1 of 3 sites, because of \[study\] away; .*",
        ),
        (
            {"sites_per_round": 2, "min_sites": 3},
            r"\[study\] min_sites = 3: round 1 can have 2 of 3 sites, because of \[study\] sites_per_round; .*",
        ),
    ],
)
def test_a_round_that_can_never_have_enough_answers(
    plan: dict[str, Any], words: str, federation: Path, tmp_path: Path
) -> None:
    with pytest.raises(StudyError, match=words):
        go(counting_study(federation, **plan), Desk(SITES), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_everyone_away_in_a_last_phase_is_refused(federation: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="every site is away in the phase 'after'"):
        go(counting_study(federation, after=1, away=dict.fromkeys(SITES, (4,))), Desk(SITES), tmp_path)


# ---------------------------------------------------------------------------------------- those who fail


def lost(rounds: dict[str, tuple[int, ...]]) -> Any:
    def hand(site: str, head: Envelope, reply: Reply) -> Reply:
        gone = head.round.number in rounds.get(site, ())
        return replace(reply, packet=None, lost="the link broke") if gone else reply

    return hand


def test_a_lost_reply_is_a_line_in_the_journal(federation: Path, tmp_path: Path) -> None:
    folder = go(counting_study(federation), Desk(SITES, reply=lost({"cid": (2,)})), tmp_path)
    assert last_x(folder) == 7.5  # as if cid had been away in round 2
    (event,) = events(folder, "lost")
    assert (event["round"], event["site"], event["why"]) == (2, "cid", "the link broke")


def test_too_few_answers_stop_the_run_and_resume_goes_on(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation, min_sites=3)
    desk = Desk(SITES, reply=lost({"cid": (2,)}))
    words = r"round 2: 2 of 3 sites answered, but min_sites is 3.*the link broke.*before it is saved.*consilium resume"
    with pytest.raises(WorkError, match=words):
        go(study, desk, tmp_path)
    assert desk.closed == 1
    healthy = Desk(SITES)
    folder = go(study, healthy, tmp_path)
    assert healthy.asked == [(2, ["ada", "bea", "cid"]), (3, ["ada", "bea", "cid"])]
    assert last_x(folder) == 9.0
    assert [event["round"] for event in events(folder, "resume")] == [1]


def test_no_answer_at_all_is_an_error(federation: Path, tmp_path: Path) -> None:
    desk = Desk(SITES, reply=lost(dict.fromkeys(SITES, (1,))))
    with pytest.raises(WorkError, match="round 1: 0 of 3 sites answered"):
        go(counting_study(federation), desk, tmp_path)


def test_code_that_fails_everywhere_is_not_told_to_wait_for_sites(federation: Path, tmp_path: Path) -> None:
    """With other code the run could not be resumed either."""

    def raising(site: str, head: Envelope, reply: Reply) -> Reply:
        return replace(reply, packet=None, lost="ValueError: no", error="failed")

    with pytest.raises(
        WorkError, match=r"0 of 3 sites answered.* When that is mended, .*resume.*; with other code .*--again"
    ):
        go(counting_study(federation), Desk(SITES, reply=raising), tmp_path)


def test_a_training_that_diverges_is_not_told_to_wait_for_sites(federation: Path, tmp_path: Path) -> None:
    """The sites are there; the same study would come to the same answers."""

    def diverged(site: str, head: Envelope, reply: Reply) -> Reply:
        if head.round.number < 2:
            return reply
        if site == "ada":  # a site sends no weights that are not finite
            return replace(reply, packet=None, lost="'x' is not finite", error="infinite")
        return replace(reply, packet=flatten(Counting.Uplink(math.nan, 1.0)))

    with pytest.raises(WorkError, match="round 2: 0 of 3 answers could be used, but min_sites is 1") as caught:
        go(counting_study(federation), Desk(SITES, reply=diverged), tmp_path)
    assert "Everything before it is saved, but a resumed run would get the same answers" in str(caught.value)
    assert "smaller learning rate" in str(caught.value) and "sites are back" not in str(caught.value)


def test_replies_that_come_backwards_change_nothing(federation: Path, tmp_path: Path) -> None:
    forth = go(counting_study(federation), Desk(SITES), tmp_path / "forth")
    back = go(counting_study(federation), Desk(SITES, backwards=True), tmp_path / "back")
    assert (forth.path / "last.safetensors").read_bytes() == (back.path / "last.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"No space left on device \(/run\).*Make room, then `consilium resume"),
        (errno.EDQUOT, r"quota exceeded \(/run\).*Make room, then `consilium resume"),
        (errno.EACCES, r"Permission denied \(/run\).*Allow reading and writing there, then `consilium resume"),
        (errno.EROFS, r"Read-only file system \(/run\).*Allow reading and writing there, then `consilium resume"),
        (errno.EIO, r"Input/output error \(/run\).*When the cause is mended, `consilium resume"),
    ],
)
def test_a_failing_disk_stops_the_run_with_a_sentence(number: int, said: str, federation: Path, tmp_path: Path) -> None:
    def fail(event: Any) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise OSError(number, os.strerror(number), "/run")

    study = counting_study(federation)
    with pytest.raises(WorkError, match=said) as caught:
        go(study, Desk(SITES), tmp_path, watch=fail)
    assert "everything committed is saved" in str(caught.value)
    assert last_x(go(study, Desk(SITES), tmp_path)) == 9.0


# ---------------------------------------------------------------------------------------------- the journal


def test_the_journal_tells_the_run(federation: Path, tmp_path: Path) -> None:
    folder = go(counting_study(federation, rounds=2, score_every=2), Desk(SITES), tmp_path)
    told = [(e["event"], e.get("round"), e.get("site")) for e in folder.events()]
    assert told == [
        ("start", 0, None),
        *(("train", 1, site) for site in SITES), ("round", 1, None),
        *(("train", 2, site) for site in SITES), ("round", 2, None),
        ("score", 2, None),
        ("score", 2, None), ("score", 2, None),  # the best and the last state, at the end
        ("finish", None, None),
    ]  # fmt: skip
    start = folder.events()[0]
    assert (start["method"], start["rounds"], start["sites"]) == ("tests.core.counting:Counting", 2, SITES)
    train = events(folder, "train")[0]
    assert (train["phase"], train["loss"], train["steps"], train["seconds"]) == ("train", 1.0, None, 0.25)
    assert train["bytes_up"] > 0
    assert train["bytes_down"] > 0
    summary = folder.summary()
    assert summary["bytes_up"] == sum(event["bytes_up"] for event in events(folder, "train"))
    assert [event["phase"] for event in events(folder, "score")] == ["train", "best", "last"]


def test_a_line_cut_short_by_a_crash_is_mended(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation)
    with pytest.raises(Interrupted):
        go(study, Desk(SITES), tmp_path, crash_after("round", 2))
    (path,) = tmp_path.iterdir()
    with (path / "journal.jsonl").open("a") as file:
        file.write('{"event": "tra')
    folder = go(study, Desk(SITES), tmp_path)
    assert all(json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines())
    assert last_x(folder) == 9.0


def test_a_repeated_round_is_counted_once(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation)
    with pytest.raises(Interrupted):
        go(study, Desk(SITES), tmp_path / "a", crash_after("train", 2))
    resumed = go(study, Desk(SITES), tmp_path / "a")
    whole = go(study, Desk(SITES), tmp_path / "b")
    assert resumed.summary()["bytes_up"] == whole.summary()["bytes_up"]
    assert len(events(resumed, "train")) == len(events(whole, "train")) + len(SITES)  # a round is told at once


def test_a_round_that_was_written_but_not_told_is_told_on_resume(federation: Path, tmp_path: Path) -> None:
    """Its state is there; the process died before the journal had it."""
    study = counting_study(federation)
    with pytest.raises(Interrupted):
        go(study, Desk(SITES), tmp_path, crash_after("round", 2))
    (path,) = tmp_path.iterdir()
    lines = (path / "journal.jsonl").read_text().splitlines(keepends=True)
    lost = json.loads(lines.pop())
    assert (lost["event"], lost["round"]) == ("round", 2)
    (path / "journal.jsonl").write_text("".join(lines))
    told = [(event["round"], event["seconds"]) for event in events(go(study, Desk(SITES), tmp_path), "round")]
    assert [number for number, _ in told] == [1, 2, 3]
    assert told[1] == (2, lost["seconds"])


def test_one_process_at_a_time(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation)
    folder = RunFolder.create(study, tmp_path)
    with folder.locked(), pytest.raises(RunError, match="another process is working on"):
        go(study, Desk(SITES), tmp_path)


# ---------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("every", "rounds", "expected"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (5, 3, [3]), (3, 6, [3, 6])]
)
def test_score_every_and_always_the_last_round(
    every: int, rounds: int, expected: list[int], federation: Path, tmp_path: Path
) -> None:
    desk = Desk(SITES)
    go(counting_study(federation, score_every=every, rounds=rounds), desk, tmp_path)
    assert [number for number, phase, _ in desk.scored if phase == "train"] == expected


def test_test_cases_wait_for_the_last_rounds(federation: Path, tmp_path: Path) -> None:
    """Four rounds, all scored on validation, the last two on test as well; models and final scores are the same."""
    runs = {}
    for tests in (0, 2):
        study = toy_study(federation, study__rounds=4, study__score_every=1, study__test_rounds=tests)
        runs[tests] = RunFolder.open(simulation.run(study, tmp_path, workers=0).folder)
    found = {
        (row.round, row.split) for row in runs[2].rows() if row.phase == "train"
    }  # of the site's own rounds, not of the end
    assert found == {(1, "valid"), (2, "valid"), (3, "valid"), (4, "valid"), (3, "test"), (4, "test")}
    seldom, always = (
        [row for row in runs[tests].rows() if (row.round, row.split) in found or row.phase != "train"]
        for tests in (2, 0)
    )
    assert seldom == always
    for name in ("best.safetensors", "last.safetensors"):
        assert (runs[0].path / name).read_bytes() == (runs[2].path / name).read_bytes()


def test_the_best_on_validation_is_kept(federation: Path, tmp_path: Path) -> None:
    """Site means by round: valid .3 .7 .7 .5, test .1 .25 .9 .8. Round 2 is best (ties stay with the earlier one)."""
    tables = {"valid": [0.3, 0.7, 0.7, 0.5], "test": [0.1, 0.25, 0.9, 0.8]}
    desk = Desk(SITES, value=lambda round, site, split: tables[split][round - 1])
    folder = go(counting_study(federation, rounds=4), desk, tmp_path)
    summary = folder.summary()
    assert (summary["best"]["round"], summary["last"]["round"]) == (2, 4)
    assert summary["headline"]["site_mean"] == 0.25  # test data choose nothing
    assert folder.server(Counting()).x == 6.0  # after two rounds
    assert last_x(folder) == 12.0
    assert {release.x for release in desk.delivered.values()} == {6.0}


def test_the_site_mean_decides_not_the_largest_site(federation: Path, tmp_path: Path) -> None:
    """Round 1: .9, .1, .2 (mean .4); round 2: .5, .5, .5."""
    first = {"ada": 0.9, "bea": 0.1, "cid": 0.2}
    desk = Desk(SITES, value=lambda round, site, split: first[site] if round == 1 else 0.5)
    assert go(counting_study(federation, rounds=2), desk, tmp_path).summary()["best"]["round"] == 2


def test_a_round_not_scored_by_all_is_not_the_best(federation: Path, tmp_path: Path) -> None:
    """Round 2 would be best, and not by its merit: the difficult site's scores never came."""
    score = {"ada": 0.9, "bea": 0.9, "cid": 0.1}
    desk = Desk(SITES, value=lambda *at: score[at[1]], silent=lambda round, site: (round, site) == (2, "cid"))
    folder = go(counting_study(federation), desk, tmp_path)
    assert folder.summary()["best"]["round"] == 1
    assert [(event["round"], event["site"]) for event in events(folder, "unscored")] == [(2, "cid")]


def test_scores_that_never_come_do_not_stop_a_run(federation: Path, tmp_path: Path) -> None:
    folder = go(counting_study(federation), Desk(SITES, silent=lambda round, site: site == "cid"), tmp_path)
    assert folder.summary()["best"]["round"] == 3  # no round was scored by all: the last one
    assert set(folder.summary()["headline"]["sites"]) == {"ada", "bea"}


def test_a_site_without_validation_cases_does_not_decide(federation: Path, tmp_path: Path) -> None:
    """bea has none: the best round is that of ada and cid, and bea is still tested."""
    valid = {"ada": [0.2, 0.6, 0.1], "cid": [0.2, 0.6, 0.1]}

    def value(round: int, site: str, split: str) -> float | None:
        return 0.5 if split == "test" else valid[site][round - 1] if site in valid else None

    summary = go(counting_study(federation), Desk(SITES, value=value), tmp_path).summary()
    assert summary["best"]["round"] == 2
    assert set(summary["headline"]["sites"]) == set(SITES)


def test_without_any_validation_cases_the_last_round_is_taken(federation: Path, tmp_path: Path) -> None:
    desk = Desk(SITES, value=lambda round, site, split: None if split == "valid" else 0.5)
    folder = go(counting_study(federation), desk, tmp_path)
    assert folder.summary()["best"]["round"] == 3
    assert folder.server(Counting()).x == 9.0


# ------------------------------------------------------------------------------------------- phases and states


def test_a_phase_can_start_from_the_best_state(federation: Path, tmp_path: Path) -> None:
    """Best is round 1 (x = 3); the last phase goes on from there: 3 + 3, and then once more. `last` stays at 9."""
    desk = Desk(SITES, value=lambda round, site, split: 1.0 / round)
    folder = go(counting_study(federation, after=2), desk, tmp_path)
    assert [orders["ada"] for orders in desk.orders] == [0.0, 3.0, 6.0, 3.0, 6.0]
    assert folder.server(Counting(2)).x == 9.0  # what the phase made of the best state
    assert folder.server(Counting(2)).rounds == 3
    assert last_x(folder) == 9.0
    assert [phase for _, phase, _ in desk.scored if phase == "after"] == []  # it does not count


@pytest.mark.parametrize(("event", "round"), [("score", 3), ("train", 4), ("round", 4), ("round", 5)])
def test_a_crash_around_the_last_phase_changes_nothing(
    event: str, round: int, federation: Path, tmp_path: Path
) -> None:
    def value(round: int, site: str, split: str) -> float:
        return 1.0 / round

    study = counting_study(federation, after=2)
    whole = go(study, Desk(SITES, value=value), tmp_path / "whole")
    with pytest.raises(Interrupted):
        go(study, Desk(SITES, value=value), tmp_path / "cut", crash_after(event, round))
    resumed = go(study, Desk(SITES, value=value), tmp_path / "cut")
    for file in ("best.safetensors", "last.safetensors", "scores.csv"):
        assert (resumed.path / file).read_bytes() == (whole.path / file).read_bytes(), file


@pytest.mark.parametrize(("keep", "expected"), [("last-two", [3, 4]), ("all", [0, 1, 2, 3, 4])])
def test_states_kept(keep: str, expected: list[int], federation: Path, tmp_path: Path) -> None:
    folder = go(counting_study(federation, rounds=5, keep_rounds=keep), Desk(SITES), tmp_path)
    assert sorted(int(path.stem) for path in (folder.path / "server").glob("[0-9]*.json")) == expected


def test_a_state_of_another_method_is_refused_in_a_sentence(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation)
    with pytest.raises(Interrupted):
        go(study, Desk(SITES), tmp_path, crash_after("round", 2))
    folder = RunFolder.create(study, tmp_path)
    with pytest.raises(RunError, match=r"cannot be used: here is a Counting.Server, where a .*Server is expected"):
        folder.states.resume(toy_study(federation, "fedsm").method)


def test_a_warning_of_the_method_is_in_the_journal(federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm", method__pull=0.2, study__rounds=1, local__batch_size=8)
    result = simulation.run(study, tmp_path, workers=0)
    (warning,) = events(RunFolder.open(result.folder), "warning")
    assert "pull = 0.2 is below 1/K = 0.333" in warning["text"]


def test_a_study_that_cannot_work_is_refused_before_the_first_round(federation: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="plain SGD"):
        simulation.run(toy_study(federation, "scaffold", local__optimizer="adam"), tmp_path, workers=0)
