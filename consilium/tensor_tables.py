"""The table at the head of a safetensors file: where its tensors are. It is checked before anything is read by it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from consilium.message_parsing import PacketError
from consilium.ranges import shortened
from consilium.weights import SMALL

HEADER = "message"  # the single metadata key: with two, equal states would not be equal files
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
TYPES = {code: kind for kind, code in CODES.items()}
_METADATA = "__metadata__"
_BEGIN = f'{{"{_METADATA}":{{"{HEADER}":'  # of every table that we write
LONGEST = 100_000_000  # bytes of a table, as in the safetensors library
LARGEST, DIMENSIONS = 1 << 62, 64  # of a side of a tensor, and of their number: as in torch


class TensorEntry(NamedTuple):
    """The position of a tensor behind the table."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class Layout(NamedTuple):
    entries: Mapping[str, TensorEntry]
    blocks: Sequence[TensorEntry]  # the same bytes: small neighbours of one type are one tensor


class TensorTable(NamedTuple):
    header: str | None  # of the message; None in a file that is not ours
    layout: Layout
    end: int  # where the tensors begin


# Entries of files read before, by their text and the bytes they are about, which is all that they are checked against:
# what a site sends or keeps has the same entries in every round, and another header.
_known: dict[tuple[str, int], Layout] = {}
KNOWN, KNOWN_LENGTH = 16, 1 << 17  # how many are kept, and of which length: a site may send long ones to fill memory


def read_table(content: Any) -> TensorTable:
    """The table of a file's bytes; ValueError or `PacketError` if it does not fit to them."""
    end = 8 + int.from_bytes(content[:8], "little")
    if not 8 < end <= min(len(content), 8 + LONGEST):
        raise ValueError("its table is cut off")
    text = content[8:end].decode()
    size = len(content) - end
    header, rest = _parted(text)
    known = rest, size
    layout = _known.get(known)  # other threads read files too, and may drop it meanwhile
    if layout is None:
        layout = _checked(json.loads(rest), size)
        if len(rest) <= KNOWN_LENGTH:
            if len(_known) >= KNOWN:
                _known.clear()
            _known[known] = layout
    return TensorTable(header, layout, end)


def _parted(text: str) -> tuple[str | None, str]:
    """The header, and the table without it, both as text."""
    if text.startswith(_BEGIN):
        header, end = json.JSONDecoder().raw_decode(text, len(_BEGIN))
        rest = text[end:]
        if isinstance(header, str) and (rest.startswith("},") or rest.rstrip() == "}}"):
            return header, "{" + rest[2:] if rest[1] == "," else "{}"
    table = json.loads(text)
    facts = table.pop(_METADATA, {})
    if not all(isinstance(value, str) for value in facts.values()):
        raise ValueError("its metadata are not texts")
    return facts.get(HEADER), json.dumps(table)


def _checked(table: Mapping[str, Any], size: int) -> Layout:
    """Its entries by name: one behind the other from the first byte to the last, each as long as its shape says."""
    entries = {name: TensorEntry(**table[name]) for name in sorted(table)}
    blocks: list[TensorEntry] = []
    place = 0
    for name, (dtype, shape, (begin, end)) in sorted(entries.items(), key=lambda entry: entry[1].data_offsets):
        if dtype not in TYPES:
            raise PacketError(f"'{name}' has numbers of the type {shortened(dtype)}, which no message has")
        whole = all(type(number) is int and 0 <= number < LARGEST for number in (*shape, begin, end))
        sound = whole and len(shape) <= DIMENSIONS and begin == place
        if not sound or end - begin != math.prod(shape) * TYPES[dtype].itemsize:
            raise PacketError(f"'{name}' is not where its header says")
        place = end
        if blocks and blocks[-1].dtype == dtype and end - blocks[-1].data_offsets[0] <= SMALL:
            begin = blocks.pop().data_offsets[0]
        blocks.append(TensorEntry(dtype, [(end - begin) // TYPES[dtype].itemsize], [begin, end]))
    if place != size:
        raise ValueError(f"its tensors take {place} bytes, where {size} follow")
    return Layout(entries, blocks)
