"""Who is connected to the server, by certificate: revoked ones are refused, and cut off without a restart.

TLS lets in whoever has a certificate of the authority, until it ends. Here every connection is held against the
authority's list in the server's kit (`revoked.pem`), which is read again when it changes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.base_driver import BaseDriver
from nvflare.fuel.f3.sfm.conn_manager import ConnManager, Mode
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.login import LoginModule
from nvflare.private.fed.server.training_cmds import TrainingCommandModule

from consilium.errors import DataError
from consilium.federation.cell_guard import ADMIN_LINKS, ROLE, SERIAL, require_parameters
from consilium.federation.cell_policy import ORIGIN, Link
from consilium.federation.certificates import REVOKED, Certificate, certificate_of, read_revoked, shown
from consilium.federation.events import note
from consilium.federation.kit_settings import SCHEME
from consilium.federation.metrics import connections, latest_run
from consilium.federation.places import CONNECTED, STANDING
from consilium.files import write_json

LOOK = 1.0  # seconds between two looks at the list
EXPECTED = {  # as in `cell_guard`
    "connection": (BaseDriver.add_connection, ["self", "conn"]),
    "end of a connection": (BaseDriver.close_connection, ["self", "conn"]),
    "handshake": (ConnManager.update_endpoint, ["self", "sfm_conn", "data"]),
    "login": (LoginModule.handle_cert_login, ["self", "conn", "args"]),
    "command": (LoginModule.pre_command, ["self", "conn", "args"]),
    "status": (TrainingCommandModule.check_status, ["self", "conn", "args"]),
}
log = logging.getLogger("consilium.refused")


@dataclass(frozen=True)
class Held:
    """An open connection."""

    line: Any
    certificate: Certificate
    since: float  # seconds since 1970


class Connections:
    """The open connections of a server, and the list that they are held against."""

    def __init__(self, kit: Path) -> None:
        """Raises DataError if the kit's list cannot be used: a server does not start without it."""
        self._kit = kit
        self._revoked = read_revoked(kit)
        self._seen = self._stamp()
        self._failed: tuple[int, ...] | None = None  # a list that could not be read, and was told of
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()

    def take(self, line: Any) -> None:
        """Hold a new connection, or refuse it: CommError."""
        try:
            certificate = shown(line.context.auth_context()["x509_pem_cert"][0])
        except Exception as error:
            raise CommError(CommError.ERROR, f"a connection without a certificate that can be read: {error}") from error
        line.get_conn_properties().update({ROLE: certificate.role, SERIAL: certificate.serial})
        with self._lock:
            new = not self._has(certificate.name)  # a site's job has a connection of its own
            self._held[line.name] = Held(line, certificate, time.time())
        self.look()  # it is held already: a list that comes just now cuts it off
        if certificate.serial in self._revoked.serials:
            with self._lock:
                self._held.pop(line.name, None)
            log.warning("refused from %.80r: its certificate %x was revoked", certificate.name, certificate.serial)
            note(self._kit, "refused", name=certificate.name, why="its certificate was revoked")
            raise CommError(CommError.ERROR, "its certificate was revoked")
        with self._lock:
            self._write()
        if new:
            note(self._kit, "connected", name=certificate.name, expires=certificate.expires.isoformat())

    def drop(self, line: Any) -> None:
        with self._lock:
            gone = self._held.pop(line.name, None)
            self._write()
            last = gone is not None and not self._has(gone.certificate.name)
        if gone and last:
            note(self._kit, "disconnected", name=gone.certificate.name)

    def _has(self, name: str) -> bool:
        return any(held.certificate.name == name for held in self._held.values())

    def _write(self) -> None:
        """For `status` and the metrics: who is connected, since when, and until when its certificate is valid."""
        held = sorted(self._held.values(), key=lambda one: one.since, reverse=True)  # the oldest of each name stays
        facts = {
            one.certificate.name: {"since": one.since, "expires": one.certificate.expires.timestamp()} for one in held
        }
        with contextlib.suppress(OSError):
            write_json(facts, self._kit / CONNECTED, durable=False, private=True)

    def look(self) -> None:
        """Read the list again if it has changed, and cut off whom it names."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            found = read_revoked(self._kit)
        except (DataError, OSError) as error:  # and tried again: who may read it can change without its content
            if stamp is None or stamp != self._failed:
                log.error("the list of revoked certificates stays as it was: %s", error)
            self._failed = stamp
            return
        self._seen = stamp
        if found.number < self._revoked.number:
            log.error("the list of revoked certificates stays as it was: the new one is older, or gone")
            return
        self._revoked = found
        with self._lock:
            gone = [held for held in self._held.values() if held.certificate.serial in found.serials]
        for held in gone:
            log.warning("cut off %.80r: its certificate was revoked", held.certificate.name)
            note(self._kit, "cut off", name=held.certificate.name, why="its certificate was revoked")
            held.line.close()

    def keep_looking(self) -> None:
        def loop() -> None:
            while True:
                time.sleep(LOOK)
                try:
                    self.look()
                except Exception:  # the next look must come, whatever this one met
                    log.exception("looking for revoked certificates failed")

        threading.Thread(target=loop, name="revoked", daemon=True).start()

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = (self._kit / REVOKED).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def guard_connections(kit: Path) -> None:
    """From now on every connection that reaches this server is held against the list of revoked certificates."""
    require_parameters(EXPECTED)
    held = Connections(kit)
    _follow(lambda line: held.take(line) if _from_outside(line) else None, held.drop)
    _report(kit)
    held.keep_looking()


def watch_server(kit: Path) -> None:
    """From now on a site writes down whether it is connected with the server.

    NVIDIA FLARE opens a line before it calls, and another every few seconds while nobody answers: only a line where the
    server has answered counts.
    """
    require_parameters(EXPECTED)
    opened: set[str] = set()
    answered: dict[str, float] = {}  # since when, seconds since 1970
    lock = threading.Lock()
    greet = ConnManager.update_endpoint

    def write(name: str, since: float | None) -> None:
        with lock:
            before = bool(answered)
            if since is None:
                opened.discard(name)
                answered.pop(name, None)
            elif name in opened:  # it may have closed meanwhile
                answered.setdefault(name, since)
            with contextlib.suppress(OSError):
                facts = {"server": {"since": min(answered.values())}} if answered else {}
                write_json(facts, kit / CONNECTED, durable=False, private=True)
            if before != bool(answered):
                note(kit, "connected" if answered else "disconnected", name="server")

    def greeted(manager: Any, line: Any, data: Any) -> None:
        greet(manager, line, data)
        write(line.conn.name, time.time())

    ConnManager.update_endpoint = greeted
    _follow(
        lambda line: None if _inside(line) else opened.add(line.name),
        lambda line: write(line.name, None),
    )


def _follow(opened: Callable[[Any], None], closed: Callable[[Any], None]) -> None:
    """Call these when a connection opens, which they may refuse, and when it has closed."""
    add, close = BaseDriver.add_connection, BaseDriver.close_connection

    def checked_add(driver: Any, conn: Any) -> None:
        opened(conn)
        add(driver, conn)

    def checked_close(driver: Any, conn: Any) -> None:
        closed(conn)
        close(driver, conn)

    BaseDriver.add_connection, BaseDriver.close_connection = checked_add, checked_close


def _report(kit: Path) -> None:
    """Add to what an administrator's `check_status` shows: since when sites are connected, and their last rounds."""
    check = TrainingCommandModule.check_status

    def with_connections(module: Any, conn: Any, args: Any) -> None:
        check(module, conn, args)
        run = latest_run(kit)
        table = conn.append_table(["site"], name=STANDING)
        for name, facts in connections(kit).items():
            row = {"name": name, **facts, "round": run.get("sites", {}).get(name, 0), "run": run.get("run", "")}
            table.add_row([name], meta=row)
        expires = certificate_of(kit).expires.timestamp()
        table.add_row(["server"], meta={"name": "server", "since": 0.0, "expires": expires, "round": 0, "run": ""})

    TrainingCommandModule.check_status = with_connections


def _from_outside(line: Any) -> bool:
    return bool(line.connector.mode == Mode.PASSIVE and not _inside(line))


def _inside(line: Any) -> bool:
    return bool(line.connector.params.get("scheme") == SCHEME)


def bind_sessions() -> None:
    """An administrator acts with the certificate of its connection, and with no other that it may hold.

    Otherwise the key of a revoked certificate, or a session from before, could be used over another connection.
    """
    log_in, allow = LoginModule.handle_cert_login, LoginModule.pre_command

    def bound_log_in(module: Any, conn: Any, args: Any) -> None:
        given = (conn.get_prop(ConnProps.CMD_HEADERS) or {}).get("cert")
        link = _admin_link(conn)
        try:
            serial = shown(given.encode() if isinstance(given, str) else bytes(given or b"")).serial
        except Exception:
            serial = 0
        if link is None or link.serial != serial:
            log.warning("refused a login with a certificate that is not the connection's")
            conn.append_string("REJECT: the certificate is not the connection's")
            return
        log_in(module, conn, args)

    def bound_allow(module: Any, conn: Any, args: Any) -> bool:
        if not allow(module, conn, args):
            return False
        user, link = conn.get_prop(ConnProps.USER_NAME), _admin_link(conn)
        role = conn.get_prop(ConnProps.USER_ROLE)
        if user is None or (link is not None and (link.certificate, link.role) == (user, role)):  # None: a login
            return True
        conn.append_error("not authenticated - the session is another's")
        return False

    LoginModule.handle_cert_login, LoginModule.pre_command = bound_log_in, bound_allow


def _admin_link(conn: Any) -> Link | None:
    """The connection of a command's sender; of one that came with an upload, the connection of its session."""
    request, session = conn.get_prop(ConnProps.REQUEST), conn.get_prop(ConnProps.SESSION)
    cell = request.get_header(ORIGIN) if request else session.origin_fqcn
    return ADMIN_LINKS.get(str(cell))
