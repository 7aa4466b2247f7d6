"""What a site's processes are made to do by `hooks/sitecustomize.py`: send lies, or write down all they send."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any


def become(what: str) -> None:
    """`hostile`, `listen:FOLDER`; a server: `orders:FILE`."""
    if what == "hostile":
        _hostile()
    elif what.startswith("orders:"):
        from tests.federation import hostile_orders

        hostile_orders.become(Path(what.removeprefix("orders:")))
    else:
        _listen(Path(what.removeprefix("listen:")))


def _hostile() -> None:
    """A lie per message, with a legitimate kit.

    In round i the i-th of `ANSWERS` is sent in place of an update, the i-th of `SHEETS` in place of scores; the final
    scores say their own round and site. A study called `card-I` gets the I-th of `CARDS` at its roll call.
    """
    from consilium.federation import site_job
    from consilium.federation.hospital_site import HospitalSite
    from consilium.messages import Request
    from consilium.wires.flare import FlareAnswer
    from tests.federation.lies import ANSWERS, CARDS, SHEETS, edited, of_sheet, with_place

    answers, cards, sheets = list(ANSWERS.values()), list(CARDS.values()), list(SHEETS.values())
    sound, cut = HospitalSite.answer, site_job.cut
    asked: list[Request] = []
    name: list[str] = []

    def answer(site: HospitalSite, request: Request, body: Any) -> FlareAnswer:
        asked[:], name[:] = [request], [str(tomllib.loads(site.text)["study"]["name"])]
        good = sound(site, request, body)
        if request.do == "score" and request.full:
            return replace(good, body=with_place(good.body))
        index = request.round.index if request.round else 0
        if request.do == "score" and index < len(sheets):
            return replace(good, body=of_sheet(sheets[index][0], good.body))
        return good

    def parts(order: str, body: Any, last: dict[str, str]) -> Iterator[Any]:
        (request,) = asked
        kind, _, number = name[0].partition("-")
        if request.do == "card" and kind == "card":
            return cut(order, body, {"head": edited(last["head"], **cards[int(number)][0])})
        index = request.round.index if request.round else 0
        if request.do == "train" and index < len(answers):
            return answers[index].messages(order, bytes(body), last["head"])
        return cut(order, body, last)

    HospitalSite.answer = answer  # type: ignore[method-assign]
    site_job.cut = parts


def _listen(folder: Path) -> None:
    """Everything that goes to the server, before it is encrypted; between a site's own processes it is not gRPC."""
    from nvflare.fuel.f3.drivers.grpc_driver import StreamConnection

    send = StreamConnection.send_frame

    def overheard(connection: StreamConnection, frame: Any) -> None:
        with (folder / f"{os.getpid()}.frames").open("ab") as file:
            file.write(bytes(frame))
        send(connection, frame)

    StreamConnection.send_frame = overheard
