"""How packets travel: rounding that a simulation does too, packing that loses nothing, and packets that lie."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from consilium import simulation
from consilium.errors import StudyError
from consilium.run_folder import RunFolder
from consilium.transport import KINDS, Rounding, packed, rounded, size_of, unpacked
from consilium.tree import Packet, PacketError
from tests.toy import toy_study

PACKET = Packet(
    '{"message":1}',
    {
        "a/w": torch.linspace(-3, 3, 1000).view(10, 100),
        "a/n": torch.tensor(7),
        "a/b": torch.zeros(0),
        "m": torch.arange(5, dtype=torch.uint8),
        "large": torch.tensor([1e30, 0.1]),
        "d": torch.tensor([0.1], dtype=torch.float64),
    },
)


def test_numbers_are_rounded_to_the_nearest() -> None:
    """float16 has 10 bits behind the point, bfloat16 has 7."""
    third = torch.tensor([1 / 3])
    assert rounded(third, torch.float16).item() == 0.333251953125
    assert rounded(third, torch.bfloat16).item() == 0.333984375
    assert rounded(third, torch.float16).dtype == torch.float32


def test_what_half_the_bits_cannot_hold_travels_as_it_is() -> None:
    found = Rounding("float16").of(PACKET).tensors
    assert torch.equal(found["large"], PACKET.tensors["large"])  # 1e30 would be infinite
    assert not torch.equal(found["a/w"], PACKET.tensors["a/w"])
    for path in ("a/n", "m", "d"):
        assert found[path] is PACKET.tensors[path]


def test_what_packets_share_stays_shared() -> None:
    """A release is the same for all sites but for its header: it is hashed, written and sent once."""
    rounding = Rounding("float16")
    one, other = rounding.of(PACKET), rounding.of(PACKET._replace(header="{}"))
    assert all(one.tensors[path].data_ptr() == other.tensors[path].data_ptr() for path in PACKET.tensors)
    assert rounding.of(PACKET) is one
    assert Rounding("exact").of(PACKET) is PACKET


@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("compress", [False, True])
def test_packing_loses_nothing(transport: str, compress: bool) -> None:
    packet = Rounding(transport).of(PACKET)
    sent = packed(packet, transport, compress)
    if transport == "exact" and not compress:
        assert sent is packet
        return
    found = unpacked(sent, 1 << 20)
    assert found.header == packet.header
    assert all(
        torch.equal(found.tensors[path], tensor)
        and (found.tensors[path].dtype, found.tensors[path].shape) == (tensor.dtype, tensor.shape)
        for path, tensor in packet.tensors.items()
    )
    if not compress:
        assert sum(t.nbytes for t in sent.tensors.values()) == size_of(packet, transport) - len(packet.header)
        assert sent.tensors["a/w"].nbytes == 2000


def test_packing_makes_weights_smaller() -> None:
    weights = torch.randn((200, 200), generator=torch.Generator().manual_seed(0)) * 0.05
    packet = Packet("{}", {"w": weights, "zero": torch.zeros(40_000)})
    sent = packed(packet, "exact", compress=True)
    assert sent.tensors["w"].nbytes < 0.93 * weights.nbytes
    assert sent.tensors["zero"].nbytes < 2000


def lying(**changes: object) -> Packet:
    sent = packed(PACKET, "exact", compress=True)
    return sent._replace(header=json.dumps({**json.loads(sent.header), **changes}))


SHAPES = json.loads(packed(PACKET, "exact", compress=True).header)["packed"]


@pytest.mark.parametrize(
    "packet",
    [
        PACKET,
        PACKET._replace(header="no json"),
        lying(packed={}),
        lying(packed={**SHAPES, "a/w": ["float32", [10, 101], "float32"]}),
        lying(packed={**SHAPES, "a/w": ["float32", [1, 1], "float32"]}),
        lying(packed={**SHAPES, "a/w": ["float32", [-10, -100], "float32"]}),
        lying(packed={**SHAPES, "a/w": ["pickle", [10, 100], "float32"]}),
        lying(packed={**SHAPES, "zero": ["float32", [1 << 40], "float32"]}),
        lying(packed={**SHAPES, "a/w": ["float32", [1 << 20, 1 << 20], "float32"]}),
        lying(deflated=False),
        lying(packed={**SHAPES, "a/w": ["float32", [float("inf")], "float32"]}),
        lying(packed={**SHAPES, "a/b": ["float32", [0, 1 << 62, 1 << 62], "float32"]}),
        lying(packed={**SHAPES, "a/b": ["float32", [0, 10**30], "float32"]}),
        lying(packed={**SHAPES, "a/w": ["float32", [10.5, 100], "float32"]}),
        PACKET._replace(header='{"packed":' + "[" * 100_000 + "]" * 100_000 + "}"),
        Packet(
            json.dumps({"message": "{}", "packed": {"w": ["uint8", [4], "uint8"]}, "deflated": False}),
            {"w": torch.zeros((4, 3), dtype=torch.uint8)},
        ),
    ],
)
def test_a_packet_that_lies_about_itself_is_refused(packet: Packet) -> None:
    with pytest.raises(PacketError):
        unpacked(packet, 1 << 20)


def test_a_bomb_is_not_unpacked() -> None:
    """A few bytes that say they are small and become a thousand times as many."""
    bomb = packed(Packet("{}", {"w": torch.zeros(1 << 20)}), "exact", compress=True)
    head = json.loads(bomb.header)
    head["packed"]["w"][1] = [16]
    with pytest.raises(PacketError, match="shorter or longer than its shape"):
        unpacked(bomb._replace(header=json.dumps(head)), 1 << 20)


def test_a_simulation_rounds_and_counts_what_would_travel(federation: Path, tmp_path: Path) -> None:
    runs = {
        kind: simulation.run(toy_study(federation, study__transport=kind), tmp_path, workers=0).folder
        for kind in ("exact", "float16")
    }
    trained = {kind: [e for e in RunFolder.open(run).events() if e["event"] == "train"] for kind, run in runs.items()}
    for key in ("bytes_up", "bytes_down"):
        exact, half = (trained[kind][0][key] for kind in ("exact", "float16"))
        assert 0.5 * exact < half < 0.75 * exact  # headers do not shrink
    losses = [[e["loss"] for e in trained[kind]] for kind in ("exact", "float16")]
    assert losses[0] != losses[1]
    assert all(math.isclose(a, b, rel_tol=0.05) for a, b in zip(*losses))


def test_older_studies_keep_their_hash_and_another_transport_is_another_study(federation: Path) -> None:
    exact = toy_study(federation)
    assert toy_study(federation, study__transport="exact", study__compress=False).hash == exact.hash
    assert toy_study(federation, study__transport="float16").hash != exact.hash
    with pytest.raises(StudyError, match=r"\[study\] transport = 'float8': it must be one of exact, float16, bfloat16"):
        toy_study(federation, study__transport="float8")
