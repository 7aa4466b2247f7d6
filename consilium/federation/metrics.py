"""Health and metrics of one participant, read from its own files: Prometheus text on loopback.

The supervisor serves them, so that they can be read also while the process it watches is being started again.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from consilium.errors import DataError, RunError, StudyError
from consilium.federation.certificates import certificate_of
from consilium.federation.places import CONNECTED, runs_of
from consilium.files import read_json, read_line

Samples = list[tuple[str, Mapping[str, str], float]]
HELP = {
    "up": "Whether the participant's process runs.",
    "starts_total": "How often it was started.",
    "certificate_expiry_timestamp_seconds": "When the certificate ends.",
    "connected": "Whether a participant is connected, as this one sees it.",
    "connected_since_timestamp_seconds": "Since when it is.",
    "round": "The last round of the newest run, among those of its study.",
    "rounds": "The rounds that it shall have.",
    "site_round": "The last round that a site's update was merged in.",
    "left_messages_total": "Messages that left the hospital.",
    "left_bytes_total": "Their bytes.",
    "left_round": "The round of the last one.",
}


def latest_run(kit: Path) -> dict[str, Any]:
    """The newest run of a server: `run`, `round`, `rounds` and the last round of each site; empty if there is none."""
    journals = sorted(runs_of(kit).glob("*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
    if not journals:
        return {}
    facts: dict[str, Any] = {"run": journals[-1].parent.name, "round": 0, "rounds": 0, "sites": {}}
    asides: Sequence[str] = ()  # phases whose rounds are not among the study's
    for text in journals[-1].read_text(encoding="utf-8").splitlines():
        try:
            event = read_line(text)
        except ValueError:
            continue  # cut short; the run itself looks more closely
        if event["event"] == "start":
            facts["rounds"], asides = event.get("rounds", 0), event.get("aside", ())
        elif event["event"] == "round" and event.get("phase") not in asides:
            facts["round"] = event["round"]
        elif event["event"] == "train" and event.get("phase") not in asides:
            facts["sites"][event["site"]] = event["round"]
    return facts


def connections(kit: Path) -> dict[str, dict[str, Any]]:
    """Whom a participant is connected with: by name, `since` and `expires` in seconds since 1970."""
    with contextlib.suppress(RunError):
        found: dict[str, dict[str, Any]] = read_json(kit / CONNECTED)
        return found
    return {}


class LeftLog:
    """Sums over a hospital's log of what left; what was read once is not read again."""

    def __init__(self, memory: Path) -> None:
        self._path = memory / "left.jsonl"
        self._at = 0
        self.messages, self.bytes, self.round = 0, 0, 0

    def read(self) -> LeftLog:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with contextlib.suppress(ValueError, AttributeError, TypeError):
                    facts = json.loads(line)
                    self.bytes += int(facts.get("bytes", 0))
                    self.messages += 1
                    self.round = int(facts.get("round") or self.round)
        return self


class Participant:
    """One server or site, as its supervisor sees it."""

    def __init__(self, kit: Path, name: str, memory: Path | None = None) -> None:
        self.kit, self.name = kit, name
        self.up, self.starts = False, 0  # the supervisor sets them
        self._left = LeftLog(memory) if memory else None

    def healthy(self) -> bool:
        """Its process runs; and a site is connected with the server."""
        return self.up and (self._left is None or bool(connections(self.kit)))

    def samples(self) -> Samples:
        here = connections(self.kit) if self.up else {}
        known = read_json(self.kit / "consilium.json")["sites"] if self._left is None else ["server"]
        found: Samples = [("up", {}, self.up), ("starts_total", {}, self.starts)]
        with contextlib.suppress(DataError):
            found.append(("certificate_expiry_timestamp_seconds", {}, certificate_of(self.kit).expires.timestamp()))
        for name in sorted({*known, *here}):
            found.append(("connected", {"participant": name}, name in here))
            if name in here:
                found.append(("connected_since_timestamp_seconds", {"participant": name}, here[name]["since"]))
                if expires := here[name].get("expires"):
                    found.append(("certificate_expiry_timestamp_seconds", {"participant": name}, expires))
        return found + list(self._work())

    def _work(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        if self._left is not None:
            left = self._left.read()
            yield "left_messages_total", {}, left.messages
            yield "left_bytes_total", {}, left.bytes
            yield "left_round", {}, left.round
        elif run := latest_run(self.kit):
            yield "round", {"run": run["run"]}, run["round"]
            yield "rounds", {"run": run["run"]}, run["rounds"]
            for site, number in sorted(run["sites"].items()):
                yield "site_round", {"run": run["run"], "participant": site}, number

    def text(self) -> str:
        """As Prometheus reads it."""
        lines, told = [], ""
        for name, labels, value in sorted(self.samples(), key=lambda sample: sample[0]):
            full = f"consilium_{name}"
            if full != told:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} {kind}"]
                told = full
            pairs = {"name": self.name, **labels}
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs.items())
            lines.append(f"{full}{{{inside}}} {float(value):.15g}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def address_of(text: str) -> tuple[str, int]:
    """`PORT` on loopback, or `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise StudyError(f"--metrics {text}: write a port, or an address and a port such as 127.0.0.1:9100.")
    return host or "127.0.0.1", int(port)


@contextlib.contextmanager
def served(participant: Participant, where: tuple[str, int]) -> Iterator[int]:
    """Serve `/metrics` and `/health` while the block runs; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._say(200, participant.text(), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == "/health":
                good = participant.healthy()
                self._say(200 if good else 503, "ok\n" if good else "not connected\n", "text/plain; charset=utf-8")
            else:
                self._say(404, "there are /metrics and /health\n", "text/plain; charset=utf-8")

        def _say(self, status: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer(where, Handler)
    except OSError as error:
        raise StudyError(f"--metrics {where[0]}:{where[1]}: {error.strerror}; choose another port.") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
