"""A packet as a safetensors file, or as bytes: written in pieces, read on demand, checked by a digest."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consilium.files import write_open, write_parts
from consilium.message_parsing import T
from consilium.tensor_tables import CODES, HEADER, TYPES, read_table
from consilium.tree import Packet, PacketError, canonical_json, flatten, unflatten
from consilium.weights import SMALL

DIGEST = "digest"  # in the header of stored files: of their whole content


def pieces(packet: Packet) -> Iterator[bytes | memoryview]:
    """The safetensors file of a packet, in pieces.

    The library's `save_file` would hold all tensors in memory and copy those that are views of another file, and it
    reads whole files only. So this module writes and reads them itself.
    """
    table: dict[str, Any] = {"__metadata__": {HEADER: packet.header}}
    end = 0
    names = sorted(packet.tensors)
    for name in names:
        tensor = packet.tensors[name]
        start, end = end, end + tensor.nbytes
        table[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    row: list[Tensor] = []  # small tensors of one type become one piece
    size = 0
    for name in names:
        tensor = packet.tensors[name]
        if row and (tensor.dtype != row[0].dtype or size + tensor.nbytes > SMALL):
            yield _bytes(row)
            row, size = [], 0
        row.append(tensor.contiguous().reshape(-1))
        size += tensor.nbytes
    if row:
        yield _bytes(row)


def _bytes(row: list[Tensor]) -> memoryview:
    joined = torch.cat(row) if len(row) > 1 else row[0]
    return joined.view(torch.uint8).numpy().data


def write(packet: Packet, path: Path, durable: bool = False, private: bool = False, sync_name: bool = True) -> int:
    """Write a packet as a safetensors file, completely or not at all; returns its size in bytes."""
    return write_parts(pieces(packet), path, durable, private=private, sync_name=sync_name)


class Place(NamedTuple):
    """Where a packet is in a file that holds several."""

    start: int = 0
    size: int = 0  # 0: up to the end


WHOLE = Place()


def append(packet: Packet, path: Path) -> Place:
    """Write a packet behind what a file holds, on pages of its own: it is read as if it were a file of its own."""
    with FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(end + -end % mmap.ALLOCATIONGRANULARITY)
        return Place(start, write_open(pieces(packet), file))


class _FileTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read on demand; they are views of the mapped file."""

    def __init__(self, path: Path, place: Place) -> None:
        self._place, self._map = place, _mapped(path, place)
        self.header, (self._table, self._blocks), self._start = read_table(self._map)
        self._views: dict[str, Tensor | None] = dict.fromkeys(self._table)

    def again(self, path: Path) -> _FileTensors:
        """The tensors of the same file, unchanged by writes to these; its table is not read again."""
        fresh = copy.copy(self)
        fresh._views, fresh._map = dict.fromkeys(self._views), _mapped(path, self._place)
        return fresh

    def __getitem__(self, name: str) -> Tensor:
        view = self._views[name]
        if view is None:
            view = self._views[name] = self._view(*self._table[name])
        return view

    def _view(self, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
        """The same as the library's `get_tensor`, but faster: a model has many small tensors."""
        start, kind, count = self._start + data_offsets[0], TYPES[dtype], math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=kind)
        if start % kind.itemsize:  # the tensor is not aligned
            part = self._map[start : self._start + data_offsets[1]]
            return torch.frombuffer(bytearray(part), dtype=kind).view(shape)
        return torch.frombuffer(self._map, dtype=kind, count=count, offset=start).view(shape)

    def forget(self, name: str) -> None:
        """Release the pages of a large tensor; they are read again when needed."""
        if self._released(*self._table[name].data_offsets):
            self._views[name] = None

    def _released(self, begin: int, end: int) -> bool:
        start, end = self._start + begin, self._start + end
        start += -start % mmap.PAGESIZE  # whole pages only
        if end - start < SMALL:
            return False
        self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        return True

    def blocks(self) -> Iterator[Tensor]:
        """All numbers, in fewer tensors; the pages of a large one are released when the next is asked for."""
        for block in self._blocks:
            yield self._view(*block)
            self._released(*block.data_offsets)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def _mapped(path: Path, place: Place) -> mmap.mmap:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:  # a private view: nothing is written back
        return mmap.mmap(file, place.size, access=mmap.ACCESS_COPY, offset=place.start)
    finally:
        os.close(file)


def with_digest(packet: Packet) -> Packet:
    """The packet with a digest of its header and tensors, for a stored file: `read` checks it."""
    head = {key: value for key, value in json.loads(packet.header).items() if key != DIGEST}
    return Packet(canonical_json({**head, DIGEST: _digest(head, packet.tensors)}), packet.tensors)


def digest_of(packet: Packet) -> str | None:
    """The digest in a packet's header, which `read` has checked; None for files of version 0.1, which have none."""
    found = json.loads(packet.header).get(DIGEST) if _has_digest(packet) else None
    return None if found is None else str(found)


def _has_digest(packet: Packet) -> bool:
    return f'"{DIGEST}":"' in packet.header


def _check_digest(packet: Packet) -> None:
    head = json.loads(packet.header)
    if head.pop(DIGEST, None) != _digest(head, packet.tensors):
        raise PacketError("its content is not what was written: it is damaged")


def _digest(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    hasher = hashlib.sha256(canonical_json(head).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if isinstance(tensors, _FileTensors):
            tensors.forget(name)  # the file is read once and not kept in memory
    return hasher.hexdigest()


def read_again(packet: Packet, path: Path) -> Packet:
    """A packet that was read from this file, again in its stored form, for another receiver."""
    assert isinstance(packet.tensors, _FileTensors)
    return Packet(packet.header, packet.tensors.again(path))


def read(path: Path, place: Place = WHOLE) -> Packet:
    """The packet in a file; its tensors stay in the file until they are used. Its digest is checked if it has one."""
    try:
        tensors = _FileTensors(path, place)
    except FileNotFoundError as error:
        raise PacketError(f"there is no file {path}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PacketError(f"{path} is damaged or not a safetensors file ({error})") from error
    if tensors.header is None:
        raise PacketError(f"{path} is a safetensors file, but consilium did not write it: it has no '{HEADER}' entry")
    packet = Packet(tensors.header, tensors)
    if _has_digest(packet):
        try:
            _check_digest(packet)
        except (PacketError, ValueError, AttributeError, KeyError) as error:
            raise PacketError(f"{path} is damaged: its digest is another") from error
    return packet


def save(item: Any, path: Path, durable: bool = False) -> None:
    """Write a message to a file, with its digest."""
    write(with_digest(flatten(item)), path, durable)


def load(path: Path, kind: type[T]) -> T:
    """Read a message of a known type from a file."""
    try:
        return unflatten(read(path), kind)
    except PacketError as error:
        raise PacketError(f"{path}: {error}") from error


def to_bytes(packet: Packet) -> bytes:
    return b"".join(pieces(packet))
