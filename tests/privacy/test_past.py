"""What the firewall remembers: it only grows, decides as if everything were looked at, and is checked when read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium.contract import Interrupted, crash_after, run_in_process
from consilium.privacy.firewall import Firewall, judged
from consilium.privacy.measuring import WIDTH, Update
from consilium.privacy.past import (
    EMPTY,
    AcceptedUpdate,
    History,
    OldHistory,
    Sketches,
    _OldTrace,
    append_entries,
    read_entries,
)
from consilium.run_folder import RunFolder
from consilium.site import SiteCard
from consilium.store import Store, read_document, write_document
from tests.toy import toy_study


def drawn(seed: int, count: int, spread: float = 1.0) -> Tensor:
    """Sketches around one direction, so that many are alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, WIDTH, generator=generator) + spread * torch.randn(count, WIDTH, generator=generator)


def grown(rows: Tensor) -> Sketches:
    sketches = Sketches()
    for row in rows:
        sketches = sketches.plus(row)
    return sketches


@pytest.mark.parametrize("apart", [0.0, 1e-6, 1e-3, 0.5, 2.0])
def test_what_is_near_is_found_as_if_all_were_looked_at(apart: float) -> None:
    rows = drawn(3, 200)
    for i in (0, 99, 199):
        now = rows[i] + apart * rows[i].norm() * torch.nn.functional.normalize(drawn(4, 1)[0], dim=0)
        gap = (rows[i].double() - now.double()).norm().item()
        for distance in (0.99 * gap, gap, 1.01 * gap):
            near = ((rows.double() - now.double()).square().sum(1).sqrt() <= distance).any()
            assert grown(rows).has_within(now, distance) == bool(near)


def test_two_histories_that_go_on_from_one_do_not_meet() -> None:
    rows = drawn(0, 3)
    first = grown(rows[:1])
    one, two = first.plus(rows[1]), first.plus(rows[2])
    assert one.latest(1).equal(rows[1:2])
    assert two.latest(1).equal(rows[2:3])
    assert len(first) == 1


# ---------------------------------------------------------------------------------------------- on disk


def entry(number: int, site: str = "ada") -> AcceptedUpdate:
    turn = None if number == 0 else 0.1 * number
    return AcceptedUpdate(f"train/{site}/global", 0.1 + number, turn, 1 / 3, drawn(number, 1)[0], float(number).hex())


def history(*numbers: int) -> History:
    found = EMPTY
    for number in numbers:
        found = found.with_entries([entry(number), entry(number, "bea")])
    return found


def same(one: History, other: History) -> bool:
    def told(found: History) -> dict[str, Any]:
        return {k: (*vars(t).values(), t.sketches.latest(10**6).tolist()) for k, t in found.traces.items()}

    def plain(found: History) -> list[Any]:
        return [(k, [part for part in v if not isinstance(part, Sketches)]) for k, v in told(found).items()]

    return plain(one) == plain(other) and one.count == other.count


def test_a_history_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path, size, found = tmp_path / "past", 0, EMPTY
    for number in range(5):
        found = found.with_entries([entry(number), entry(number, "bea")])
        size = append_entries(found.since(2 * number), path, size)
    back, lost = read_entries(path, size)
    assert lost == 0 and same(back, found)


def test_a_line_of_0_2_is_read(tmp_path: Path) -> None:
    """It has the likeness of a rule that is gone."""
    size = append_entries(history(0).since(0)[:1], tmp_path / "past", 0)
    old = json.loads((tmp_path / "past").read_text().partition(" ")[2])
    text = json.dumps([*old[:4], 0.9, *old[4:]])
    line = f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}\n"
    (tmp_path / "past").write_text(line)
    found, lost = read_entries(tmp_path / "past", len(line))
    assert (found.count, lost) == (1, 0) and size < len(line)
    assert found.of("train", "ada", "global").seals == history(0).of("train", "ada", "global").seals


def test_rounds_that_were_not_committed_are_written_over(tmp_path: Path) -> None:
    size = append_entries(history(0).since(0), tmp_path / "past", 0)
    append_entries(history(7).since(0), tmp_path / "past", size)
    size = append_entries(history(0, 1).since(2), tmp_path / "past", size)
    assert same(read_entries(tmp_path / "past", size)[0], history(0, 1))


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    """The cost of a round does not grow with the rounds before it."""
    path, size, found, added = tmp_path / "past", 0, EMPTY, []
    for number in range(300):
        found = found.with_entries([entry(number % 10)])
        after = append_entries(found.since(number), path, size)
        added.append(after - size)
        size = after
    assert max(added) < 1.1 * min(added) < 2000
    assert sum(len(part) for part in found.latest) == 2  # nor does it hold on to what is saved


def test_a_turned_bit_costs_its_entry_alone(tmp_path: Path) -> None:
    size = append_entries(history(0, 1, 2).since(2), tmp_path / "past", 0)
    content = (tmp_path / "past").read_bytes()
    for place in range(0, size, 97):
        turned = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
        (tmp_path / "past").write_bytes(turned)
        back, lost = read_entries(tmp_path / "past", size)
        assert lost >= 1 and back.count <= 3
        for trace in back.traces.values():
            assert set(trace.lengths) <= {1.1, 2.1}


def firewalled(federation: Path, **more: Any) -> Any:
    plan = {"study__rounds": 4, "study__score_every": 4, "study__firewall": "refuse", "local__batch_size": 4}
    return toy_study(federation, "fedavg", **plan, **more)


def stopped(federation: Path, runs: Path) -> Path:
    with pytest.raises(Interrupted):
        run_in_process(firewalled(federation), runs, crash_after("round", 3))
    (folder,) = runs.iterdir()
    return folder


def test_a_run_says_what_of_its_past_is_damaged_and_goes_on(federation: Path, tmp_path: Path) -> None:
    folder = stopped(federation, tmp_path)
    content = bytearray((folder / "firewall.jsonl").read_bytes())
    content[40] ^= 1
    (folder / "firewall.jsonl").write_bytes(content)
    run_in_process(firewalled(federation), tmp_path)
    events = RunFolder.open(folder).events()
    (warning,) = [event["text"] for event in events if event["event"] == "warning"]
    assert "firewall.jsonl: 1 damaged entries; the firewall continues without them" in warning


def test_a_run_of_0_1_goes_on_with_its_past(federation: Path, tmp_path: Path) -> None:
    """There the whole history lay in the store, with every state; it moves into the file that grows."""
    whole = run_in_process(firewalled(federation), tmp_path / "whole").folder
    folder = stopped(federation, tmp_path / "old")
    states = folder / "server"
    for path in states.glob("[0-9]*.json"):
        facts = read_document(path)
        found, _ = read_entries(folder / "firewall.jsonl", facts.pop("firewall_bytes"))
        old = {
            key: _OldTrace(t.lengths, t.turns, t.shifts, (), t.sketches.latest(99).clone(), t.seals)
            for key, t in found.traces.items()
        }
        facts["firewall"] = Store(folder / "store").put(OldHistory(old))
        write_document(facts, path)
    (folder / "firewall.jsonl").unlink()
    run_in_process(firewalled(federation), tmp_path / "old")
    for name in ("last.safetensors", "scores.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    sizes = [json.loads(path.read_text())["firewall_bytes"] for path in sorted(states.glob("[0-9]*.json"))[-1:]]
    ends = [read_entries(run / "firewall.jsonl", 10**9)[0] for run in (folder, whole)]
    assert sizes == [(folder / "firewall.jsonl").stat().st_size]
    assert {k: t.lengths for k, t in ends[0].traces.items()} == {k: t.lengths for k, t in ends[1].traces.items()}


def test_every_state_of_a_run_that_keeps_all_has_its_own_past(federation: Path, tmp_path: Path) -> None:
    study = firewalled(federation, study__keep_rounds="all")
    folder = run_in_process(study, tmp_path).folder
    counts = []
    for path in sorted((folder / "server").glob("[0-9]*.json")):
        counts.append(read_entries(folder / "firewall.jsonl", read_document(path)["firewall_bytes"])[0].count)
    assert counts == [3, 6, 9, 12]


def test_a_judgement_adds_what_it_accepted() -> None:
    card = {"ada": SiteCard("ada", 0, 8, ())}
    found = EMPTY
    for number in range(3):
        update = Update(1.0, 0.0, drawn(number, 1)[0], str(number), 0.0)
        verdicts, found = judged(Firewall(), found, {"ada": {"global": update}}, card, "train")
        assert not verdicts["ada"].why
    assert (found.count, found.of("train", "ada", "global").seals) == (3, ("0", "1", "2"))
    repeated = Update(1.0, 0.0, drawn(1, 1)[0], "1", 0.0)
    verdicts, after = judged(Firewall(), found, {"ada": {"global": repeated}}, card, "train")
    assert "has sent before" in verdicts["ada"].why and after.count == 3
