"""The only serialiser: a message becomes a JSON shape and named tensors; nothing is ever unpickled.

A message is a frozen dataclass made by `@message`. Its fields may be `Weights`, `Tensor`, numbers, text, `None`,
tuples, mappings with text keys, and messages. The receiver names the type it expects, so a packet can build
nothing else. A field may declare what its values can be, `Annotated[int, Range(0, 100)]`; anything else is refused
while the message is built.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import mmap
import re
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from consilium.errors import UserError
from consilium.files import write_parts
from consilium.weights import SMALL, Weights

T = TypeVar("T")
HEADER = "message"  # the single metadata key: with two, equal states would not be equal files
DIGEST = "digest"  # in the header: of all that a file which is kept holds
_HEADINGS = {"message", "masks", "stamp", DIGEST}


HEADER_BYTES = 1 << 26  # the longest header that is parsed


class PacketError(UserError):
    """A packet is damaged or is not of the type its receiver expects."""

    def __init__(self, why: str) -> None:
        super().__init__(why if len(why) <= 1500 else f"{why[:1500]}…")  # a sender does not choose how much we log


# ---------------------------------------------------------------------------------------------- declared ranges


@dataclasses.dataclass(frozen=True)
class Range:
    """A number from `low` to `high`, both included; NaN is in no range."""

    low: float
    high: float

    def fault(self, value: Any) -> str:
        return "" if self.low <= value <= self.high else f"is {_short(value)}, not from {self.low:g} to {self.high:g}"


@dataclasses.dataclass(frozen=True)
class Text:
    """Printable text of at most `most` characters; all of it matches `pattern`, where there is one."""

    most: int
    pattern: str = ""

    def fault(self, value: Any) -> str:
        if len(value) > self.most:
            return f"has {len(value)} characters, more than {self.most}"
        if not value.isprintable() or (self.pattern and not re.fullmatch(self.pattern, value)):
            return f"cannot be {_short(value)}"
        return ""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def fault(self, value: Any) -> str:
        return "" if value in self.words else f"cannot be {_short(value)}"


@dataclasses.dataclass(frozen=True)
class Items:
    """At most so many items of a tuple or a mapping."""

    most: int

    def fault(self, value: Any) -> str:
        return f"has {len(value)} items, more than {self.most}" if len(value) > self.most else ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A tensor of one type with at most `rows` rows of `columns` numbers; without columns, of single numbers."""

    dtype: torch.dtype
    rows: int
    columns: int | None = None

    def fault(self, value: Any) -> str:
        shape = () if self.columns is None else (self.columns,)
        if value.dtype != self.dtype or value.ndim < 1 or tuple(value.shape[1:]) != shape or len(value) > self.rows:
            return f"cannot be {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return ""


def _short(value: Any) -> str:
    """A value in a sentence: whoever sent it does not choose how long the sentence is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def message(cls: type[T]) -> type[T]:
    """Make a class a message: a frozen dataclass whose fields the tree can carry."""
    return dataclasses.dataclass(frozen=True)(cls)


class Packet(NamedTuple):
    """What passes between a site and the server: the message's JSON shape, and its tensors by path."""

    header: str
    tensors: Mapping[str, Tensor]

    def nbytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors.values())


# ---------------------------------------------------------------------------------------------- message → packet


class Split(NamedTuple):
    """A message taken apart: its JSON shape, its weights and its single tensors by path."""

    shape: str
    weights: dict[str, Weights]
    tensors: dict[str, Tensor]


def split(item: Any) -> Split:
    """Take a message apart; `assemble` puts it together again."""
    weights: dict[str, Weights] = {}
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Weights):
            weights[path] = value
            return list(value)
        if isinstance(value, Tensor):
            tensors[path] = value if value.is_meta else value.detach().cpu().contiguous()
            return "tensor"
        if dataclasses.is_dataclass(value):
            return {f.name: walk(getattr(value, f.name), _field(path, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {key: walk(value[key], _join(path, key)) for key in sorted(value)}
        if isinstance(value, (list, tuple)):
            return [walk(part, _join(path, str(i))) for i, part in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{path}: a message cannot hold a {type(value).__name__}")

    shape = {"type": type(item).__qualname__, "tree": walk(item, "")}
    return Split(json.dumps(shape, sort_keys=True, separators=(",", ":")), weights, tensors)


def flatten(item: Any) -> Packet:
    """A message as a packet; Boolean tensors are packed eight to a byte."""
    shape, weights, tensors = split(item)
    everything = {f"{path}/{name}": tensor for path, part in weights.items() for name, tensor in part.items()}
    everything.update(tensors)
    masks = {path: list(tensor.shape) for path, tensor in everything.items() if tensor.dtype == torch.bool}
    for path in masks:
        everything[path] = _packed(everything[path])
    return Packet(_text({"message": shape, "masks": masks}), everything)


def _packed(mask: Tensor) -> Tensor:
    if mask.is_meta:  # of a message without values, to be counted only
        return torch.empty(-(-mask.numel() // 8), dtype=torch.uint8, device="meta")
    return torch.from_numpy(np.packbits(mask.numpy().reshape(-1)))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _field(path: str, name: str) -> str:
    """Paths are names joined by "/"; the field `global_` is written `global`, which Python does not allow as a name."""
    return _join(path, name.removesuffix("_"))


# ---------------------------------------------------------------------------------------------- packet → message


class _Part(Mapping[str, Tensor]):
    """The tensors of one `Weights` inside a packet, read when asked for."""

    def __init__(self, packet: _Reader, path: str, names: list[str]) -> None:
        self._packet, self._path = packet, path
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._packet.get(f"{self._path}/{name}")

    def forget(self, name: str) -> None:
        self._packet.forget(f"{self._path}/{name}")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Parts(Protocol):
    """Where a message's tensors come from: a packet, or a store."""

    def weights(self, path: str, names: list[str]) -> Weights: ...
    def tensor(self, path: str) -> Tensor: ...


class _Reader:
    """Gives a packet's tensors by path, unpacking masks, and remembers which were expected."""

    def __init__(self, packet: Packet, masks: Mapping[str, list[int]]) -> None:
        self._tensors, self._masks = packet.tensors, masks
        self.expected: set[str] = set()

    def weights(self, path: str, names: list[str]) -> Weights:
        for name in names:
            self._expect(f"{path}/{name}")
        return Weights.over(_Part(self, path, names))

    def tensor(self, path: str) -> Tensor:
        self._expect(path)
        return self.get(path)

    def _expect(self, path: str) -> None:
        if path not in self._tensors:
            raise PacketError(f"the packet has no tensor '{path}', which its own header names")
        self.expected.add(path)

    def get(self, path: str) -> Tensor:
        tensor = self._tensors[path]
        if path not in self._masks:
            return tensor
        shape = self._masks[path]
        bits = np.unpackbits(tensor.numpy(), count=math.prod(shape))
        return torch.from_numpy(bits.astype(bool).reshape(shape))

    def forget(self, path: str) -> None:
        if isinstance(self._tensors, _FileTensors):
            self._tensors.forget(path)


def unflatten(packet: Packet, kind: type[T]) -> T:
    """The message of the expected type; `PacketError` says where a packet is of another shape."""
    try:
        head = json.loads(checked_length(packet.header))
        shape, masks = head["message"], dict(head["masks"])
        if not head.keys() <= _HEADINGS:
            raise KeyError(*head.keys() - _HEADINGS)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError("the packet's header is not one of ours") from error
    _check_masks(packet, masks)
    reader = _Reader(packet, masks)
    built = assemble(shape, kind, reader)
    extra = set(packet.tensors) - reader.expected
    if extra:
        raise PacketError(f"the packet holds tensors nobody asked for: {sorted(extra)[:3]}")
    return built


def _check_masks(packet: Packet, masks: Mapping[str, Any]) -> None:
    """A mask's bytes must be as many as its shape says: a header may not ask for memory its sender did not send."""
    for path, shape in masks.items():
        sound = isinstance(shape, list) and all(isinstance(side, int) and side >= 0 for side in shape)
        tensor = packet.tensors.get(path)
        if not sound or tensor is None or tensor.dtype != torch.uint8 or tensor.shape != (-(-math.prod(shape) // 8),):
            raise PacketError(f"the packet's mask '{path}' is not as its header says")


def checked_length(text: str) -> str:
    """A JSON text, unless it is too long to be parsed."""
    if len(text) > HEADER_BYTES:
        raise PacketError(f"a header of {len(text)} characters is too long")
    return text


def to_text(item: Any) -> str:
    """A message without tensors as JSON."""
    shape, weights, tensors = split(item)
    if weights or tensors:
        raise TypeError(f"a {type(item).__name__} with tensors is no text")
    return shape


def from_text(text: str, kind: type[T]) -> T:
    """The message of the expected type from its JSON; `PacketError` says what is wrong with it."""
    return assemble(text, kind, _NoParts())


class _NoParts:
    """For messages that hold no tensors; both sides have the same version, so nothing may be missing."""

    def weights(self, path: str, names: list[str]) -> Weights:
        raise PacketError(f"'{path}' cannot be in a text")

    def tensor(self, path: str) -> Tensor:
        raise PacketError(f"'{path}' cannot be in a text")


def assemble(shape: str, kind: type[T], parts: Parts) -> T:
    """The message of a JSON shape, with its tensors from `parts`."""
    try:
        head = json.loads(checked_length(shape))
        name, tree = head["type"], head["tree"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError("the message's shape is not one of ours") from error
    if name != kind.__qualname__:
        raise PacketError(f"here is a {str(name)[:60]}, where a {kind.__qualname__} should be")
    return _build(tree, kind, "", parts)  # type: ignore[no-any-return]


def _build(tree: Any, hint: Any, path: str, reader: Parts) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _declared(tree, args[0], args[1:], path, reader)
    if origin in (Union, types.UnionType):
        if tree is None and type(None) in args:
            return None
        return _build(tree, next(a for a in args if a is not type(None)), path, reader)
    if hint is Weights:
        names = [_check(name, str, path) for name in _check(tree, list, path)]
        if len(set(names)) < len(names):
            raise PacketError(f"'{path}' names a tensor twice")
        return reader.weights(path, names)
    if hint is Tensor:
        if tree != "tensor":
            raise PacketError(f"'{path}' should be a tensor")
        return reader.tensor(path)
    if dataclasses.is_dataclass(hint):
        hints = hints_of(hint)  # type: ignore[arg-type]
        fields = {f.name: f for f in dataclasses.fields(hint)}
        given = _check(tree, dict, path)
        missing = [field for name, field in fields.items() if name not in given]
        crossing = isinstance(reader, _NoParts)
        lacking = [f for f in missing if crossing or f.default is f.default_factory is dataclasses.MISSING]
        if set(given) - set(fields) or lacking:
            found = _short(sorted(tree))
            raise PacketError(f"'{path or 'message'}' should have the fields {sorted(fields)}, not {found}")
        # in a file, a field with a default may be missing: an older version did not know it
        values = {
            name: _build(given[name], hints[name], _field(path, name), reader) for name in fields if name in given
        }
        return hint(**values)  # type: ignore[operator]
    if origin in (dict, Mapping):
        return {
            _build(key, args[0], path, reader): _build(part, args[1], _join(path, key), reader)
            for key, part in _check(tree, dict, path).items()
        }
    if origin is tuple and Ellipsis not in args:
        if len(_check(tree, list, path)) != len(args):
            raise PacketError(f"'{path}' has {len(tree)} values, where {len(args)} are expected")
        return tuple(_build(part, args[i], _join(path, str(i)), reader) for i, part in enumerate(tree))
    if origin is tuple:
        return tuple(
            _build(part, args[0], _join(path, str(i)), reader) for i, part in enumerate(_check(tree, list, path))
        )
    if hint is float and isinstance(tree, int) and not isinstance(tree, bool):
        return float(tree) if abs(tree) < 2**63 else math.inf
    if hint in (int, float, str, bool):
        return _check(tree, hint, path)
    raise TypeError(f"{path}: messages cannot have a field of type {hint}")


def _declared(tree: Any, hint: Any, rules: tuple[Any, ...], path: str, reader: Parts) -> Any:
    """A value with declared ranges; a list that is too long is refused before its items are looked at."""
    for rule in rules:
        if isinstance(rule, Items) and isinstance(tree, (list, dict)) and (fault := rule.fault(tree)):
            raise PacketError(f"'{path}' {fault}")
    value = _build(tree, hint, path, reader)
    for rule in rules:
        if fault := rule.fault(value):
            raise PacketError(f"'{path}' {fault}")
    return value


hints_of = lru_cache(partial(get_type_hints, include_extras=True))  # the same few messages come again and again


def bare(hint: Any) -> Any:
    """A field's type without its declared range."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _check(tree: Any, kind: type, path: str) -> Any:
    if not isinstance(tree, kind) or (kind is int and isinstance(tree, bool)):
        raise PacketError(f"'{path or 'message'}' should be {kind.__name__}, not {type(tree).__name__}")
    return tree


# ---------------------------------------------------------------------------------------------- files and bytes

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_TYPES = {code: kind for kind, code in _CODES.items()}


def pieces(packet: Packet) -> Iterator[bytes | memoryview]:
    """The safetensors file of a packet, piece by piece.

    Written here rather than by the library's `save_file` so that one tensor at a time is in memory and tensors that
    are views of another file need no copy; reading and validation are the library's.
    """
    table: dict[str, Any] = {"__metadata__": {HEADER: packet.header}}
    end = 0
    names = sorted(packet.tensors)
    for name in names:
        tensor = packet.tensors[name]
        start, end = end, end + tensor.nbytes
        table[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
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
    """Write a packet as a safetensors file that appears whole or not at all; returns its size in bytes."""
    return write_parts(pieces(packet), path, durable, private=private, sync_name=sync_name)


class _Entry(NamedTuple):
    """Where a tensor lies in a file, as its header says."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _FileTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when asked for; they are views of the mapped file."""

    def __init__(self, path: Path) -> None:
        with cast(Any, safe_open(path, framework="pt")) as checked:  # the library validates the file
            self._views: dict[str, Tensor | None] = dict.fromkeys(checked.keys())
            self.header: str | None = (checked.metadata() or {}).get(HEADER)
        self._map = _mapped(path)
        self._start = 8 + int.from_bytes(self._map[:8], "little")
        table = json.loads(self._map[8 : self._start])
        self._table = {n: _Entry(table[n]["dtype"], table[n]["shape"], table[n]["data_offsets"]) for n in self._views}
        self._check(len(self._map) - self._start)

    def _check(self, size: int) -> None:
        """The table as this process reads it: of a name that is there twice, the library may have seen the other."""
        for name, (dtype, shape, (start, end)) in self._table.items():
            if dtype not in _TYPES:
                raise PacketError(f"'{name}' has numbers of the type {_short(dtype)}, which no message has")
            if not 0 <= start <= end <= size or end - start != math.prod(shape) * _TYPES[dtype].itemsize:
                raise PacketError(f"'{name}' is not where its header says")

    def again(self, path: Path) -> _FileTensors:
        """The tensors of the same file as they lie there, whatever was done to these; its table is not read again."""
        fresh = copy.copy(self)
        fresh._views, fresh._map = dict.fromkeys(self._views), _mapped(path)
        return fresh

    def __getitem__(self, name: str) -> Tensor:
        view = self._views[name]
        if view is None:
            view = self._views[name] = self._view(*self._table[name])
        return view

    def _view(self, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
        """What the library's `get_tensor` gives, in a fraction of its time: a model has many small tensors."""
        start, kind, count = self._start + data_offsets[0], _TYPES[dtype], math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=kind)
        if start % kind.itemsize:  # a number may not lie across the places for numbers
            part = self._map[start : self._start + data_offsets[1]]
            return torch.frombuffer(bytearray(part), dtype=kind).view(shape)
        return torch.frombuffer(self._map, dtype=kind, count=count, offset=start).view(shape)

    def forget(self, name: str) -> None:
        """Give the pages of a large tensor back to the system; whoever holds it reads them again when needed."""
        start, end = (self._start + offset for offset in self._table[name].data_offsets)
        start += -start % mmap.PAGESIZE  # whole pages only
        if end - start >= SMALL:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
            self._views[name] = None

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # a private view: nothing is written back


def with_digest(packet: Packet) -> Packet:
    """The packet with a digest of its header and tensors, for a file that is kept: `read` then checks it."""
    head = {key: value for key, value in json.loads(packet.header).items() if key != DIGEST}
    return Packet(_text({**head, DIGEST: _digest(head, packet.tensors)}), packet.tensors)


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
    hasher = hashlib.sha256(_text(head).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if isinstance(tensors, _FileTensors):
            tensors.forget(name)  # a file is read through, not kept in memory
    return hasher.hexdigest()


def _text(head: Mapping[str, Any]) -> str:
    return json.dumps(head, sort_keys=True, separators=(",", ":"))


def read_again(packet: Packet, path: Path) -> Packet:
    """A packet that was read from this file as it is there, for another receiver."""
    assert isinstance(packet.tensors, _FileTensors)
    return Packet(packet.header, packet.tensors.again(path))


def read(path: Path) -> Packet:
    """The packet in a file; its tensors stay in the file until asked for. Its digest is checked if it has one."""
    try:
        tensors = _FileTensors(path)
    except FileNotFoundError as error:
        raise PacketError(f"there is no file {path}") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError(f"{path} is damaged or not a safetensors file ({error})") from error
    if tensors.header is None:
        raise PacketError(f"{path} is a safetensors file, but not one of ours: it has no '{HEADER}' entry")
    packet = Packet(tensors.header, tensors)
    if _has_digest(packet):
        try:
            _check_digest(packet)
        except (PacketError, ValueError, AttributeError, KeyError) as error:
            raise PacketError(f"{path} is damaged: its digest is another") from error
    return packet


def save(item: Any, path: Path, durable: bool = False) -> None:
    """Write a message to a file that is kept, with its digest."""
    write(with_digest(flatten(item)), path, durable)


def load(path: Path, kind: type[T]) -> T:
    """Read a message of a known type from a file."""
    try:
        return unflatten(read(path), kind)
    except PacketError as error:
        raise PacketError(f"{path}: {error}") from error


def to_bytes(packet: Packet) -> bytes:
    return b"".join(pieces(packet))
