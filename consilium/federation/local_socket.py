"""The connection between a participant's processes: a socket in a folder that only its own user can open.

NVIDIA FLARE would listen on a port of the machine, without encryption and for every user of the machine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

from nvflare.fuel.f3.drivers.base_driver import BaseDriver
from nvflare.fuel.f3.drivers.driver_params import DriverCap, DriverParams
from nvflare.fuel.f3.drivers.socket_conn import ConnectionHandler, SocketConnection

from consilium.federation.kit_settings import FOLDER, SCHEME

LONGEST = 100  # bytes; systems allow 104 to 108 in a socket's name


class LocalSocketServer(ThreadingUnixStreamServer):
    """Takes connections of the own user."""

    daemon_threads = True

    def __init__(self, driver: LocalSocketDriver, connector: Any) -> None:
        self.driver, self.connector, self.ssl_context = driver, connector, None
        path = Path(connector.params[DriverParams.PATH.value])
        path.unlink(missing_ok=True)  # of a process that was killed
        before = os.umask(0o177)
        try:
            super().__init__(str(path), ConnectionHandler)
        finally:
            os.umask(before)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return peer_user(request) in (None, os.geteuid())


class LocalSocketDriver(BaseDriver):  # type: ignore[misc]
    """NVIDIA FLARE's way to add a kind of connection."""

    def __init__(self) -> None:
        super().__init__()
        self.server: LocalSocketServer | None = None

    @staticmethod
    def supported_transports() -> list[str]:
        return [SCHEME]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        return {DriverCap.SEND_HEARTBEAT.value: True, DriverCap.SUPPORT_SSL.value: False}

    def listen(self, connector: Any) -> None:
        self.connector = connector
        self.server = LocalSocketServer(self, connector)
        self.server.serve_forever()

    def connect(self, connector: Any) -> None:
        self.connector = connector
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(connector.params[DriverParams.PATH.value])
        connection = SocketConnection(line, connector)
        self.add_connection(connection)
        connection.read_loop()
        self.close_connection(connection)

    def shutdown(self) -> None:
        self.close_all()
        if self.server:
            self.server.shutdown()

    @staticmethod
    def get_urls(scheme: str, resources: dict[str, Any]) -> tuple[str, str]:
        url = f"{scheme}://local{private_folder(resources.get(FOLDER, '')) / 'cell'}"
        return url, url


def private_folder(wanted: str) -> Path:
    """A folder for a socket: `wanted` (a kit, which is its owner's alone) if it can hold one, else a temporary one."""
    folder = Path(wanted)
    if wanted and len(os.fsencode(folder / "probe")) <= LONGEST:
        probe = folder / "probe"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:  # not every file system has sockets
            folder.chmod(0o700)
            probe.unlink(missing_ok=True)
            line.bind(str(probe))
            probe.unlink()
            return folder
    made = tempfile.mkdtemp(prefix="consilium-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def peer_user(line: socket.socket) -> int | None:
    """The user at the other end, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])
