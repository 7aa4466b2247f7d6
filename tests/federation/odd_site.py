"""What a site's processes are made to do by `hooks/sitecustomize.py`: send rubbish, or write down all they send."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any


def become(what: str) -> None:
    """`spoil`, or `listen:FOLDER`."""
    if what == "spoil":
        _spoil()
    else:
        _listen(Path(what.removeprefix("listen:")))


def _spoil() -> None:
    """Every answer of the first rounds is wrong in a way of its own, and an old one is sent before it."""
    from nvflare.apis.utils.reliable_message import ReliableMessage

    from consilium.federation.desk import Desk
    from consilium.wires.flare import ANSWER, Answer
    from tests.federation.test_desk_and_wire import spoiled

    sound, send = Desk.answer, ReliableMessage.send_request

    def answer(desk: Desk, request: Mapping[str, Any], body: bytes) -> Answer:
        good = sound(desk, request, body)
        if request["do"] != "train":
            return good
        with tempfile.TemporaryDirectory() as folder:
            return replace(good, body=spoiled(request["head"]["round"]["index"], good.body, Path(folder)))

    def twice(target: str, topic: str, message: Any, *rest: Any) -> Any:
        if topic == ANSWER:
            own, message["order"] = message["order"], "an order of long ago"
            send(target, topic, message, *rest)
            message["order"] = own
        return send(target, topic, message, *rest)

    Desk.answer = answer  # type: ignore[method-assign]
    ReliableMessage.send_request = twice


def _listen(folder: Path) -> None:
    """Everything that goes to the server, before it is encrypted; between a site's own processes it is not gRPC."""
    from nvflare.fuel.f3.drivers.grpc_driver import StreamConnection

    send = StreamConnection.send_frame

    def overheard(connection: StreamConnection, frame: Any) -> None:
        with (folder / f"{os.getpid()}.frames").open("ab") as file:
            file.write(bytes(frame))
        send(connection, frame)

    StreamConnection.send_frame = overheard
