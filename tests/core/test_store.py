"""Messages on disk by reference, and what a site remembers of which round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from consilium import packet_files, tree
from consilium.contract import digest
from consilium.errors import RunError
from consilium.store import MemoryStore, Store
from consilium.tree import PacketError, message
from consilium.weights import Weights


@message
class Memory:
    own: Weights
    others: Mapping[str, Weights]
    step: int
    mask: Tensor | None = None


def vector(value: float) -> Weights:
    return Weights({"w": torch.full((3,), value)})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.safetensors"))


def test_a_stored_message_comes_back(tmp_path: Path) -> None:
    item = Memory(vector(1.0), {"hk": vector(2.0)}, 7, torch.tensor([True, False]))
    store = Store(tmp_path)
    document = json.loads(json.dumps(store.put(item)))  # a document is JSON
    assert digest(store.get(document, Memory)) == digest(item)


def test_content_is_stored_once(tmp_path: Path) -> None:
    """Three references to two contents are two files, now and when put again."""
    store = Store(tmp_path)
    item = Memory(vector(1.0), {"hk": vector(1.0), "bin": vector(2.0)}, 0)
    first = store.put(item)
    assert files(tmp_path) == sorted({f"{vector(x).digest}.safetensors" for x in (1.0, 2.0)})
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert store.put(item) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_empty_weights_can_be_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert len(store.get(store.put(Memory(Weights({}), {}, 0)), Memory).own) == 0


def test_sweep_keeps_what_a_document_refers_to(tmp_path: Path) -> None:
    store = Store(tmp_path)
    documents = [store.put(Memory(vector(x), {"hk": vector(9.0)}, 0, torch.tensor([x]))) for x in (1.0, 2.0, 3.0)]
    store.sweep(documents[1:])
    assert len(files(tmp_path)) == 5  # 2, 3, the shared 9 and two single tensors; 1 and its tensor are gone
    assert [store.get(d, Memory).own["w"][0].item() for d in documents[1:]] == [2.0, 3.0]
    with pytest.raises(PacketError, match="there is no file"):
        store.get(documents[0], Memory)


def test_a_state_stays_readable_while_its_file_is_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    held = store.get(store.put(Memory(vector(5.0), {}, 0)), Memory)
    store.sweep([])
    assert held.own["w"].tolist() == [5.0, 5.0, 5.0]


def test_exchanged_content_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    document = dict(store.put(Memory(vector(1.0), {}, 0)))
    other = store.put(Memory(Weights({"v": torch.zeros(1)}), {}, 0))
    with pytest.raises(PacketError, match="'own' are not those of its message"):
        store.get({**document, "weights": other["weights"]}, Memory)


# ---------------------------------------------------------------------------------------------- the memory store


def remembered(memories: MemoryStore, round: int, after: int, value: float, best: int = -1) -> None:
    """What a site does at the end of a round that went on from round `after`."""
    memories.put(round, Memory(vector(value), {}, round), keep=(after, best))


def test_a_known_table_does_not_excuse_a_shorter_file(tmp_path: Path) -> None:
    """Files of the same layout share a table that is read once; the size of each file is still checked."""
    whole, short = tmp_path / "whole", tmp_path / "short"
    for path, value in ((whole, 1.0), (short, 2.0)):
        packet_files.write(tree.flatten(Memory(vector(value), {}, 7)), path)
        assert packet_files.load(path, Memory).own["w"].tolist() == [value] * 3
    short.write_bytes(short.read_bytes()[:-4])
    with pytest.raises(PacketError, match="damaged"):
        packet_files.load(short, Memory)


def test_the_memory_store_keeps_the_merged_and_the_current_round(tmp_path: Path) -> None:
    memories = MemoryStore(tmp_path, "hk")
    for round in range(4):
        remembered(memories, round, round - 1, float(round))
    assert memories.rounds() == [2, 3]
    assert [memories.at(round, Memory).own["w"][0].item() for round in (2, 3)] == [2.0, 3.0]  # type: ignore[union-attr]
    assert len(files(tmp_path)) == 2


def test_the_memory_store_also_keeps_the_best_round(tmp_path: Path) -> None:
    memories = MemoryStore(tmp_path, "hk")
    for round, best in ((0, -1), (1, 0), (2, 1), (3, 1), (4, 1)):
        remembered(memories, round, round - 1, float(round), best)
    assert memories.rounds() == [1, 3, 4]


def test_a_lost_round_is_dropped(tmp_path: Path) -> None:
    """Round 1 never reached the server, so round 2 starts from round 0 again and round 1 goes."""
    memories = MemoryStore(tmp_path, "hk")
    remembered(memories, 0, -1, 10.0)
    remembered(memories, 1, 0, 11.0)
    remembered(memories, 2, 0, 12.0)
    assert memories.rounds() == [0, 2]
    assert f"{vector(11.0).digest}.safetensors" not in files(tmp_path)


def test_a_round_from_the_future_is_dropped(tmp_path: Path) -> None:
    """A server that lost its last commit trains round 2 again; the old rounds 2 and 3 must not survive."""
    memories = MemoryStore(tmp_path, "hk")
    for round in (0, 1, 2, 3):
        remembered(memories, round, round - 1, float(round))
    assert memories.rounds() == [2, 3]
    remembered(memories, 2, 1, 22.0)
    assert memories.rounds() == [2]
    assert memories.at(2, Memory).own["w"][0].item() == 22.0  # type: ignore[union-attr]
    assert files(tmp_path) == [f"{vector(22.0).digest}.safetensors"]


def test_nothing_is_remembered_before_the_first_round(tmp_path: Path) -> None:
    assert MemoryStore(tmp_path / "none", "hk").at(-1, Memory) is None
    assert MemoryStore(tmp_path / "none", "hk").rounds() == []


def test_a_forgotten_round_is_said(tmp_path: Path) -> None:
    memories = MemoryStore(tmp_path, "hk")
    remembered(memories, 0, -1, 1.0)
    with pytest.raises(RunError, match=r"site 'hk' lacks a round that the server merged.*Restore"):
        memories.at(4, Memory)


def test_a_damaged_memory_is_said(tmp_path: Path) -> None:
    memories = MemoryStore(tmp_path, "hk")
    remembered(memories, 0, -1, 1.0)
    (tmp_path / "00000.json").write_text("{")
    with pytest.raises(RunError, match=r"00000.json is damaged"):
        memories.at(0, Memory)
