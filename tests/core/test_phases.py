"""A phase before the paper's rounds, such as the training of teachers, is shown by itself; rounds count from 1."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consilium.cli.progress import ProgressDisplay
from consilium.contract import Interrupted, crash_after
from consilium.errors import StudyError, WorkError
from consilium.reports.page import write_page
from consilium.reports.reading import read_run
from consilium.run_folder import RunFolder
from consilium.simulation import with_attendance
from consilium.timeline import timeline
from tests.core.counting import SITES, Counting, Desk, counting_study, go
from tests.core.test_engine import events, last_x, lost

ALL = sorted(SITES)


def value(round: int, site: str, split: str) -> float:
    """Round 2 is the best of three."""
    return {1: 0.3, 2: 0.6, 3: 0.5}[round]


def places(folder: RunFolder, kind: str) -> list[tuple[str, int]]:
    return [(event["phase"], event["round"]) for event in events(folder, kind)]


def test_the_rounds_of_the_paper_count_from_one() -> None:
    line = [(phase.name, round.index, round.number) for phase, round in timeline(Counting(after=2, teacher=2), 3)]
    assert line == [
        ("teacher", 0, 1), ("teacher", 1, 2),
        ("train", 2, 1), ("train", 3, 2), ("train", 4, 3),
        ("after", 5, 4), ("after", 6, 5),
    ]  # fmt: skip


def test_journal_scores_and_summary_speak_of_the_papers_rounds(federation: Path, tmp_path: Path) -> None:
    """x grows by 3 a round, the teacher's included: 3 after it, then 6, 9, 12; round 2 is best on validation."""
    desk = Desk(SITES, value=value)
    folder = go(counting_study(federation, teacher=1), desk, tmp_path)
    assert places(folder, "round") == [("teacher", 1), ("train", 1), ("train", 2), ("train", 3)]
    assert [number for number, phase, _ in desk.scored if phase == "train"] == [1, 2, 3]
    assert places(folder, "score") == [("train", 1), ("train", 2), ("train", 3), ("best", 2), ("last", 3)]
    assert {(row.phase, row.round) for row in folder.rows()} == set(places(folder, "score"))
    summary = folder.summary()
    assert (summary["rounds"], summary["best"]["round"], summary["last"]["round"]) == (3, 2, 3)
    assert (folder.server(Counting()).x, last_x(folder)) == (9.0, 12.0)
    assert (events(folder, "start")[0]["round"], events(folder, "start")[0]["rounds"]) == (0, 3)
    sent = sum(event["bytes_up"] for event in events(folder, "train"))
    assert summary["bytes_up"] == sent  # the teacher's round 1 does not hide behind the paper's round 1


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3]), (2, [2, 3]), (3, [3])])
def test_score_every_counts_the_papers_rounds(
    every: int, expected: list[int], federation: Path, tmp_path: Path
) -> None:
    desk = Desk(SITES)
    go(counting_study(federation, teacher=2, score_every=every), desk, tmp_path)
    assert [number for number, phase, _ in desk.scored if phase == "train"] == expected


def test_a_last_phase_still_starts_from_the_best(federation: Path, tmp_path: Path) -> None:
    """The teacher leaves 3, the best round 9; the last phase goes on from there, and its result is the best state."""
    desk = Desk(SITES, value=value)
    folder = go(counting_study(federation, after=1, teacher=1), desk, tmp_path)
    assert [orders["ada"] for orders in desk.orders] == [0.0, 3.0, 6.0, 9.0, 9.0]
    assert (folder.server(Counting()).x, last_x(folder)) == (12.0, 12.0)
    assert folder.server(Counting()).rounds == 4  # 1 + 2 + the last phase
    assert places(folder, "round")[-1] == ("after", 4)


@pytest.mark.parametrize(
    ("event", "place"),
    [("train", ("teacher", 1)), ("round", ("teacher", 2)), ("round", ("train", 1)), ("score", ("train", 2))],
)
def test_a_crash_anywhere_changes_nothing(event: str, place: tuple[str, int], federation: Path, tmp_path: Path) -> None:
    def crash(seen: Any) -> None:
        if seen["event"] == event and (seen["phase"], seen["round"]) == place:
            raise Interrupted

    study = counting_study(federation, after=1, teacher=2)
    whole = go(study, Desk(SITES, value=value), tmp_path / "whole")
    with pytest.raises(Interrupted):
        go(study, Desk(SITES, value=value), tmp_path / "cut", crash)
    resumed = go(study, Desk(SITES, value=value), tmp_path / "cut")
    for file in ("best.safetensors", "last.safetensors", "scores.csv"):
        assert (resumed.path / file).read_bytes() == (whole.path / file).read_bytes(), file
    assert resumed.summary()["bytes_up"] == whole.summary()["bytes_up"]


# ---------------------------------------------------------------------------------------------- attendance


@pytest.mark.parametrize(
    ("away", "asked"),
    [
        ((1,), [(1, ALL), (2, ALL), (1, ["ada", "bea"]), (2, ALL), (3, ALL), (4, ALL)]),
        (("teacher",), [(1, ["ada", "bea"]), (2, ["ada", "bea"]), (1, ALL), (2, ALL), (3, ALL), (4, ALL)]),
        (("teacher:2", "after"), [(1, ALL), (2, ["ada", "bea"]), (1, ALL), (2, ALL), (3, ALL), (4, ["ada", "bea"])]),
        ((4,), [(1, ALL), (2, ALL), (1, ALL), (2, ALL), (3, ALL), (4, ["ada", "bea"])]),
    ],
)
def test_away_in_a_round_or_in_a_phase(
    away: tuple[int | str, ...], asked: list[tuple[int, list[str]]], federation: Path, tmp_path: Path
) -> None:
    study = counting_study(federation, after=1, teacher=2, away={"cid": away})
    desk = Desk(SITES)
    folder = go(study, desk, tmp_path)
    assert desk.asked == asked
    again = with_attendance(counting_study(federation, after=1, teacher=2, name="again"), folder.path)
    repeated = Desk(SITES)
    go(again, repeated, tmp_path)
    assert repeated.asked == asked


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"away": {"ada": ("techer",)}}, r"\[study\] away.ada: there is no phase 'techer'; did you mean 'teacher'\?"),
        ({"away": dict.fromkeys(SITES, ("teacher",))}, r"every site is away in the phase 'teacher'"),
        ({"away": dict.fromkeys(SITES, (1,))}, r"every site is away in round 1;"),
    ],
)
def test_a_phase_that_cannot_be_is_refused(plan: dict[str, Any], words: str, federation: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=words):
        go(counting_study(federation, teacher=1, **plan), Desk(SITES), tmp_path)


def test_too_few_answers_name_the_phase(federation: Path, tmp_path: Path) -> None:
    desk = Desk(SITES, reply=lost(dict.fromkeys(SITES, (1,))))
    with pytest.raises(WorkError, match="the phase 'teacher': 0 of 3 sites answered"):
        go(counting_study(federation, teacher=1), desk, tmp_path)


# ---------------------------------------------------------------------------------------------- what users see


def shown(go_on: Callable[[Any], object]) -> list[str]:
    progress = ProgressDisplay()
    with progress.console.capture() as capture:
        go_on(progress.show)
    return [re.sub(r"about .* left", "…", line) for line in capture.get().splitlines()]


def test_progress_shows_the_phase_by_itself(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation, after=1, teacher=2, score_every=2)
    desk = Desk(SITES, reply=lost({"cid": (2,)}))  # in the teacher's second round, and in the paper's
    name = study.method_name
    assert shown(lambda watch: go(study, desk, tmp_path / "whole", watch)) == [
        f"{name}: training 3 rounds at 3 sites (ada 1, bea 2, cid 6)",
        "teacher: cid did not answer: the link broke",
        "  teacher: done",
        "round 2: cid did not answer: the link broke",
        "  round 2/3  validation dice 0.500  loss 1.000  …",
        "  round 3/3  validation dice 0.500  loss 1.000",
        "  after: done",
        "  best state (round 2) of the global model: test dice 0.500",
        "  last state (round 3, without after) of the global model: test dice 0.500",
        f"{name}: finished, 0 s of training",
    ]
    with pytest.raises(Interrupted):
        go(study, Desk(SITES), tmp_path / "cut", crash_after("score", 2))
    first, *_ = shown(lambda watch: go(study, Desk(SITES), tmp_path / "cut", watch))
    assert first == f"{name}: continuing after round 2 of 3 rounds at 3 sites (ada 1, bea 2, cid 6)"


def test_a_resumed_run_still_says_what_its_last_state_lacks(federation: Path, tmp_path: Path) -> None:
    """Also where the last phase was done before; a journal that names no such phase says nothing of them."""

    def cut(event: Any) -> None:
        if event["event"] == "score" and event["phase"] == "best":
            raise Interrupted

    study = counting_study(federation, after=2, teacher=1)
    with pytest.raises(Interrupted):
        go(study, Desk(SITES), tmp_path, cut)
    folder = RunFolder.create(study, tmp_path)
    (start,) = events(folder, "start")
    assert (start["aside"], start["refines"]) == (["after", "teacher"], ["after"])
    lines = shown(lambda watch: go(study, Desk(SITES), tmp_path, watch))
    assert "  last state (round 3, without after) of the global model: test dice 0.500" in lines
    told = [{key: value for key, value in event.items() if key != "refines"} for event in folder.events()]
    assert "  last state (round 3) of the global model: test dice 0.500" in shown(lambda watch: list(map(watch, told)))


def test_phases_that_the_last_state_lacks_are_a_list_in_words() -> None:
    score = {"event": "score", "phase": "last", "round": 9, "model": "super", "metric": "dice"}
    start = {"event": "start", "method": "fedsm", "round": 0, "rounds": 9, "aside": [], "sites": {}}

    def said(*refines: str) -> str:
        values = {"valid": {"site_mean": 0.5}, "test": {"site_mean": 0.5}}
        return shown(lambda watch: [watch(event) for event in ({**start, "refines": refines}, {**score, **values})])[-1]

    assert "(round 9, without statistics, routing and calibrate)" in said("statistics", "routing", "calibrate")
    assert "(round 9, without routing and calibrate)" in said("routing", "calibrate")


@pytest.mark.usefixtures("undrawn")
def test_a_report_counts_the_papers_rounds(federation: Path, tmp_path: Path) -> None:
    study = counting_study(federation, teacher=2, away={"cid": ("teacher", 1)})
    folder = go(study, Desk(SITES, value=value), tmp_path)
    view = read_run(folder.path)
    assert view.curve.rounds == (1, 2, 3)
    write_page([view], tmp_path / "page.html")
    assert "<td>cid</td><td>away</td><td>3</td>" in (tmp_path / "page.html").read_text()
