"""Where orders arrive at a site: one at a time, of bounded size; what is refused or replaced is freed."""

from __future__ import annotations

import queue
import sys
import threading
from dataclasses import dataclass

from nvflare.apis.shareable import Shareable

from consilium.federation.parts import Assembly, is_order_name, is_part
from consilium.wires.flare import ROOM, Body


@dataclass(frozen=True)
class Arrived:
    """An order that is whole, or that is refused before it is."""

    name: str
    text: object = None  # the request that came with it
    body: Body = b""
    refused: str = ""  # why, for the site's own log


class OrderDoor:
    """A site's memory holds at most one order that arrives or waits, beside the one that is carried out."""

    def __init__(self) -> None:
        self._room: int | None = None
        self._lock = threading.Lock()  # the network may bring several parts at the same time
        self._arriving = Assembly()
        self._waiting: queue.Queue[Arrived] = queue.Queue()

    def set_room(self, room: int) -> None:
        """From now on orders of at most `room` bytes are taken in; before, those that everybody has room for."""
        self._room = room

    def take(self, message: Shareable) -> bool:
        """Whether a message is settled; the server sends it again if not."""
        name = message.get("order")
        if not is_order_name(name) or not is_part(message, sys.maxsize):
            return True  # a knock, or nothing that could ever be a part
        size, room = message["of"], self._room
        if room is None and size > ROOM:
            return False
        with self._lock:
            if size > (ROOM if room is None else room):
                if self._arriving.refuse(name):
                    self._put(Arrived(name, refused=f"an order of {size} bytes, and at most {room} are taken in"))
                return True
            before = self._arriving.name
            held, whole = self._arriving.take(name, message)
            if self._arriving.name not in ("", before):
                self._forget()  # the server asks one thing at a time: nobody waits for the order before
            if whole is not None:
                self._put(Arrived(name, message.get("request"), whole))
            return held

    def next(self, seconds: float) -> Arrived | None:
        """The order to carry out, or None if there is none for so many seconds."""
        try:
            return self._waiting.get(timeout=seconds)
        except queue.Empty:
            return None

    def held(self) -> int:
        """Bytes of what arrives and of what waits."""
        with self._lock:
            return self._arriving.held() + sum(len(order.body) for order in list(self._waiting.queue))

    def _put(self, order: Arrived) -> None:
        self._forget()
        self._waiting.put(order)

    def _forget(self) -> None:
        while True:
            try:
                self._waiting.get_nowait()
            except queue.Empty:
                return
