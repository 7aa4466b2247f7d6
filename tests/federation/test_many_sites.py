"""More sites than NVIDIA FLARE's default of 100: settings, and as many open connections at a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import grpc
from nvflare.fuel.f3.drivers.grpc.streamer_pb2_grpc import StreamerStub
from nvflare.private.fed.server.client_manager import ClientManager

from consilium.federation.admin import open_admin
from consilium.federation.kit_settings import MOST
from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from tests.federation.conftest import Running
from tests.federation.test_strangers import port

MANY = 120


def test_a_servers_kit_has_room_for_any_number_of_sites(tmp_path: Path) -> None:
    kit = make_kits(Project("eyes", "localhost", 8002, ("ada",)), tmp_path / "kits")["server"]
    server = json.loads((kit / "local/resources.json").read_text())["servers"][0]
    assert ClientManager("eyes", 1, server["max_num_clients"]).max_num_clients == MOST > 10_000
    lines = json.loads((kit / "local/comm_config.json").read_text())["grpc"]
    assert lines["max_workers"] == MOST  # a site needs a thread for itself, and one for its job
    assert dict(map(tuple, lines["options"])).keys() == {  # else NVIDIA FLARE would fall back to gRPC's 4 MB
        "grpc.max_send_message_length",
        "grpc.max_receive_message_length",
    }


@pytest.mark.slow
def test_kits_are_made_for_many_sites(tmp_path: Path) -> None:
    names = tuple(f"site{number:03}" for number in range(MANY))
    kits = make_kits(Project("eyes", "localhost", 8002, names), tmp_path / "kits")
    assert len({(kits[name] / "startup/client.crt").read_bytes() for name in names}) == MANY


@pytest.mark.federation
@pytest.mark.xdist_group("federation")
@pytest.mark.timeout(300)
def test_an_administrator_gets_in_beside_many_open_connections(running: Running) -> None:
    """With 100 threads, the 101st connection would wait for ever."""
    kit = running.local.kits["ada"] / "startup"
    files = [(kit / name).read_bytes() for name in ("rootCA.pem", "client.key", "client.crt")]
    where = f"localhost:{port(running.local.kits)}"
    over = threading.Event()

    def nothing() -> Iterator[Any]:
        over.wait()
        yield from ()

    channels = [
        grpc.secure_channel(where, grpc.ssl_channel_credentials(*files), [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(MANY)
    ]
    try:
        calls = [StreamerStub(channel).Stream(nothing()) for channel in channels]
        for channel in channels:
            grpc.channel_ready_future(channel).result(120)
        log = running.local.kits["server"] / "process.log"
        running.wait_until(lambda: log.read_text().count("SSL ada] is created") >= MANY, "all connections to be taken")
        with open_admin(running.local.kits["admin"], 60.0) as admin:
            assert "ada" in admin.connected()
        assert not any(call.done() for call in calls)
    finally:
        over.set()
        for channel in channels:
            channel.close()
