"""Which messages of NVIDIA FLARE's network a process takes: what a study needs, from whom it concerns, and no more."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import ReservedKey
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType
from nvflare.fuel.f3.streaming import stream_const
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from consilium.federation import cell_guard, cell_policy, start
from consilium.federation.cell_policy import Link, address, refusal
from consilium.federation.project import ADMIN
from consilium.wires.flare import ANSWER, ORDER

J = "0b6f7f7e-6c0f-4b43-9a31-5f7a1c9d2e10"
K = "1c7f7f7e-6c0f-4b43-9a31-5f7a1c9d2e11"
INNER_ADMIN = f"_admin_{J}"
INSIDE, FROM_CHILD = Link(True, True), Link(True, False)
UP = Link(False, True)  # opened here, towards the server


def by(name: str) -> Link:
    """A connection that a participant opened to the server's port."""
    return Link(False, False, name)


def message(origin: str, destination: str, channel: str, topic: str, **more: Any) -> dict[str, Any]:
    named = {
        cell_policy.TYPE: "req",
        cell_policy.ORIGIN: origin,
        cell_policy.DESTINATION: destination,
        cell_policy.CHANNEL: channel,
        cell_policy.TOPIC: topic,
    }
    return {**named, **{getattr(cell_policy, key): value for key, value in more.items()}}


def stream(origin: str, destination: str, channel: str, topic: str, **more: Any) -> dict[str, Any]:
    return message(origin, destination, "sm__STREAM", "sm__DATA", STREAM_CHANNEL=channel, STREAM_TOPIC=topic, **more)


AUX = "aux_communication"
NEEDED = {  # a run from beginning to end: (receiver, neighbour, connection, message)
    "a site registers": ("server", "ada", by("ada"), message("ada", "server", "task", "register", CLIENT_NAME="ada")),
    "it lives": ("server", "ada", by("ada"), message("ada", "server", "task", "heart_beat")),
    "a job starts": ("ada", "server", UP, message("server", "ada", "admin", "admin")),
    "its state is told": (
        "ada",
        f"ada.{J}",
        FROM_CHILD,
        message(f"ada.{J}", "ada", "admin", "train.notify_job_status"),
    ),
    "an order leaves the job": ("server", f"server.{J}", FROM_CHILD, stream(f"server.{J}", f"ada.{J}", AUX, ORDER)),
    "an order": (f"ada.{J}", "server", UP, stream(f"server.{J}", f"ada.{J}", AUX, ORDER)),
    "an order by way of the parent": ("ada", "server", UP, stream(f"server.{J}", f"ada.{J}", AUX, ORDER)),
    "and on": (f"ada.{J}", "ada", INSIDE, stream(f"server.{J}", f"ada.{J}", AUX, ORDER)),
    "an answer": ("server", f"ada.{J}", by("ada"), stream(f"ada.{J}", f"server.{J}", AUX, ANSWER)),
    "in the job": (f"server.{J}", "server", INSIDE, stream(f"ada.{J}", f"server.{J}", AUX, ANSWER)),
    "received": ("server", f"ada.{J}", by("ada"), stream(f"ada.{J}", f"server.{J}", "return_only", f"{AUX}:{ORDER}")),
    "acknowledged": (
        "server",
        f"ada.{J}",
        by("ada"),
        message(f"ada.{J}", f"server.{J}", "sm__STREAM", "sm__ACK"),
    ),
    "not there yet": (
        *("server", "ada", by("ada")),
        message("ada", f"server.{J}", "sm__STREAM", "sm__ERROR", STREAM_FAILED=f"ada.{J}"),
    ),
    "the end": (f"ada.{J}", "ada", INSIDE, message("ada", f"ada.{J}", "client_command", "abort")),
    "farewell": ("server", f"ada.{J}", by("ada"), message(f"ada.{J}", "server", "cellnet.channel", "bye")),
    "the administrator asks": (
        "server",
        INNER_ADMIN,
        by(ADMIN),
        stream(INNER_ADMIN, "server", "hci_channel", "command"),
    ),
    "another administrator asks": (
        *("server", INNER_ADMIN, by("eva@consilium.org")),
        stream(INNER_ADMIN, "server", "hci_channel", "command"),
    ),
    "a study is sent": (
        *("server", INNER_ADMIN, Link(False, False, "eva@consilium.org", "project_admin")),
        stream(INNER_ADMIN, "server", AUX, "ObjectStreamer.Request"),
    ),
    "and is answered": (INNER_ADMIN, "server", UP, stream("server", INNER_ADMIN, "return_only", "hci_channel:command")),
    "a reply": ("server", "ada", by("ada"), message("ada", "server", "admin", "admin", TYPE="reply")),
    "could not pass it on": (
        *("server", "ada", by("ada")),
        message("ada", f"server.{J}", "", "", TYPE="return", RETURNED={cell_policy.DESTINATION: f"ada.{J}"}),
    ),
}


@pytest.mark.parametrize("what", NEEDED)
def test_what_a_study_needs_is_taken(what: str) -> None:
    assert refusal(*NEEDED[what]) == ""


HOSTILE = {
    # a neighbour
    "a shell for the neighbour": ("server", "ada", by("ada"), message("ada", "bea", "admin", "sys.shell")),
    "which arrives all the same": ("bea", "server", UP, message("ada", "bea", "admin", "admin")),
    "in the server's name": ("server", "ada", by("ada"), message("server", "bea", "admin", "admin")),
    "in a job's name": ("server", f"ada.{J}", by("ada"), message(f"server.{J}", f"bea.{J}", AUX, ORDER)),
    "in the neighbour's name": ("server", "ada", by("ada"), message("bea", "server", "task", "heart_beat")),
    "with another's certificate": ("server", "bea", by("ada"), message("bea", "server", "task", "heart_beat")),
    "another's name in a header": (
        *("server", "ada", by("ada")),
        message("ada", "server", "task", "register", CLIENT_NAME="bea"),
    ),
    "for the neighbour's job": ("server", f"ada.{J}", by("ada"), stream(f"ada.{J}", f"bea.{J}", AUX, ORDER)),
    "for another job": ("server", f"ada.{J}", by("ada"), stream(f"ada.{J}", f"server.{K}", AUX, ANSWER)),
    "as the administrator": ("server", INNER_ADMIN, by("ada"), stream(INNER_ADMIN, "server", "hci_channel", "command")),
    "commands of the administrator": ("server", "ada", by("ada"), stream("ada", "server", "hci_channel", "command")),
    "the job's own line to its parent": (
        *("server", "ada", by("ada")),
        message("ada", "server", "server_parent_listener", "update_run_status"),
    ),
    "orders to the job": ("server", "ada", by("ada"), message("ada", f"server.{J}", "server_command", "abort")),
    "an update that is not decoded ends the job": (
        *("server", f"ada.{J}", by("ada")),
        stream(f"ada.{J}", f"server.{J}", "server_command", "submit_update"),
    ),
    "an error that ends the job": (
        *("server", f"ada.{J}", by("ada")),
        message(f"ada.{J}", f"server.{J}", "sm__STREAM", "sm__ERROR", STREAM_ERROR="BlobSizeError"),
    ),
    "an error of the neighbour": (
        *("server", f"ada.{J}", by("ada")),
        message(f"ada.{J}", f"server.{J}", "sm__STREAM", "sm__ERROR", STREAM_FAILED=f"bea.{J}"),
    ),
    "the neighbour's answer": (
        *("server", "ada", by("ada")),
        message("ada", f"server.{J}", "", "", TYPE="return", RETURNED={cell_policy.DESTINATION: f"bea.{J}"}),
    ),
    "an answer of nobody": ("server", "ada", by("ada"), message("ada", "server", "", "", TYPE="return")),
    "many in one": ("server", "ada", by("ada"), message("ada", "server", "cellnet.channel", "bulk")),
    "another's farewell": ("server", "ada", by("ada"), message(f"ada.{J}", "server", "cellnet.channel", "bye")),
    "a cell's commands": ("server", "ada", by("ada"), message("ada", "server", "_net_manager", "stop")),
    "come and connect": (
        *("server", "ada", by("ada")),
        message("ada", "server", "task", "heart_beat", CONNECT_TO="tcp://elsewhere:1"),
    ),
    "a third kind": ("server", "ada", by("ada"), message("ada", "server", "task", "heart_beat", TYPE="push")),
    "a name with a path": ("server", "../x", by("../x"), message("../x", "server", "task", "register")),
    "a name with a dot": ("server", "ada.x", by("ada"), message("ada.x", "server", "task", "register")),
    "a name that is a number": ("server", "ada", by("ada"), {cell_policy.ORIGIN: 7, cell_policy.DESTINATION: "server"}),
    "nothing at all": ("server", "ada", by("ada"), {}),
    # a user of the same machine
    "through the inner socket as the server": ("bea", "server", FROM_CHILD, message("server", "bea", "admin", "admin")),
    "as another's job": ("bea", f"ada.{J}", FROM_CHILD, message(f"ada.{J}", "bea", "admin", "admin")),
    "on a connection it did not open": ("bea", "server", by("server"), message("server", "bea", "admin", "admin")),
    "from within to a neighbour": ("bea", f"bea.{J}", FROM_CHILD, message(f"bea.{J}", "ada", "admin", "admin")),
    "a neighbour as its own server": ("bea", "ada", UP, message("ada", "bea", "admin", "admin")),
    # the server
    "the server and the cell itself": ("bea", "server", UP, message("server", "bea", "_net_manager", "change_root")),
    "for someone else": ("bea", "server", UP, message("server", "ada", "admin", "admin")),
    "the job by the parent": (f"bea.{J}", "server", UP, message("server", f"bea.{J}", "client_command", "abort")),
    "an event of its choice": (f"bea.{J}", "server", UP, stream(f"server.{J}", f"bea.{J}", AUX, "fed.event")),
    "to the administrator": (INNER_ADMIN, "server", UP, stream("server", INNER_ADMIN, AUX, "ObjectStreamer.Request")),
    # the administrator
    "a study of one who watches": (
        *("server", INNER_ADMIN, Link(False, False, "max@consilium.org", "watcher")),
        stream(INNER_ADMIN, "server", AUX, "ObjectStreamer.Request"),
    ),
    "an administrator of elsewhere": (
        *("server", INNER_ADMIN, by("max@example.org")),
        stream(INNER_ADMIN, "server", "hci_channel", "command"),
    ),
    "the administrator to a site": ("server", INNER_ADMIN, by(ADMIN), message(INNER_ADMIN, "bea", "admin", "admin")),
    "to a job": ("server", INNER_ADMIN, by(ADMIN), stream(INNER_ADMIN, f"server.{J}", "server_command", "abort")),
    "with a site's channel": ("server", INNER_ADMIN, by(ADMIN), message(INNER_ADMIN, "server", "task", "heart_beat")),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_everything_else_is_refused(what: str) -> None:
    assert refusal(*HOSTILE[what])


def test_no_site_can_speak_to_another_whatever_it_writes() -> None:
    """All kinds of messages between all kinds of cells of two sites, at every cell that could carry them."""
    names = ["ada", f"ada.{J}", f"ada.{K}"]
    targets = ["bea", f"bea.{J}", f"bea.{K}", INNER_ADMIN]
    channels = [("admin", "admin"), (AUX, ORDER), ("client_command", "abort"), ("return_only", "x"), ("task", "quit")]
    tried = 0
    for kind in ("req", "reply", "return"):
        for channel, topic in channels:
            for origin in (*names, "server", f"server.{J}"):
                for target in targets:
                    for peer in names:
                        for built in (message, stream):
                            sent = built(origin, target, channel, topic, TYPE=kind)
                            tried += 1
                            assert refusal("server", peer, by("ada"), sent), sent
    assert tried == 3 * 5 * 5 * 4 * 3 * 2


def test_names_of_cells_are_taken_apart() -> None:
    assert address("server") == cell_policy.Address("server", "server", "server")
    assert address(f"ada.{J}") == cell_policy.Address(f"ada.{J}", "site_job", "ada", J)
    assert address(INNER_ADMIN) == cell_policy.Address(INNER_ADMIN, "admin", ADMIN)
    for name in (
        "",
        ".",
        "ada.",
        f".{J}",
        f"ada.{J}.x",
        f"ada.{J} ",
        "a b",
        "_admin_x",
        "ada/..",
        None,
        b"ada",
        "ada\n",
    ):
        assert address(name) is None, name


def test_the_words_are_those_of_the_installed_engine() -> None:
    """If NVIDIA FLARE calls a header otherwise, the policy would look at nothing."""
    headers = MessageHeaderKey
    assert (cell_policy.TYPE, cell_policy.ORIGIN) == (headers.MSG_TYPE, headers.ORIGIN)
    assert (cell_policy.DESTINATION, cell_policy.CHANNEL) == (headers.DESTINATION, headers.CHANNEL)
    assert (cell_policy.TOPIC, cell_policy.CONNECT_TO) == (headers.TOPIC, headers.CONN_URL)
    assert cell_policy.RETURNED == headers.ORIGINAL_HEADERS
    assert (MessageType.REQ, MessageType.REPLY, MessageType.RETURN) == ("req", "reply", "return")
    stream_headers = stream_const.StreamHeaderKey
    assert (cell_policy.STREAM_CHANNEL, cell_policy.STREAM_TOPIC) == (stream_headers.CHANNEL, stream_headers.TOPIC)
    assert cell_policy.STREAM_FAILED == stream_headers.FAILED_DESTINATION
    assert cell_policy.STREAM_ERROR == stream_headers.ERROR_TYPE
    assert (cell_policy.STREAM, cell_policy.DATA) == (stream_const.STREAM_CHANNEL, stream_const.STREAM_DATA_TOPIC)
    assert cell_policy.STREAM_REPLIES == (stream_const.STREAM_ACK_TOPIC, stream_const.STREAM_ERROR_TOPIC)
    assert (cell_policy.ANSWERS, cell_policy.AUX) == (CellChannel.RETURN_ONLY, CellChannel.AUX_COMMUNICATION)
    assert cell_policy.CLIENT_NAME == CellMessageHeaderKeys.CLIENT_NAME
    assert cell_guard.IDENTITY == ReservedKey.IDENTITY_NAME
    assert all(topic.startswith(cell_policy.OURS) for topic in (ORDER, ANSWER))


def test_a_site_keeps_only_the_processors_of_a_job() -> None:
    known = {type(each).__name__ for each in ClientRequestProcessors.request_processors}
    assert set(start.SITE_PROCESSORS) <= known
    assert "ShellCommandProcessor" in known - set(start.SITE_PROCESSORS)  # what NVIDIA FLARE would answer
