"""Who has no certificate of the consortium's own authority does not get in."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from consilium.federation.kits import make_kits
from consilium.federation.project import Project
from tests.federation.conftest import SITES, Running

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(300)]
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # how every gRPC connection begins


def port(kits: dict[str, Path]) -> int:
    import json

    facts = json.loads((kits["server"] / "startup/fed_server.json").read_text())
    return int(facts["servers"][0]["service"]["target"].split(":")[1])


def greeted(where: int, kit: Path | None, own: Path | None) -> bool:
    """Whether the server speaks HTTP/2 with whoever shows the certificate of `own`; without `kit`, in plain text."""
    with socket.create_connection(("127.0.0.1", where), timeout=100) as plain:
        plain.settimeout(10)
        try:
            if kit is None:
                plain.sendall(HELLO)
                return b"\x04\x00" in plain.recv(64)[3:5]
            context = ssl.create_default_context(cafile=str(kit / "startup/rootCA.pem"))
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # the stranger does not mind whom it meets
            context.set_alpn_protocols(["h2"])
            if own is not None:
                context.load_cert_chain(own / "startup/client.crt", own / "startup/client.key")
            with context.wrap_socket(plain, server_hostname="localhost") as secure:
                secure.sendall(HELLO)
                return len(secure.recv(64)) >= 9
        except (ssl.SSLError, ConnectionError, TimeoutError):
            return False


def test_strangers_are_refused(running: Running, tmp_path: Path) -> None:
    where = port(running.local.kits)
    others = make_kits(Project("others", "localhost", where, SITES), tmp_path / "others")
    ada = running.local.kits["ada"]
    assert greeted(where, ada, ada)
    assert not greeted(where, ada, others["ada"])  # the right name, another authority
    assert not greeted(where, ada, None)  # no certificate
    assert not greeted(where, None, None)  # no encryption
