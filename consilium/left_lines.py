"""Lines of the log of what left: of a message, and of an answer that is nothing but a reason."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consilium import packet_files
from consilium.fields import plain
from consilium.left_log import FAILED, append, locked
from consilium.messages import AnswerHead, Request
from consilium.privacy.ledger import as_json
from consilium.site import Spent
from consilium.tree import Packet

NO_RUN = "(none)"  # what was answered was no request


def line_of(request: Request, packet: Packet | None, spent: Sequence[Spent]) -> dict[str, Any]:
    """What the log says of a message."""
    size, digest = measured(packet)
    return {
        "time": now(),
        "run": request.run,
        "what": request.do,
        "round": request.round.index + 1 if request.round else None,
        "bytes": size,
        "sha256": digest,
        "spent": as_json(spent),
    }


def log_failure(memory: Path, request: Request | None, head: AnswerHead) -> AnswerHead:
    """Write down an answer that is nothing but a reason, and what was measured: it leaves too.

    Where the log cannot be written, one word leaves and nothing that was measured.
    """
    facts = {"run": request.run if request else NO_RUN, "what": FAILED, "asked": request.do if request else ""}
    number = request.round.index + 1 if request and request.round else None
    line: dict[str, Any] = {
        "time": now(),
        **facts,
        "round": number,
        "bytes": 0,
        "sha256": measured(None)[1],
        "spent": [],
    }
    try:
        with locked(memory):
            append({**line, "facts": plain(head)}, memory, durable=True, private=True)
    except OSError:
        return AnswerHead("disk")
    return head


def measured(packet: Packet | None) -> tuple[int, str]:
    """The bytes of a packet as it travels, and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    for piece in packet_files.pieces(packet) if packet is not None else ():
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
