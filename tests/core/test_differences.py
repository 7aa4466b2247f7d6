"""Tensors that travel as the change since a version that the receiver holds: exact to the bit, or refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from consilium.differences import Version, bytes_of, change, content_name, undone
from consilium.transport import Rounding, packed, unpacked
from consilium.tree import Packet, PacketError

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip
ROOM = 1 << 20


def version(tensor: Tensor) -> Version:
    return Version(content_name(tensor), tensor)


def held(*tensors: Tensor) -> dict[str, Tensor]:
    return {content_name(tensor): tensor for tensor in tensors}


@pytest.mark.parametrize(
    ("old", "new", "folded"),
    [
        (1.0, 1.0, 0),
        (1.0, 1.0 + 2**-23, 2),  # the next number up
        (1.0, 1.0 - 2**-24, 1),  # the next one down, with another exponent: all bits differ, and it is one step
        (0.0, -0.0, 2**32 - 1),  # only the first bit differs: half of all patterns away
        (1.0, 2.0, 2**24),  # 2^23 steps
    ],
)
def test_the_change_by_hand(old: float, new: float, folded: int) -> None:
    before, now = torch.tensor([old]), torch.tensor([new])
    found = change(now, torch.float32, version(before))
    assert found is not None
    assert found.view(np.uint32).tolist() == [folded]
    assert np.array_equal(undone(found, torch.float32, [1], torch.float32, before), bytes_of(now))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tensors of one type and shape with any bits, NaNs with whatever they carry among them."""
    kind = draw(st.sampled_from(TYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * kind.itemsize
    rows = [bytearray(draw(st.binary(min_size=size, max_size=size))) for _ in range(2)]
    one, two = (torch.frombuffer(r, dtype=kind).view(shape) if size else torch.empty(shape, dtype=kind) for r in rows)
    return one, two


@settings(deadline=None, max_examples=300)
@given(pair=pairs(), transport=st.sampled_from(["exact", "float16", "bfloat16"]))
def test_whatever_the_bits_are_they_come_back(pair: tuple[Tensor, Tensor], transport: str) -> None:
    old, new = pair
    moved = change(new, new.dtype, version(old))
    if new.numel():
        assert moved is not None
        assert np.array_equal(undone(moved, new.dtype, list(new.shape), new.dtype, old), bytes_of(new))
    # many times over, so that the change is what travels wherever it is smaller
    before, now = (torch.cat([t.reshape(-1)] * 50) for t in (old, new))
    rounding = Rounding(transport)
    before, now = (rounding.of(Packet("{}", {"w": t})).tensors["w"] for t in (before, now))
    sent = packed(Packet("{}", {"w": now}), transport, True, {"w": version(before)})
    found = unpacked(sent, ROOM, held(before)).tensors["w"]
    assert (found.dtype, found.shape) == (now.dtype, now.shape)
    assert np.array_equal(bytes_of(found), bytes_of(now))


def weights(seed: int) -> Tensor:
    return torch.randn((100, 100), generator=torch.Generator().manual_seed(seed)) * 0.05


OLD = weights(0)
NEW = OLD * (1 + 0.02 * weights(1) / 0.05)  # it moved by 2 %


def names(sent: Packet) -> list[str]:
    """The versions that a packet is a change of."""
    return [name for entry in json.loads(sent.header)["packed"].values() for name in entry[3:]]


@pytest.mark.parametrize(("transport", "less"), [("exact", 0.85), ("float16", 0.8)])
def test_the_change_of_weights_is_smaller_than_they_are(transport: str, less: float) -> None:
    old, new = (Rounding(transport).of(Packet("{}", {"w": t})).tensors["w"] for t in (OLD, NEW))
    whole, moved = (packed(Packet("{}", {"w": new}), transport, True, v) for v in ({}, {"w": version(old)}))
    assert moved.tensors["w"].nbytes < less * whole.tensors["w"].nbytes
    assert names(moved) == [content_name(old)]


def test_what_is_not_smaller_as_a_change_travels_whole() -> None:
    """Weights of another network; a counter, shorter than the name of a version; nothing at all."""
    for old, new in [
        (OLD, weights(2)),
        (torch.tensor(7), torch.tensor(8)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(8), torch.zeros(9)),
        (OLD.double(), NEW),
    ]:
        sent = packed(Packet("{}", {"w": new}), "exact", True, {"w": version(old)})
        assert names(sent) == []
        assert torch.equal(unpacked(sent, ROOM).tensors["w"], new)


def test_a_version_that_someone_has_written_to_is_not_used() -> None:
    """Neither by the sender, nor by the receiver, which would make other bits of it."""
    written = OLD.clone()
    before = version(written)
    sent = packed(Packet("{}", {"w": NEW}), "exact", True, {"w": before})
    written[0, 0] += 1
    assert names(packed(Packet("{}", {"w": NEW}), "exact", True, {"w": before})) == []
    with pytest.raises(PacketError, match="a version that is not held here"):
        unpacked(sent, ROOM, {before.name: written})


SENT = packed(Packet("{}", {"w": NEW}), "exact", True, {"w": version(OLD)})
ENTRY = json.loads(SENT.header)["packed"]["w"]


@pytest.mark.parametrize(
    "entry",
    [
        [*ENTRY[:3], "0" * 32],
        [*ENTRY[:3], "w"],
        [*ENTRY[:3], None],
        [*ENTRY[:3], [ENTRY[3]]],
        [*ENTRY[:3], {"a": 1}],
        [*ENTRY, ENTRY[3]],
        ["float32", [10, 1000], "float32", ENTRY[3]],
        ["float32", [10_000], "float32", ENTRY[3]],
        ["int32", [100, 100], "int32", ENTRY[3]],
        ["float32", [1 << 20, 1 << 20], "float32", ENTRY[3]],
    ],
)
def test_a_change_that_lies_about_its_version_is_refused(entry: list[object]) -> None:
    head = {**json.loads(SENT.header), "packed": {"w": entry}}
    with pytest.raises(PacketError):
        unpacked(SENT._replace(header=json.dumps(head)), ROOM, held(OLD))


def test_without_the_version_there_are_no_bits() -> None:
    assert torch.equal(unpacked(SENT, ROOM, held(OLD)).tensors["w"], NEW)
    for other in ({}, held(NEW)):
        with pytest.raises(PacketError, match="a version that is not held here"):
            unpacked(SENT, ROOM, other)
    with pytest.raises(PacketError, match="would take 40000 bytes"):
        unpacked(SENT, 39_999, held(OLD))
