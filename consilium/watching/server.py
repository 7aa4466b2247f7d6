"""Serves the page of a run: HTML, JSON, Prometheus metrics. It only reads.

It listens on 127.0.0.1. On another address it asks for a token, because the page names sites and scores.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import socket
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from consilium.errors import RunError, UserError, WorkError
from consilium.reports.rendering import shared_text
from consilium.watching.sources import StatusSource
from consilium.watching.status import metrics_of

LOCAL = ("127.0.0.1", "localhost", "::1")


class WatchServer(ThreadingHTTPServer):
    """One page about one run."""

    daemon_threads = True

    def __init__(self, source: StatusSource, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        if not _loopback(host) and len(token) < 16:
            raise RunError(
                f"the page would be open to everyone who reaches {host}: give --token with at least 16 characters, or "
                "leave --host out to serve this machine alone."
            )
        self.source, self.token = source, token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            remedy = "--host, an address of this machine" if foreign else "--port"
            raise RunError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {remedy}.") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/" + (f"?token={self.token}" if self.token else "")


@cache
def _page() -> bytes:
    """With the style that reports have."""
    page = (files("consilium.watching") / "page.html").read_text(encoding="utf-8")
    return page.replace("/* the style of all pages */", shared_text("style.css")).encode()


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "consilium"
    sys_version = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._allowed():
            return
        try:
            if path == "/":
                self._answer(_page(), "text/html; charset=utf-8")
            elif path == "/status.json":
                self._answer(
                    json.dumps(self.server.source.status().to_json(), allow_nan=False).encode(), "application/json"
                )
            elif path == "/metrics":
                text = metrics_of(self.server.source.status())
                self._answer(text.encode(), "text/plain; version=0.0.4; charset=utf-8")
            elif path == "/examples.json":
                found = self.server.source.examples()
                told = {"captions": [caption for caption, _ in found.pictures], "legend": found.legend}
                self._answer(json.dumps(told).encode(), "application/json")
            elif path.startswith("/examples/"):
                self._picture(path.removeprefix("/examples/"))
            else:
                self._answer(b"there is no such page\n", "text/plain", HTTPStatus.NOT_FOUND)
        except (UserError, WorkError) as error:
            self._answer(f"{error}\n".encode(), "text/plain; charset=utf-8", HTTPStatus.SERVICE_UNAVAILABLE)

    def _picture(self, number: str) -> None:
        pictures = self.server.source.examples().pictures
        if number.isdecimal() and int(number) < len(pictures):
            self._answer(pictures[int(number)][1], "image/svg+xml")
        else:
            self._answer(b"there is no such picture\n", "text/plain", HTTPStatus.NOT_FOUND)

    def _allowed(self) -> bool:
        """Whether a reader knows the token, and asks this machine by its own name: a hostile page may use another."""
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0].strip("[]")
        bound = str(self.server.server_address[0])
        if _loopback(bound) and host not in LOCAL:
            self._answer(b"ask for 127.0.0.1\n", "text/plain", HTTPStatus.MISDIRECTED_REQUEST)
            return False
        if not self.server.token:
            return True
        given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        given = given or (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.server.token.encode()):
            return True
        self._answer(b"the token is missing or wrong\n", "text/plain", HTTPStatus.FORBIDDEN)
        return False

    def _answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; img-src 'self' data:; connect-src 'self'; "
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'",
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # the terminal shows the run
