"""The log of what left a site: chained, so that a changed, removed or added line is named, and still counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consilium.cli.main import main
from consilium.hospital import Limits
from consilium.hospital_policy import HospitalPolicy
from consilium.left_log import HEAD, LOG, UNKNOWN, append, check_chain, left
from consilium.policy import Refused
from tests.core.test_outgoing import send
from tests.toy import toy_study

Lines = list[str]


def entry(number: int, what: str = "train") -> dict[str, Any]:
    return {"run": "a-s0-1", "what": what, "round": number, "bytes": 100 * number, "sha256": str(number), "spent": []}


def written(memory: Path, count: int = 5) -> Path:
    memory.mkdir(exist_ok=True)
    for number in range(1, count + 1):
        append(entry(number), memory)
    return memory / LOG


def test_every_line_holds_its_number_and_the_hash_of_the_line_before(tmp_path: Path) -> None:
    lines = [json.loads(text) for text in written(tmp_path).read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["before"] == ""
    assert len({line["before"] for line in lines}) == 5
    checked = check_chain(tmp_path)
    assert (checked.lines, checked.chained, checked.faults, checked.missing) == (5, 5, (), 0)


def changed(lines: Lines) -> Lines:
    return [*lines[:2], lines[2].replace('"bytes": 300', '"bytes": 1'), *lines[3:]]


def garbled(lines: Lines) -> Lines:
    return [*lines[:2], "#" + lines[2][1:], *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "fault", "missing"),
    [
        (changed, "line 3 is not what was written", 1),
        (garbled, "line 3 cannot be read", 1),
        (lambda lines: lines[1:], "1 line is missing or cannot be read before line 1", 1),
        (lambda lines: [lines[0], *lines[3:]], "2 lines are missing or cannot be read before line 2", 2),
        (lambda lines: lines[:3], "2 lines are missing after line 3", 2),
        (lambda lines: [*lines[:4], lines[4].replace('"bytes": 500', '"bytes": 1')], "line 5 is not what was", 1),
        (lambda lines: [*lines, json.dumps(entry(9))], "line 6 was added without the chain", 0),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "1 line is missing or cannot be read before line 1", 1),
        (lambda lines: [*lines, lines[2]], "line 6 is there twice", 0),
    ],
)
def test_the_first_broken_line_is_named_and_what_is_lost_is_counted(
    damage: Callable[[Lines], Lines], fault: str, missing: int, tmp_path: Path
) -> None:
    log = written(tmp_path)
    log.write_text("\n".join(damage(log.read_text().splitlines())) + "\n")
    checked = check_chain(tmp_path)
    assert checked.faults[0].startswith(fault)
    assert checked.missing >= missing
    unknown = [line for line in left(tmp_path) if line["run"] == UNKNOWN]
    assert len(unknown) == 2 * checked.missing  # it may have been an update or a scoring
    known = max(line["bytes"] for line in left(tmp_path) if line["run"] != UNKNOWN)
    assert {line["bytes"] for line in unknown if line["what"] == "train"} <= {known}


def test_a_line_cut_short_by_a_crash_is_no_damage_and_the_chain_goes_on(tmp_path: Path) -> None:
    log = written(tmp_path, 2)
    with log.open("a") as file:
        file.write('{"run": "a-s0-1", "what": "tra')
    append(entry(3), tmp_path)
    assert check_chain(tmp_path).faults == ()
    assert [line["round"] for line in left(tmp_path)] == [1, 2, 3]


def test_a_note_of_the_last_line_that_a_crash_left_behind_is_no_damage(tmp_path: Path) -> None:
    written(tmp_path, 2)
    before = (tmp_path / HEAD).read_text()
    append(entry(3), tmp_path)
    (tmp_path / HEAD).write_text(before)
    assert check_chain(tmp_path).faults == ()
    (tmp_path / HEAD).unlink()
    assert "could be missing unseen" in check_chain(tmp_path).faults[0]


@pytest.mark.parametrize("head_too", [False, True])
def test_what_was_cut_off_stays_missing_when_more_is_written(head_too: bool, tmp_path: Path) -> None:
    log = written(tmp_path, 10)
    log.write_text("\n".join(log.read_text().splitlines()[:4]) + "\n")
    if head_too:
        (tmp_path / HEAD).unlink()
    append(entry(11), tmp_path)
    checked = check_chain(tmp_path)
    assert checked.missing == (1 if head_too else 6)  # without the note of the last line nobody knows how many
    assert checked.faults
    assert sum(line["what"] == "train" for line in left(tmp_path)) == 5 + checked.missing


def test_a_log_of_an_earlier_version_opens_and_is_chained_from_now_on(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("".join(json.dumps(entry(number)) + "\n" for number in (1, 2)) + '{"run": "cu')
    assert check_chain(tmp_path).faults == ()
    append(entry(3), tmp_path)
    checked = check_chain(tmp_path)
    assert (checked.lines, checked.chained, checked.faults) == (3, 1, ())
    lines = (tmp_path / LOG).read_text().splitlines()
    (tmp_path / LOG).write_text("\n".join([lines[0].replace("100", "1"), *lines[1:]]) + "\n")  # of the old part
    assert check_chain(tmp_path).faults


def test_a_budget_is_not_widened_by_removing_lines(federation: Path, tmp_path: Path) -> None:
    """Three rounds were used; with two lines gone, the hospital still lets no fourth update out."""
    study, policy = toy_study(federation), HospitalPolicy(Limits(rounds=3), ("blob",), b"k" * 32, tmp_path)
    for number in range(3):
        send(policy, study, number)
    log = tmp_path / LOG
    log.write_text("\n".join(log.read_text().splitlines()[:1]) + "\n")
    with pytest.raises(Refused) as refused:
        send(policy, study, 9.0)
    assert refused.value.word == "rounds"


def test_the_command_names_the_first_broken_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "memory")
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(tmp_path / "memory")])
    assert not ended.value.code
    assert "log: 5 lines, each as it was written" in capsys.readouterr().out
    log.write_text("\n".join(changed(log.read_text().splitlines())) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(tmp_path / "memory")])
    assert ended.value.code == 1
    assert "line 3 is not what was written" in capsys.readouterr().err
