"""Tables of safetensors files: what is read here, the safetensors library reads too, and to the same tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from consilium import packet_files, tensor_tables
from consilium.packet_files import Place
from consilium.privacy.dp import NotFinite, refuse_not_finite
from consilium.tree import Packet, PacketError
from consilium.weights import SMALL

PACKET = Packet('{"a": "header"}', {"b/x": torch.arange(6.0).view(2, 3), "a": torch.tensor([7]), "c": torch.zeros(0)})


def packed(table: dict[str, Any], content: bytes) -> bytes:
    head = json.dumps(table).encode()
    return len(head).to_bytes(8, "little") + head + content


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"__metadata__": {"message": "{}"}, "a": entry("F32", [2], 0, 8), "b": entry("U8", [4], 8, 12)}
BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "two in one place": lambda table: {**table, "b": entry("U8", [4], 4, 8), "c": entry("U8", [4], 8, 12)},
    "a hole": lambda table: {**table, "b": entry("U8", [3], 9, 12)},
    "beyond the end": lambda table: {**table, "b": entry("U8", [5], 8, 13)},
    "bytes of nobody": lambda table: {**table, "b": entry("U8", [3], 8, 11)},
    "before the beginning": lambda table: {**table, "a": entry("F32", [3], -4, 8)},
    "another size": lambda table: {**table, "b": entry("U8", [2], 8, 12)},
    "a negative side": lambda table: {**table, "b": entry("U8", [-2, -2], 8, 12)},
    "half a side": lambda table: {**table, "b": entry("U8", [4.0], 8, 12)},
    "a side that is true": lambda table: {**table, "b": entry("U8", [4, True], 8, 12)},
    "an unknown type": lambda table: {**table, "b": entry("F8_E4M3", [4], 8, 12)},
    "a type that is no text": lambda table: {**table, "b": entry([], [4], 8, 12)},  # type: ignore[arg-type]
    "no place": lambda table: {**table, "b": {"dtype": "U8", "shape": [4]}},
    "three places": lambda table: {**table, "b": {**entry("U8", [4], 8, 12), "data_offsets": [8, 10, 12]}},
    "a word more": lambda table: {**table, "b": {**entry("U8", [4], 8, 12), "more": 1}},
    "an entry that is a number": lambda table: {**table, "b": 3},
    "many sides": lambda table: {**table, "b": entry("U8", [4, *[1] * 65], 8, 12)},
    "sides without end": lambda table: {**table, "b": entry("U8", [1 << 70, 0], 8, 12)},
    "metadata that are no texts": lambda table: {**table, "__metadata__": {"message": 1}},
}


@pytest.mark.parametrize("how", BAD)
def test_a_table_that_does_not_fit_its_file_is_refused(how: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(packed(GOOD, bytes(12)))
    assert set(packet_files.read(path).tensors) == {"a", "b"}
    path.write_bytes(packed(BAD[how](GOOD), bytes(12)))
    with pytest.raises(PacketError):
        packet_files.read(path)


@pytest.mark.parametrize("text", ["[]", "3", "{", "null", "", '{"a": 1, "a": 2}', "\udcff"])
def test_a_table_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    head = text.encode(errors="surrogateescape")
    (tmp_path / "x").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(PacketError, match="damaged or not a safetensors file"):
        packet_files.read(tmp_path / "x")


@pytest.mark.parametrize("size", [0, 1 << 40, (1 << 64) - 1])
def test_a_table_longer_than_its_file_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(size.to_bytes(8, "little") + packed(GOOD, bytes(12))[8:])
    with pytest.raises(PacketError, match="its table is cut off"):
        packet_files.read(tmp_path / "x")


def test_the_library_reads_whatever_is_read_here(tmp_path: Path) -> None:
    """Every byte of a table replaced by each of some others: what passes here, passes there, to the same numbers."""
    whole, path = packet_files.to_bytes(PACKET), tmp_path / "x"
    end = 8 + int.from_bytes(whole[:8], "little")
    passed = 0
    for place in range(8, end):
        for byte in b'0159"{}[],:U -':
            content = whole[:place] + bytes([byte]) + whole[place + 1 :]
            path.write_bytes(content)
            try:
                found = packet_files.read(path).tensors
            except PacketError:
                continue
            passed += 1
            there = load(content)
            assert {name: (t.dtype, t.tolist()) for name, t in found.items()} == {
                name: (t.dtype, t.tolist()) for name, t in there.items()
            }
    assert passed > 100  # other names, other headers


def test_several_packets_in_one_file(tmp_path: Path) -> None:
    packets = [Packet(f'{{"number": {i}}}', {"w": torch.full((i + 1,), float(i))}) for i in range(4)]
    places = [packet_files.append(packet, tmp_path / "replies") for packet in packets]
    for packet, place in zip(packets, places, strict=True):
        found = packet_files.read(tmp_path / "replies", place)
        assert (found.header, found.tensors["w"].tolist()) == (packet.header, packet.tensors["w"].tolist())
        found.tensors["w"].fill_(-1)  # a receiver's own: the file is not changed
        again = packet_files.read_again(found, tmp_path / "replies")
        assert again.tensors["w"].tolist() == packet.tensors["w"].tolist()
    with pytest.raises(PacketError, match="damaged or not a safetensors file"):
        packet_files.read(tmp_path / "replies", Place(places[1].start, places[1].size - 4))
    with pytest.raises(PacketError, match="damaged or not a safetensors file"):
        packet_files.read(tmp_path / "replies", Place(places[3].start, places[3].size + 4))


def test_entries_are_checked_once_for_all_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = tensor_tables._checked
    monkeypatch.setattr(tensor_tables, "_checked", lambda table, size: checked.append(size) or check(table, size))
    tensor_tables._known.clear()
    for loss in range(3):
        packet_files.write(Packet(f'{{"loss": {loss}}}', PACKET.tensors), tmp_path / str(loss))
        assert packet_files.read(tmp_path / str(loss)).header == f'{{"loss": {loss}}}'
    assert len(checked) == 1
    content = (tmp_path / "0").read_bytes()
    (tmp_path / "0").write_bytes(content[:-1])  # the same entries, which now end behind the file
    with pytest.raises(PacketError):
        packet_files.read(tmp_path / "0")


def test_long_tables_are_not_kept(tmp_path: Path) -> None:
    tensor_tables._known.clear()
    many = {f"{i:0100d}": torch.zeros(1) for i in range(1000)}
    packet_files.write(Packet("{}", many), tmp_path / "long")
    assert len(packet_files.read(tmp_path / "long").tensors) == 1000
    assert not tensor_tables._known
    for i in range(3 * tensor_tables.KNOWN):
        packet_files.write(Packet("{}", {f"w{i}": torch.zeros(1)}), tmp_path / "short")
        packet_files.read(tmp_path / "short")
    assert 0 < len(tensor_tables._known) <= tensor_tables.KNOWN


def test_a_table_is_read_though_another_thread_drops_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None: ...  # as if it were cleared at once

    monkeypatch.setattr(tensor_tables, "_known", Forgetful())
    packet_files.write(PACKET, tmp_path / "x")
    assert packet_files.read(tmp_path / "x").tensors["a"].tolist() == [7]


def test_blocks_hold_every_number_once(tmp_path: Path) -> None:
    """Small neighbours of one type are one tensor, large ones stay alone."""
    kinds = {"a": torch.float32, "b": torch.float32, "c": torch.int64, "d": torch.float32, "e": torch.float32}
    tensors = {name: torch.full((2, 3), i, dtype=kind) for i, (name, kind) in enumerate(kinds.items())}
    tensors |= {"f": torch.ones(SMALL), "g": torch.empty(0), "h": torch.tensor(7.0)}
    packet_files.write(Packet("{}", tensors), tmp_path / "x")
    packet = packet_files.read(tmp_path / "x")
    for _ in range(2):  # what was released is read again
        blocks = [block.clone() for block in packet.blocks()]
        assert [len(block) for block in blocks] == [12, 6, 12, SMALL, 1]
        assert b"".join(block.numpy().tobytes() for block in blocks) == b"".join(
            tensor.numpy().tobytes() for tensor in tensors.values()
        )
    assert list(Packet("{}", tensors).blocks()) == list(tensors.values())  # in memory they lie apart


@pytest.mark.parametrize("place", ["a", "f", "h"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_in_its_block(place: str, value: float, tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(5), "b": torch.zeros(3), "f": torch.zeros(SMALL), "h": torch.zeros(2)}
    tensors[place][1] = value
    packet_files.write(Packet("{}", tensors), tmp_path / "x")
    with pytest.raises(NotFinite, match=f"'{place}' of it holds"):
        refuse_not_finite(packet_files.read(tmp_path / "x"), "it")
