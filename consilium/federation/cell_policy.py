"""Which messages a process of a federation takes from which sender: everything else is refused before it is read.

NVIDIA FLARE calls a process's address in its network a cell. There are five kinds: `server`, `server.JOB`, `SITE`,
`SITE.JOB` and `_admin_…`, a session of an administrator. Whoever holds a certificate of the consortium can send any
message to any of them, and the server would pass it on. This module says what a study needs; `start` puts it in force.
Nothing here imports NVIDIA FLARE: the rules are functions of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from consilium.federation.project import ADMIN, SUBMITS, is_admin

JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # what NVIDIA FLARE calls a job
_ADMIN = re.compile(rf"_admin_{JOB.pattern}")
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

# Headers of a message (NVIDIA FLARE 2.9; a test compares them with the installed package).
TYPE, ORIGIN, DESTINATION = "cn__msg_type", "cn__origin", "cn__destination"
CHANNEL, TOPIC = "cn__channel", "cn__topic"
CONNECT_TO, RETURNED = "cn__conn_url", "cn__original_headers"
STREAM_CHANNEL, STREAM_TOPIC = "sm__ch", "sm__tp"
STREAM_ERROR, STREAM_FAILED = "sm__et", "sm__fd"
CLIENT_NAME = "client_name"

STREAM, DATA, ANSWERS = "sm__STREAM", "sm__DATA", "return_only"
STREAM_REPLIES = ("sm__ACK", "sm__ERROR")
OURS = "consilium."  # how the topics of our own messages begin
AUX = "aux_communication"
ANY = "*"
UPLOAD = (AUX, "ObjectStreamer.Request")  # a study on its way to the server

# By who receives and who sends: (channel, topic) of the requests that are taken.
REQUESTS: Mapping[tuple[str, str], frozenset[tuple[str, str]]] = {
    ("site", "server"): frozenset({("admin", "admin")}),  # start and stop a job; the topic proper is in the message
    ("site", "site_job"): frozenset({("admin", "train.notify_job_status")}),
    ("site_job", "site"): frozenset({("client_command", "abort")}),
    ("site_job", "server_job"): frozenset({(AUX, OURS), (AUX, "__end_run__")}),
    ("server", "site"): frozenset(
        {("task", topic) for topic in ("challenge", "register", "heart_beat", "report_job_failure", "quit")}
    ),
    ("server", "admin"): frozenset(
        {
            *(("task", "challenge"), ("task", "register"), ("hci_channel", "command")),
            *(UPLOAD, (AUX, "ObjectStreamer.Abort")),
            ("download_service__", "download_service__download"),  # results on their way to the administrator
        }
    ),
    ("server", "server_job"): frozenset(
        {("server_parent_listener", topic) for topic in ("get_clients", "heartbeat", "update_run_status")}
    ),
    ("server_job", "site_job"): frozenset(
        {(AUX, OURS), (AUX, "__job_heartbeat__"), (AUX, "__sync_runner__"), ("server_command", "get_task")}
    ),
    ("server_job", "server"): frozenset({("server_command", ANY)}),
    ("server_job", "site"): frozenset(),  # only that a job's process is not there
    ("server", "site_job"): frozenset(),  # only that it ends
    ("admin", "server"): frozenset(),
}


@dataclass(frozen=True)
class Address:
    """A cell's name, taken apart."""

    name: str
    kind: str  # server, server_job, site, site_job, admin
    side: str  # whose it is: the server, an administrator (all under one name), or a site by its name
    job: str = ""


@dataclass(frozen=True)
class Link:
    """How a message came.

    `inside` is the socket between the processes of one participant. `opened_here` says which side opened the
    connection. `certificate` is the name on the certificate that the other side showed; it is empty on connections
    opened here, where the name has been compared with the server's by TLS. `role` is an administrator's,
    and `serial` the number, from the same certificate.
    """

    inside: bool
    opened_here: bool
    certificate: str = ""
    role: str = ""
    serial: int = 0


def address(name: object) -> Address | None:
    """A cell's name taken apart; nothing if no participant has such a name."""
    if not isinstance(name, str):
        return None
    if _ADMIN.fullmatch(name):
        return Address(name, "admin", ADMIN)
    side, _, job = name.partition(".")
    if not _SITE.fullmatch(side) or (job and not JOB.fullmatch(job)) or name.endswith("."):
        return None
    kind = "server" if side == "server" else "site"
    return Address(name, f"{kind}_job" if job else kind, side, job)


def refusal(own: str, peer: str, link: Link, headers: Mapping[str, Any]) -> str:
    """Why the cell `own` does not take a message that its neighbour `peer` sent or passed on; empty if it does."""
    here, there = address(own), address(peer)
    origin, destination = address(headers.get(ORIGIN)), address(headers.get(DESTINATION))
    if here is None or there is None or origin is None or destination is None:
        return "a name that no participant has"
    if not _neighbours(here, there, link):
        return "a connection that this participant does not have"
    if not _on_the_way(here, there, origin, destination):
        return "a sender that its connection does not stand for, or a message between others"
    if CONNECT_TO in headers:
        return "an invitation to connect elsewhere"
    if origin.kind.startswith("site") and headers.get(CLIENT_NAME, origin.side) != origin.side:
        return "a name that is not the certificate's"
    if origin.kind == "admin" and link.role != SUBMITS and UPLOAD in (_named(headers), _streamed(headers)):
        return "a study from an administrator who only watches"
    return _unwanted(here, there, origin, destination, headers)


def _named(headers: Mapping[str, Any]) -> tuple[Any, Any]:
    return headers.get(CHANNEL), headers.get(TOPIC)


def _streamed(headers: Mapping[str, Any]) -> tuple[Any, Any]:
    return headers.get(STREAM_CHANNEL), headers.get(STREAM_TOPIC)


def _neighbours(here: Address, there: Address, link: Link) -> bool:
    if link.inside:  # a job's process opens the connection to its parent
        parent, child = (there, here) if link.opened_here else (here, there)
        return parent.side == child.side and not parent.job and bool(child.job)
    if here.kind == "server":
        if there.kind == "admin":
            return not link.opened_here and is_admin(link.certificate)
        return not link.opened_here and there.side not in ("", "server") and link.certificate == there.side
    return link.opened_here and there.kind == "server" and here.side != "server"


def _on_the_way(here: Address, there: Address, origin: Address, destination: Address) -> bool:
    """Sites and the administrator talk with the server and nobody else; each passes on only what is its own."""
    if origin.job and destination.job and origin.job != destination.job:
        return False
    if here.kind == "admin":
        return origin.kind == "server" and destination == here
    if here.job:
        return destination == here and (here.side == "server" or origin.side in ("server", here.side))
    if there.side == here.side:  # an own job
        to_site = here.side == "server" and destination.kind == "site_job"
        return origin == there and (destination.side in (here.side, "server") or to_site)
    if here.kind == "site":
        return origin.side == "server" and destination.side == here.side
    if there.kind == "admin":
        return origin == there and destination == here
    return origin.side == there.side and destination.side == "server"


def _unwanted(here: Address, there: Address, origin: Address, destination: Address, headers: Mapping[str, Any]) -> str:
    pair = (destination.kind, origin.kind)
    if pair not in REQUESTS and pair[::-1] not in REQUESTS:
        return "two kinds of processes that have nothing to say to each other"
    from_site = origin.kind.startswith("site") and destination.side == "server"
    kind, (channel, topic) = headers.get(TYPE), _named(headers)
    if kind == "return":
        returned = headers.get(RETURNED)
        meant = address(returned.get(DESTINATION)) if isinstance(returned, Mapping) else None
        wrong = from_site and (meant is None or meant.side != origin.side)
        return "an answer in another's name" if wrong else ""
    if kind == "reply":
        return ""
    if kind != "req":
        return f"a message of type {kind!r}"
    if channel == STREAM and topic in STREAM_REPLIES:
        failed = headers.get(STREAM_FAILED, origin.name)
        if from_site and failed != origin.name and (address(failed) or here).side != origin.side:
            return "an error in another's name"
        # NVIDIA FLARE ends the server's job if a site says that a message was too large for it.
        return "an error that would end the job" if from_site and headers.get(STREAM_ERROR) == "BlobSizeError" else ""
    if channel == STREAM:
        if topic != DATA:
            return f"the request {channel}/{topic}"
        channel, topic = _streamed(headers)
        if channel == ANSWERS:
            return ""
    if (channel, topic) == ("cellnet.channel", "bye"):
        return "" if origin == there and destination == here else "a farewell for another"
    wanted = REQUESTS.get(pair, frozenset())
    ours = isinstance(topic, str) and topic.startswith(OURS) and (channel, OURS) in wanted
    if ours or (channel, topic) in wanted or (channel, ANY) in wanted:
        return ""
    return f"the request {channel}/{topic}"
