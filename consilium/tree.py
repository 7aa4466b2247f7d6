"""Serialises messages: a message becomes a JSON shape and named tensors. Nothing is ever unpickled.

A message is a frozen dataclass made by `@message`. Its fields may be `Weights`, `Tensor`, numbers, text, `None`,
tuples, mappings with text keys, and messages. The receiver names the type it expects, so a packet can build
nothing else. A field may declare its range, `Annotated[int, Range(0, 100)]`; other values are rejected while the
message is built.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, dataclass_transform

import numpy as np
import torch
from torch import Tensor

from consilium.message_parsing import PacketError as PacketError  # callers get it with the packets
from consilium.message_parsing import T, assemble, checked_length, field_path, joined
from consilium.weights import Weights

_HEADINGS = {"message", "masks", "stamp", "digest"}  # of a packet's header


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def message(cls: type[T]) -> type[T]:
    """Make a class a message: a frozen dataclass whose fields the tree can carry."""
    return dataclasses.dataclass(frozen=True)(cls)


class Packet(NamedTuple):
    """A message as it is sent between a site and the server: its JSON shape, and its tensors by path."""

    header: str
    tensors: Mapping[str, Tensor]

    def nbytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors.values())

    def blocks(self) -> Iterable[Tensor]:
        """All numbers, in fewer tensors if they lie in a file: for a look at values whatever their names are."""
        blocks = getattr(self.tensors, "blocks", None)
        return self.tensors.values() if blocks is None else blocks()


# ---------------------------------------------------------------------------------------------- message → packet


class Split(NamedTuple):
    """A message taken apart: its structure, its weights and its single tensors by path."""

    structure: Mapping[str, Any]
    weights: dict[str, Weights]
    tensors: dict[str, Tensor]

    def shape(self) -> str:
        """The structure as JSON."""
        return json.dumps(self.structure, sort_keys=True, separators=(",", ":"))

    def models(self) -> list[Weights]:
        """The weights, and the single tensors as weights."""
        return [*self.weights.values(), *(Weights.over({path: tensor}) for path, tensor in self.tensors.items())]


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
            return {f.name: walk(getattr(value, f.name), field_path(path, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {key: walk(value[key], joined(path, key)) for key in sorted(value)}
        if isinstance(value, (list, tuple)):
            return [walk(part, joined(path, str(i))) for i, part in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{path}: a message cannot hold a {type(value).__name__}")

    return Split({"type": type(item).__qualname__, "tree": walk(item, "")}, weights, tensors)


def flatten(item: Any) -> Packet:
    """A message as a packet; Boolean tensors are packed eight to a byte."""
    apart = split(item)
    everything = {f"{path}/{name}": tensor for path, part in apart.weights.items() for name, tensor in part.items()}
    everything.update(apart.tensors)
    masks = {path: list(tensor.shape) for path, tensor in everything.items() if tensor.dtype == torch.bool}
    for path in masks:
        everything[path] = _packed(everything[path])
    return Packet(canonical_json({"message": apart.shape(), "masks": masks}), everything)


def _packed(mask: Tensor) -> Tensor:
    if mask.is_meta:  # of a message without values, used for its size
        return torch.empty(-(-mask.numel() // 8), dtype=torch.uint8, device="meta")
    return torch.from_numpy(np.packbits(mask.numpy().reshape(-1)))


# ---------------------------------------------------------------------------------------------- packet → message


class _Part(Mapping[str, Tensor]):
    """The tensors of one `Weights` inside a packet, read on demand."""

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


class _Reader:
    """Reads a packet's tensors by path, unpacks masks, and records which tensors were expected."""

    def __init__(self, packet: Packet, masks: Mapping[str, list[int]], whole: bool) -> None:
        self._tensors, self._masks, self.whole = packet.tensors, masks, whole
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
        if forget := getattr(self._tensors, "forget", None):  # they lie in a file
            forget(path)


def unflatten(packet: Packet, kind: type[T], whole: bool = False) -> T:
    """The message of the expected type; `PacketError` says where a packet is of another shape.

    `whole`: no field may be missing, not even one that has a default for files of older versions.
    """
    try:
        head = json.loads(checked_length(packet.header))
        shape, masks = head["message"], dict(head["masks"])
        if not head.keys() <= _HEADINGS:
            raise KeyError(*head.keys() - _HEADINGS)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError("the packet's header is not valid") from error
    _check_masks(packet, masks)
    reader = _Reader(packet, masks, whole)
    built = assemble(shape, kind, reader)
    extra = set(packet.tensors) - reader.expected
    if extra:
        raise PacketError(f"the packet holds unexpected tensors: {sorted(extra)[:3]}")
    return built


def _check_masks(packet: Packet, masks: Mapping[str, Any]) -> None:
    """Reject a mask whose bytes do not match its shape, so that a header cannot make the receiver allocate memory."""
    for path, shape in masks.items():
        sound = isinstance(shape, list) and all(isinstance(side, int) and side >= 0 for side in shape)
        tensor = packet.tensors.get(path)
        if not sound or tensor is None or tensor.dtype != torch.uint8 or tensor.shape != (-(-math.prod(shape) // 8),):
            raise PacketError(f"the packet's mask '{path}' is not as its header says")


def to_text(item: Any) -> str:
    """A message without tensors as JSON."""
    apart = split(item)
    if apart.weights or apart.tensors:
        raise TypeError(f"a {type(item).__name__} with tensors is no text")
    return apart.shape()


def from_text(text: str, kind: type[T]) -> T:
    """The message of the expected type from its JSON; `PacketError` says what is wrong with it."""
    return assemble(text, kind, _NoParts())


class _NoParts:
    """For messages that hold no tensors; both sides have the same version, so nothing may be missing."""

    whole = True

    def weights(self, path: str, names: list[str]) -> Weights:
        raise PacketError(f"'{path}' cannot be in a text")

    def tensor(self, path: str) -> Tensor:
        raise PacketError(f"'{path}' cannot be in a text")


def canonical_json(head: Mapping[str, Any]) -> str:
    return json.dumps(head, sort_keys=True, separators=(",", ":"))
