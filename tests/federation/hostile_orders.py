"""What a server asks of a hospital that it should not: patched into the job's process of `hostile_server.py`.

Before the third order of a run to train come orders that no study asks for; after the fourth the same round is asked
for once more with other weights, and after the first scoring other models are to be scored. Every line of the file
says what was asked and what came back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.shareable import Shareable

from consilium import packet_files
from consilium.federation import server_job
from consilium.federation.parts import PART
from consilium.messages import Request
from consilium.site import Round
from tests.federation.lies import read_body

Asked = tuple[str, Request, bytes]
SCORINGS = 12  # models that are to be scored, one after the other


def with_nan(name: str, request: Request, body: bytes) -> Asked:
    """One NaN, in the order's last floating-point tensor or in one that no network has."""
    packet = read_body(body)
    spoilt = next((n for n in reversed(list(packet.tensors)) if packet.tensors[n].is_floating_point()), name)
    tensors = {**packet.tensors, name or spoilt: torch.full((3,), torch.nan)}
    if not name:
        tensors[spoilt] = packet.tensors[spoilt].clone()
        tensors[spoilt].reshape(-1)[0] = torch.nan
    names = {**request.tensors, **({name: "ab" * 16} if name else {})}
    said = f"NaN in {name or 'a tensor of the network'}"
    return said, replace(request, tensors=names), packet_files.to_bytes(packet._replace(tensors=tensors))


def shaken(body: bytes, seed: int) -> bytes:
    """Other weights than those that were merged."""
    packet = read_body(body)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: t + torch.randn(t.shape, generator=draw) if t.is_floating_point() else t
        for name, t in packet.tensors.items()
    }
    return packet_files.to_bytes(packet._replace(tensors=tensors))


def orders(request: Request, body: bytes) -> Iterator[Asked]:
    """Orders in place of the third round's."""
    assert request.round is not None
    yield "an order larger than the study needs", request, bytes(PART + (4 << 20))
    yield with_nan("", request, body)
    yield with_nan("global/unused", request, body)
    yield "another run", replace(request, run="other-s0-0123456789"), body
    yield "a second run of the study", replace(request, run=f"{request.run}-9"), body
    yield "another method", replace(request, method="local"), body
    yield "a round before", replace(request, round=replace(request.round, index=0, step=0, before=0)), body
    yield "a round beyond the study", replace(request, round=Round(700, "train", 700, 900)), body
    yield "a score of another run", replace(request, do="score", run="other-s0-0123456789"), body
    yield "no order at all", replace(request, do="shell"), body
    yield "a folder elsewhere", replace(request, run="../../memory"), body


def become(file: Path) -> None:
    ask = server_job._FlareLink.ask

    def note(what: str, answer: Any) -> None:
        line = {"what": what, "error": answer.head.error, "bytes": len(answer.body)}
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def hostile(line: Any, site: str, request: Request, body: Any, seconds: float, room: int) -> Any:
        index = request.round.index if request.round else -1
        if request.do == "train" and index == 2:
            huge = Shareable()
            huge.update({"order": "e" * 32, "at": 0, "of": 1 << 60, "body": bytes(PART)})
            line._send(site, huge, 20.0)  # an order of which more never comes
            for what, asked, sent in orders(request, bytes(body)):
                note(what, ask(line, site, asked, sent, 60.0, room))
        answer = ask(line, site, request, body, seconds, room)
        if request.do == "train" and index == 3:
            note("the last round once more", ask(line, site, request, shaken(bytes(body), 0), 60.0, room))
        if request.do == "score" and not request.full:
            packet = read_body(bytes(body))
            for seed in range(SCORINGS if packet.tensors else 0):
                note("a score of another model", ask(line, site, request, shaken(bytes(body), seed), 60.0, room))
        return answer

    server_job._FlareLink.ask = hostile
