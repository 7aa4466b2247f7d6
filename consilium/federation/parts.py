"""A body travels in parts, in order: the receiver never holds more bytes than have arrived."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils.buffer_list import ConsumableBufferList

from consilium.wires.flare import PART, Body

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


def follows(message: Shareable, have: int) -> bool | None:
    """Whether a part continues a body of which `have` bytes are there; None for a part that is there already."""
    at, end = message["at"], message["at"] + len(message["body"])
    if at == have and (message["body"] or not have):
        return True
    return None if end <= have else False


def is_order_name(name: object) -> bool:
    """Whether a message names an order as a server does: names are kept, so they are short."""
    return isinstance(name, str) and re.fullmatch("[0-9a-f]{32}", name) is not None


class Assembly:
    """The order that is arriving at a site; the server asks one thing at a time, so a new one frees the old."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a repeated part may come while the first is being taken
        self._name = ""
        self._body = bytearray()
        self._taken: deque[str] = deque(maxlen=64)  # whole orders: their parts may be repeated

    def take(self, name: str, message: Shareable) -> tuple[bool, Body | None]:
        """Whether the part is held, and the whole body once the last part is in."""
        with self._lock:
            return self._take(name, message)

    def _take(self, name: str, message: Shareable) -> tuple[bool, Body | None]:
        if name in self._taken:
            return True, None
        if name != self._name:
            if message["at"] != 0:
                return False, None  # the rest of an order that was given up
            self._name, self._body = name, bytearray()
        following = follows(message, len(self._body))
        if following is False:
            return False, None
        if following:
            self._body += message["body"]
        if len(self._body) < message["of"]:
            return True, None
        whole = memoryview(self._body)
        self._taken.append(name)
        self._name, self._body = "", bytearray()
        return True, whole

    def refuse(self, name: str) -> bool:
        """Take in no more of an order, and free what is here of it; whether it had not been refused or taken before."""
        with self._lock:
            if name == self._name:
                self._name, self._body = "", bytearray()
            if name in self._taken:
                return False
            self._taken.append(name)
            return True

    @property
    def name(self) -> str:
        """The order that is arriving; empty if none is."""
        return self._name

    def held(self) -> int:
        """Bytes of the order that is arriving."""
        return len(self._body)


def confirmed(replies: Any, name: str) -> bool:
    """Whether the other side has said that it has a message."""
    return bool(replies and name in replies and replies[name].get_return_code() == ReturnCode.OK)
