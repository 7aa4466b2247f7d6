"""A body travels in parts: whatever its size, neither side has more than a few parts of it in memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils.buffer_list import ConsumableBufferList

from consilium.wires.flare import Body

PART = 16 << 20  # bytes; an engine's message takes several times as much while it is on its way

# NVIDIA FLARE 2.9 writes all bytes of a message that arrives out as text, for a line of its debug log that is then not
# kept: 0.2 s and three times the memory per part. A short text does as well.
ConsumableBufferList.__repr__ = lambda chunks: f"{len(chunks)} chunks"


def cut(order: str, body: Body, last: dict[str, str]) -> Iterator[Shareable]:
    """The messages that carry a body; what goes with it is in the last, which is there even if there is no body."""
    for at in range(0, max(1, len(body)), PART):
        message = Shareable()
        message["order"], message["at"], message["of"] = order, at, len(body)
        message["body"] = bytes(body[at : at + PART])
        if at + PART >= len(body):
            message.update(last)
        yield message


def is_part(message: Shareable, room: int) -> bool:
    """Whether a message is a part of a body of at most `room` bytes: the sender may be anyone with a certificate."""
    at, of, body = message.get("at"), message.get("of"), message.get("body")
    whole = isinstance(at, int) and isinstance(of, int) and isinstance(body, bytes)
    return whole and 0 <= at <= of <= room and len(body) == min(PART, of - at)


def confirmed(replies: Any, name: str) -> bool:
    """Whether the other side has said that it has a message."""
    return bool(replies and name in replies and replies[name].get_return_code() == ReturnCode.OK)
