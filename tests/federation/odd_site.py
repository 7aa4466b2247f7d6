"""What a site's processes are made to do by `hooks/sitecustomize.py`: send rubbish, or write down all they send."""

from __future__ import annotations

import os
import tempfile
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
    from nvflare.apis.shareable import Shareable

    from consilium.federation.hospital_site import HospitalSite
    from consilium.federation.site_job import SiteJob
    from consilium.messages import Request
    from consilium.wires.flare import Answer
    from tests.federation.test_desk_and_wire import spoiled

    sound, post = HospitalSite.answer, SiteJob._post

    def answer(site: HospitalSite, request: Request, body: Any) -> Answer:
        good = sound(site, request, body)
        if request.do != "train" or request.round is None:
            return good
        with tempfile.TemporaryDirectory() as folder:
            return replace(good, body=spoiled(request.round.index, bytes(good.body), Path(folder)))

    def twice(job: SiteJob, engine: Any, part: Shareable, end: float) -> bool:
        old = Shareable()
        old.update({**part, "order": "an order of long ago"})
        post(job, engine, old, end)
        return post(job, engine, part, end)

    HospitalSite.answer = answer  # type: ignore[method-assign]
    SiteJob._post = twice  # type: ignore[method-assign]


def _listen(folder: Path) -> None:
    """Everything that goes to the server, before it is encrypted; between a site's own processes it is not gRPC."""
    from nvflare.fuel.f3.drivers.grpc_driver import StreamConnection

    send = StreamConnection.send_frame

    def overheard(connection: StreamConnection, frame: Any) -> None:
        with (folder / f"{os.getpid()}.frames").open("ab") as file:
            file.write(bytes(frame))
        send(connection, frame)

    StreamConnection.send_frame = overheard
