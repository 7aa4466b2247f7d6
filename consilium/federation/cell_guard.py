"""Puts `cell_policy` in force in this process: small overrides of NVIDIA FLARE 2.9, each with a test that pins it."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3 import communicator
from nvflare.fuel.f3.cellnet import cell, core_cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.sfm.conn_manager import Mode, NullConnection
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey

from consilium.errors import WorkError
from consilium.federation.cell_policy import ORIGIN, Link, address, refusal
from consilium.federation.kit_settings import SCHEME
from consilium.federation.local_socket import LocalSocketDriver

IDENTITY = "__identity_name__"  # how NVIDIA FLARE calls the sender's name within a message
OFTEN = 1000  # a refusal is logged the first time, and then every so many
EXPECTED = {  # the parameters of what is overridden: another version of NVIDIA FLARE must not run unguarded
    "receive": (CoreCell._process_received_msg, ["self", "endpoint", "connection", "message"]),
    "decode": (core_cell.decode_payload, ["message", "encoding_key", "fobs_ctx"]),
    "acknowledge": (ByteStreamer._ack_handler, ["message"]),
}
ROLE, SERIAL = "consilium_role", "consilium_serial"  # what `connection_guard` has read on a connection's certificate
MOST_ADMINS = 1000  # sessions that are remembered
ADMIN_LINKS: dict[str, Link] = {}  # the connection of every administrator's cell that this server has heard
log = logging.getLogger("consilium.refused")


class _Refusals:
    """Says what was refused, without letting whoever sends it fill the disk."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def note(self, peer: str, why: str) -> None:
        with self._lock:
            if len(self._counts) > OFTEN:
                self._counts.clear()
            self._counts[peer, why] += 1
            count = self._counts[peer, why]
        if count == 1 or count % OFTEN == 0:
            log.warning("refused from %.80r: %.200s (%d times)", peer, why, count)


def require_parameters(expected: Mapping[str, tuple[Any, list[str]]]) -> None:
    """End here if what is to be overridden is not what it was when the overrides were written."""
    for what, (function, wanted) in expected.items():
        if list(inspect.signature(function).parameters) != wanted:
            raise WorkError(f"this version of NVIDIA FLARE has another '{what}'; consilium needs NVIDIA FLARE 2.9.")


@functools.cache
def guard_cells() -> None:
    """From now on every message that reaches this process is checked before NVIDIA FLARE reads it."""
    require_parameters(EXPECTED)
    communicator.driver_mgr.register(LocalSocketDriver)
    refusals = _Refusals()
    receive, decode, acknowledge = (function for function, _ in EXPECTED.values())

    def checked_receive(own: Any, endpoint: Any, connection: Any, message: Any) -> Any:
        name = own.my_info.fqcn
        if connection is None or isinstance(connection, NullConnection):  # to itself
            why = "" if endpoint.name == name else "no connection"
        else:
            link = link_of(connection)
            why = refusal(name, endpoint.name, link, message.headers or {})
            if not why and name == "server" and not link.inside and endpoint.name.startswith("_admin_"):
                why = _remember(endpoint.name, link)
        if why:
            refusals.note(endpoint.name, why)
            return None
        return receive(own, endpoint, connection, message)

    def checked_decode(message: Any, *arguments: Any, **named: Any) -> Any:
        done = decode(message, *arguments, **named)
        if not speaks_for_itself(message):
            refusals.note(str(message.get_header(ORIGIN)), "a name that is not the certificate's")
            raise ValueError("a sender that gives another's name")
        return done

    def checked_acknowledge(message: Any) -> None:
        with ByteStreamer.map_lock:
            task = ByteStreamer.tx_task_map.get(message.get_header(StreamHeaderKey.STREAM_ID))
        if task is None or task.target == message.get_header(ORIGIN):
            acknowledge(message)
        else:
            refusals.note(str(message.get_header(ORIGIN)), "an acknowledgement of another's message")

    CoreCell._process_received_msg = checked_receive
    core_cell.decode_payload = cell.decode_payload = checked_decode
    ByteStreamer._ack_handler = staticmethod(checked_acknowledge)


def _remember(cell: str, link: Link) -> str:
    """Who is behind an administrator's cell; why not, if another was there before."""
    if len(ADMIN_LINKS) >= MOST_ADMINS and cell not in ADMIN_LINKS:
        ADMIN_LINKS.pop(next(iter(ADMIN_LINKS)))
    return "" if ADMIN_LINKS.setdefault(cell, link) == link else "another administrator's session"


def link_of(connection: Any) -> Link:
    """How a connection was made, and whose certificate is at its other end."""
    params = connection.connector.params
    facts = connection.get_conn_properties() or {}
    shown = facts.get(DriverParams.PEER_CN.value)
    return Link(
        inside=params.get(DriverParams.SCHEME.value) == SCHEME,
        opened_here=connection.connector.mode == Mode.ACTIVE,
        certificate=shown if isinstance(shown, str) else "",
        role=facts.get(ROLE, ""),
        serial=facts.get(SERIAL, 0),
    )


def speaks_for_itself(message: Any) -> bool:
    """Whether a site's message names the site on the certificate as its sender, where it names one."""
    origin = address(message.get_header(ORIGIN))
    if origin is None or not origin.kind.startswith("site") or not isinstance(message.payload, Shareable):
        return True
    props, context = message.payload.get_peer_props(), message.payload.get_peer_context()
    named = {
        props.get(IDENTITY) if isinstance(props, dict) else None,
        context.get_identity_name() if isinstance(context, FLContext) else None,
    }
    return named <= {None, "", origin.side}
