"""Leaves out tensors that the other side already has: an unchanged core model, a release that was just scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from consilium.differences import content_name
from consilium.tree import Packet, PacketError

Names = Mapping[str, str]  # a tensor's path → a name of its content


def contents(packet: Packet) -> dict[str, str]:
    """A digest of every tensor's content."""
    return {path: content_name(tensor) for path, tensor in packet.tensors.items()}


def shared(packets: Mapping[str, Packet]) -> tuple[dict[str, Packet], dict[str, str]]:
    """Packets by receiver, one object for all with the same tensors; and the headers of those that differ.

    A release differs between sites only in the site's name, so it is hashed, written and sent once.
    """
    first: dict[tuple[object, ...], Packet] = {}
    bodies: dict[str, Packet] = {}
    headers: dict[str, str] = {}
    for goal, packet in packets.items():
        same = tuple((path, t.data_ptr(), t.shape, t.dtype, t.stride()) for path, t in packet.tensors.items())
        bodies[goal] = first.setdefault(same, packet) if same else packet
        if bodies[goal].header != packet.header:
            headers[goal] = packet.header
    return bodies, headers


def without(packet: Packet, names: Names, held: Collection[str]) -> Packet:
    """A packet without the tensors that its receiver already has."""
    return Packet(packet.header, {path: t for path, t in packet.tensors.items() if names[path] not in held})


def completed(packet: Packet, names: Names, held: Mapping[str, Tensor]) -> Packet:
    """The whole packet, with the missing tensors from those at hand."""
    try:
        return Packet(
            packet.header,
            {path: packet.tensors[path] if path in packet.tensors else held[name] for path, name in names.items()},
        )
    except KeyError as error:
        raise PacketError(f"the packet leaves out a tensor that is not held here ({error})") from error
