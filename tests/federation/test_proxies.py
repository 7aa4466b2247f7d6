"""A hospital's way out: a proxy that passes the connection on works; one that opens it is refused."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import grpc

from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from consilium.federation.supervisor import end, prepare, start
from tests.federation.conftest import SITES, Running
from tests.federation.test_strangers import port

pytestmark = [
    *(pytest.mark.federation, pytest.mark.slow),
    *(pytest.mark.xdist_group("federation"), pytest.mark.timeout(300)),
]


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def serve(line: socket.socket, asked: list[str], inspector: ssl.SSLContext | None) -> None:
    """One CONNECT: pass bytes on, or answer in the server's place with a certificate of one's own."""
    with contextlib.suppress(OSError), line:
        request = line.recv(65536).decode()
        asked.append(request.split()[1])
        line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        if inspector:
            with inspector.wrap_socket(line, server_side=True) as opened:
                opened.recv(1)
            return
        host, _, number = asked[-1].rpartition(":")
        with socket.create_connection((host, int(number))) as out:
            back = threading.Thread(target=pump, args=(out, line), daemon=True)
            back.start()
            pump(line, out)
            back.join()


@contextmanager
def proxy(inspector: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy of loopback: its address, and what it was asked for."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    threading.Thread(target=serve, args=(line, asked, inspector), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)


def test_a_site_connects_through_a_proxy_that_passes_it_on(running: Running) -> None:
    kit = running.local.kits["ada"]
    log, word = kit / "process.log", "Successfully registered"
    with proxy() as (address, asked):
        running.kill("ada")
        before = log.read_text().count(word)
        arguments, variables = prepare(kit, "site", running.local.hospital("ada"))
        running.local.processes["ada"] = start(kit, arguments, {**variables, "https_proxy": address, "no_proxy": ""})
        running.wait_until(lambda: log.read_text().count(word) > before, "ada to connect through the proxy")
        assert asked[0] == f"localhost:{port(running.local.kits)}"
        end(running.local.processes["ada"])
    running.start("ada")  # as it was


def test_a_proxy_that_opens_the_connection_is_refused(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate has the right name, and not the consortium's authority."""
    others = make_kits(Project("others", "localhost", port(running.local.kits), SITES), tmp_path / "others")
    inspector = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inspector.load_cert_chain(others["server"] / "startup/server.crt", others["server"] / "startup/server.key")
    inspector.set_alpn_protocols(["h2"])
    kit = running.local.kits["ada"] / "startup"
    files = [(kit / name).read_bytes() for name in ("rootCA.pem", "client.key", "client.crt")]

    def ready(address: str) -> bool:
        monkeypatch.setenv("https_proxy", address)
        monkeypatch.delenv("no_proxy", raising=False)
        with grpc.secure_channel(
            f"localhost:{port(running.local.kits)}",
            grpc.ssl_channel_credentials(*files),
            [("grpc.use_local_subchannel_pool", 1)],
        ) as channel:
            try:
                grpc.channel_ready_future(channel).result(10)
            except grpc.FutureTimeoutError:
                return False
            return True

    with proxy() as (address, asked):
        assert ready(address)
        assert asked
    with proxy(inspector) as (address, asked):
        assert not ready(address)
        assert asked
