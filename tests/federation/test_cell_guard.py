"""The overrides of NVIDIA FLARE that put the policy in force: who a message is from, and who acknowledges it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.conn_manager import Mode

from consilium.federation import local_socket
from consilium.federation.cell_guard import link_of, speaks_for_itself
from consilium.federation.cell_policy import Link
from tests.federation.test_cell_policy import J


def said_by(origin: str, name: str, in_context: bool = False) -> Message:
    content = Shareable()
    if in_context:
        context = FLContext()
        context.set_prop("__identity_name__", name, private=False)
        content.set_peer_context(context)
    else:
        content.set_peer_props({"__identity_name__": name})
    return Message({"cn__origin": origin}, content)


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("origin", ["ada", f"ada.{J}"])
def test_a_site_names_itself_or_is_refused(origin: str, in_context: bool) -> None:
    assert speaks_for_itself(said_by(origin, "ada", in_context))
    assert not speaks_for_itself(said_by(origin, "bea", in_context))
    assert not speaks_for_itself(said_by(origin, "../../../PWNED", in_context))


def test_what_names_nobody_is_read() -> None:
    assert speaks_for_itself(Message({"cn__origin": "ada"}, Shareable()))
    assert speaks_for_itself(Message({"cn__origin": "ada"}, b"bytes"))
    assert speaks_for_itself(said_by("server", "localhost"))  # the server has a name of its own


@pytest.mark.parametrize(
    ("scheme", "mode", "shown", "link"),
    [
        ("grpc", Mode.PASSIVE, "ada", Link(False, False, "ada")),
        ("grpc", Mode.ACTIVE, None, Link(False, True, "")),
        ("unix", Mode.PASSIVE, None, Link(True, False, "")),
        ("tcp", Mode.PASSIVE, None, Link(False, False, "")),
    ],
)
def test_a_connection_says_how_it_was_made(scheme: str, mode: Any, shown: str | None, link: Link) -> None:
    connector = SimpleNamespace(params={"scheme": scheme}, mode=mode)
    assert link_of(SimpleNamespace(connector=connector, get_conn_properties=lambda: {"peer_cn": shown})) == link


GUARDED = """
from types import SimpleNamespace
from nvflare.fuel.f3.cellnet import cell, core_cell
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from consilium.federation.cell_guard import guard_cells

before = core_cell.CoreCell._process_received_msg, core_cell.decode_payload, ByteStreamer._ack_handler
guard_cells()
guard_cells()  # once is enough
after = core_cell.CoreCell._process_received_msg, core_cell.decode_payload, ByteStreamer._ack_handler
assert not [a for a, b in zip(after, before) if a is b]
assert cell.decode_payload is core_cell.decode_payload

heard = []
ByteStreamer.tx_task_map[7] = SimpleNamespace(target="bea", handle_ack=heard.append)
for origin in ("ada", "bea"):
    ByteStreamer._ack_handler(Message({"cn__origin": origin, "sm__id": 7, "sm__em": "stop"}, None))
assert [each.get_header("cn__origin") for each in heard] == ["bea"], heard

called = []
own = SimpleNamespace(my_info=SimpleNamespace(fqcn="server"))
link = SimpleNamespace(connector=SimpleNamespace(params={"scheme": "grpc"}, mode=None), get_conn_properties=dict)
message = Message({"cn__origin": "ada", "cn__destination": "bea", "cn__msg_type": "req"}, None)
assert core_cell.CoreCell._process_received_msg(own, SimpleNamespace(name="ada"), link, message) is None
"""


def test_the_overrides_are_in_force() -> None:
    """In a process of its own: they stay for as long as it lives."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", GUARDED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused from 'ada': an acknowledgement of another's message" in done.stderr


def test_a_socket_lies_where_nobody_else_looks(tmp_path: Path) -> None:
    open_folder = tmp_path / "kit"
    open_folder.mkdir(mode=0o755)
    assert local_socket.private_folder(str(open_folder)) == open_folder
    assert stat.S_IMODE(open_folder.stat().st_mode) == 0o700
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for unusable in (str(deep), str(tmp_path / "missing"), ""):  # too long for a socket's name, not there, not said
        made = local_socket.private_folder(unusable)
        assert made not in (deep, tmp_path / "missing")
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_the_other_end_of_a_socket_is_known() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert local_socket.peer_user(ours) in (None, os.geteuid())
