"""How packets travel: numbers in half the bits (`[study] transport`), and packed without loss (`[study] compress`).

Numbers are rounded where a packet is made, in a simulation as between hospitals, so both give the same bits. What only
a network does is exact: a rounded number takes two bytes there, and packing loses nothing. A tensor that has changed
since a version that the receiver holds travels as the change, where that is smaller.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilium.differences import Bytes, Version, bytes_of, change, held_as, undone
from consilium.message_parsing import checked_length
from consilium.tree import Packet, PacketError, canonical_json

KINDS: Mapping[str, torch.dtype | None] = {"exact": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKED = "packed"  # in the header of a packet that travels: by tensor, its types and shape, and what it is a change of
_TYPES = {str(kind).removeprefix("torch."): kind for kind in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)}  # fmt: skip
_LONGEST = 1 << 40  # one side of a tensor
_LEVEL = 1  # of zlib: higher ones take several times as long and gain a hundredth
_SAMPLE = 4096  # numbers of a tensor by which it is judged whether its change is smaller
NOTHING: Mapping[str, Any] = {}
_NAMED = 40  # bytes that the name of a version takes


class Rounding:
    """Rounds packets of one exchange; tensors that several packets share stay shared."""

    def __init__(self, transport: str) -> None:
        self._kind = KINDS[transport]
        self._done: dict[tuple[object, ...], Tensor] = {}
        self._packets: dict[int, tuple[Packet, Packet]] = {}  # with the one it was made of, or its number is used again

    def of(self, packet: Packet) -> Packet:
        if self._kind is None:
            return packet
        if id(packet) not in self._packets:
            tensors = {path: self._rounded(tensor) for path, tensor in packet.tensors.items()}
            self._packets[id(packet)] = packet, Packet(packet.header, tensors)
        return self._packets[id(packet)][1]

    def _rounded(self, tensor: Tensor) -> Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()
        if key not in self._done:
            assert self._kind is not None
            self._done[key] = rounded(tensor, self._kind)
        return self._done[key]


def rounded(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """A tensor with numbers that `kind` can hold; one with numbers too large for it stays as it is."""
    if tensor.dtype != torch.float32:
        return tensor
    narrow = tensor.to(kind)
    return narrow.float() if bool(narrow.isfinite().all()) else tensor


def size_of(packet: Packet, transport: str) -> int:
    """The bytes of a rounded packet on its way, before it is packed."""
    kind = KINDS[transport]
    if kind is None:
        return packet.nbytes()
    halves = sum(t.nbytes // 2 for t in packet.tensors.values() if t.dtype == torch.float32 and _fits(t, kind))
    return packet.nbytes() - halves


def _fits(tensor: Tensor, kind: torch.dtype) -> bool:
    return torch.equal(tensor.to(kind).float(), tensor)


def packed(packet: Packet, transport: str, compress: bool, versions: Mapping[str, Version] = NOTHING) -> Packet:
    """A rounded packet as it travels; nothing is lost on the way.

    Args:
        packet: what the receiver will have.
        transport: the type of its numbers.
        compress: whether it is made smaller.
        versions: by path, tensors that the receiver holds.
    """
    kind = KINDS[transport]
    if kind is None and not compress:
        return packet
    shapes: dict[str, list[Any]] = {}
    tensors: dict[str, Tensor] = {}
    for path, tensor in packet.tensors.items():
        narrow = tensor.to(kind) if kind and tensor.dtype == torch.float32 and _fits(tensor, kind) else tensor
        shapes[path] = [str(narrow.dtype).removeprefix("torch."), list(tensor.shape), str(tensor.dtype)[6:]]
        plain = bytes_of(narrow)
        if compress:
            moved = change(tensor, narrow.dtype, versions[path]) if path in versions else None
            if moved is not None and _is_smaller(moved, plain, narrow.dtype):
                plain = moved
                shapes[path].append(versions[path].name)
            plain = _deflated(plain, narrow.dtype)
        tensors[path] = torch.from_numpy(plain)
    head = {"message": packet.header, PACKED: shapes, "deflated": compress}
    return Packet(canonical_json(head), tensors)


def unpacked(packet: Packet, room: int, held: Mapping[str, Tensor] = NOTHING) -> Packet:
    """What `packed` was given; `PacketError` if it is not of that form, or would take more than `room` bytes.

    `held` are the tensors that its sender knows to be here, by the names of their contents.
    """
    try:
        return _unpacked(packet, room, held)
    except PacketError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError, MemoryError) as error:
        raise PacketError(f"a packed message has another form ({type(error).__name__})") from error


def _unpacked(packet: Packet, room: int, held: Mapping[str, Tensor]) -> Packet:
    head = json.loads(checked_length(packet.header))
    shapes, deflated, header = head[PACKED], bool(head["deflated"]), str(head["message"])
    if shapes.keys() != packet.tensors.keys() or any(len(entry) > 4 for entry in shapes.values()):
        raise PacketError("a packed message names other tensors than it holds")
    found = {path: (_TYPES[name], shape, _TYPES[wide]) for path, (name, shape, wide, *_) in shapes.items()}
    of = {path: entry[3] for path, entry in shapes.items() if len(entry) == 4}  # what is a change of a version
    if not all(type(side) is int and 0 <= side < _LONGEST for _, shape, _ in found.values() for side in shape):
        raise PacketError("a packed tensor has an impossible shape")
    total = sum(max(narrow.itemsize, wide.itemsize) * math.prod(shape) for narrow, shape, wide in found.values())
    if total > room:
        raise PacketError(f"a packed message would take {total} bytes, and at most {room} are expected")
    tensors: dict[str, Tensor] = {}
    for path, (kind, shape, wide) in found.items():
        plain = _plain(packet.tensors[path], deflated, kind, kind.itemsize * math.prod(shape))
        if path in of:
            plain = undone(plain, kind, shape, wide, held_as(of[path], held))
        row = torch.from_numpy(plain.copy()).view(kind) if len(plain) else torch.empty(0, dtype=kind)
        tensors[path] = row.view(shape).to(wide)
    return Packet(header, tensors)


def _plain(tensor: Tensor, deflated: bool, kind: torch.dtype, size: int) -> Bytes:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise PacketError("a packed tensor is not a row of bytes")
    plain: Bytes = tensor.contiguous().numpy()
    if deflated:
        plain = _inflated(plain, kind.itemsize, size)
    if len(plain) != size:
        raise PacketError("a packed tensor is shorter or longer than its shape")
    return plain


def _is_smaller(moved: Bytes, plain: Bytes, kind: torch.dtype) -> bool:
    """Judged by some of the numbers: to pack all of them twice would take twice as long."""
    step = max(1, len(plain) // kind.itemsize // _SAMPLE)
    short, long = (len(_deflated(row.reshape(-1, kind.itemsize)[::step], kind)) for row in (moved, plain))
    return short + _NAMED < long


def _deflated(plain: Bytes, kind: torch.dtype) -> Bytes:
    """Compressed, the first bytes of all numbers before the second: exponents are alike, the last digits are not.

    In weights nothing is repeated but one byte, so longer matches are not looked for: half the time, and smaller.
    """
    sorted_ = np.ascontiguousarray(plain.reshape(-1, kind.itemsize).T)
    strategy = zlib.Z_RLE if kind.is_floating_point else zlib.Z_DEFAULT_STRATEGY
    machine = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, strategy)
    return np.frombuffer(bytearray(machine.compress(sorted_.data) + machine.flush()), dtype=np.uint8)


def _inflated(data: Bytes, width: int, size: int) -> Bytes:
    machine = zlib.decompressobj()
    try:
        plain = machine.decompress(data.tobytes(), size + 1)  # no more than was announced
    except zlib.error as error:
        raise PacketError("a packed tensor cannot be unpacked") from error
    if len(plain) != size:
        raise PacketError("a packed tensor is shorter or longer than its shape")
    return np.ascontiguousarray(np.frombuffer(plain, dtype=np.uint8).reshape(width, -1).T).reshape(-1)
