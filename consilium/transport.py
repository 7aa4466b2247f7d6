"""How packets travel: numbers in half the bits (`[study] transport`), and packed without loss (`[study] compress`).

Numbers are rounded where a packet is made, in a simulation as between hospitals, so both give the same bits. What only
a network does is exact: a rounded number takes two bytes there, and packing loses nothing.
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

from consilium.message_parsing import checked_length
from consilium.tree import Packet, PacketError, canonical_json

KINDS: Mapping[str, torch.dtype | None] = {"exact": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKED = "packed"  # in the header of a packet that travels: by tensor, its type and shape
_TYPES = {str(kind).removeprefix("torch."): kind for kind in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)}  # fmt: skip
_LONGEST = 1 << 40  # one side of a tensor
_LEVEL = 1  # of zlib: higher ones take several times as long and gain a hundredth


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


def packed(packet: Packet, transport: str, compress: bool) -> Packet:
    """A rounded packet as it travels; nothing is lost on the way."""
    kind = KINDS[transport]
    if kind is None and not compress:
        return packet
    shapes: dict[str, list[Any]] = {}
    tensors: dict[str, Tensor] = {}
    for path, tensor in packet.tensors.items():
        narrow = tensor.to(kind) if kind and tensor.dtype == torch.float32 and _fits(tensor, kind) else tensor
        shapes[path] = [str(narrow.dtype).removeprefix("torch."), list(tensor.shape), str(tensor.dtype)[6:]]
        plain = narrow.contiguous().reshape(-1).view(torch.uint8).numpy()
        tensors[path] = torch.from_numpy(_deflated(plain, narrow.element_size()) if compress else plain)
    head = {"message": packet.header, PACKED: shapes, "deflated": compress}
    return Packet(canonical_json(head), tensors)


def unpacked(packet: Packet, room: int) -> Packet:
    """What `packed` was given; `PacketError` if it is not of that form, or would take more than `room` bytes."""
    try:
        return _unpacked(packet, room)
    except PacketError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError, MemoryError) as error:
        raise PacketError(f"a packed message has another form ({type(error).__name__})") from error


def _unpacked(packet: Packet, room: int) -> Packet:
    head = json.loads(checked_length(packet.header))
    shapes, deflated, header = head[PACKED], bool(head["deflated"]), str(head["message"])
    if shapes.keys() != packet.tensors.keys():
        raise PacketError("a packed message names other tensors than it holds")
    found = {path: (_TYPES[name], shape, _TYPES[wide]) for path, (name, shape, wide) in shapes.items()}
    if not all(type(side) is int and 0 <= side < _LONGEST for _, shape, _ in found.values() for side in shape):
        raise PacketError("a packed tensor has an impossible shape")
    total = sum(max(narrow.itemsize, wide.itemsize) * math.prod(shape) for narrow, shape, wide in found.values())
    if total > room:
        raise PacketError(f"a packed message would take {total} bytes, and at most {room} are expected")
    return Packet(header, {path: _whole(packet.tensors[path], deflated, *found[path]) for path in found})


def _whole(tensor: Tensor, deflated: bool, kind: torch.dtype, shape: list[int], wide: torch.dtype) -> Tensor:
    size = kind.itemsize * math.prod(shape)
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise PacketError("a packed tensor is not a row of bytes")
    plain = tensor.contiguous().numpy()
    if deflated:
        plain = _inflated(plain, kind.itemsize, size)
    if len(plain) != size:
        raise PacketError("a packed tensor is shorter or longer than its shape")
    if not size:
        return torch.empty(shape, dtype=wide)
    return torch.from_numpy(plain.copy()).view(kind).view(shape).to(wide)


def _deflated(plain: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Compressed, the first bytes of all numbers before the second: exponents are alike, the last digits are not."""
    sorted_ = np.ascontiguousarray(plain.reshape(-1, width).T)
    return np.frombuffer(bytearray(zlib.compress(sorted_.data, _LEVEL)), dtype=np.uint8)


def _inflated(data: np.ndarray[Any, Any], width: int, size: int) -> np.ndarray[Any, Any]:
    machine = zlib.decompressobj()
    try:
        plain = machine.decompress(data.tobytes(), size + 1)  # no more than was announced
    except zlib.error as error:
        raise PacketError("a packed tensor cannot be unpacked") from error
    if len(plain) != size:
        raise PacketError("a packed tensor is shorter or longer than its shape")
    return np.ascontiguousarray(np.frombuffer(plain, dtype=np.uint8).reshape(width, -1).T).reshape(-1)
