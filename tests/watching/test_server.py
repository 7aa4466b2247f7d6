"""The page of a run: what it serves, and to whom."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consilium.errors import RunError
from consilium.watching.server import WatchServer
from consilium.watching.sources import CurrentExamples, RunSource
from tests.watching.journals import write_run

PICTURE = b"<svg/>"


class Pictured(RunSource):
    """A run with one picture."""

    def examples(self) -> CurrentExamples:
        return CurrentExamples((("ada, by the global model", PICTURE),), (("disc", "#56B4E9"),))


@contextmanager
def serving(source: RunSource, token: str = "") -> Iterator[WatchServer]:
    with WatchServer(source, token=token) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: WatchServer, path: str, **headers: str) -> tuple[int, bytes]:
    port = server.server_address[1]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_page_json_metrics_and_pictures(tmp_path: Path) -> None:
    with serving(Pictured(write_run(tmp_path / "run"))) as server:
        status, page = get(server, "")
        assert (
            status == 200
            and b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")
            and b"https://" not in page
        )
        assert json.loads(get(server, "status.json")[1])["round"] == 2
        assert b'consilium_round{run="run"} 2.0' in get(server, "metrics")[1]
        assert json.loads(get(server, "examples.json")[1]) == {
            "captions": ["ada, by the global model"],
            "legend": [["disc", "#56B4E9"]],
        }
        assert get(server, "examples/0") == (200, PICTURE)
        for wrong in ("examples/1", "examples/../../study.toml", "study.toml", "examples/x"):
            assert get(server, wrong)[0] == 404


def test_a_damaged_journal_is_a_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "journal.jsonl").write_text("no event\n")
    with serving(RunSource(run)) as server:
        status, text = get(server, "status.json")
        assert status == 503 and b"is damaged" in text


def test_a_token_is_asked_for(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    with serving(RunSource(write_run(tmp_path / "run")), token) as server:
        assert get(server, "status.json")[0] == 403
        assert get(server, "status.json?token=wrong")[0] == 403
        assert get(server, f"status.json?token={token}")[0] == 200
        assert get(server, "metrics", Authorization=f"Bearer {token}")[0] == 200
        assert server.url.endswith(f"?token={token}")


def test_another_name_for_this_machine_is_refused(tmp_path: Path) -> None:
    """A page elsewhere could otherwise read this one through the reader's browser (DNS rebinding)."""
    with serving(RunSource(write_run(tmp_path / "run"))) as server:
        assert get(server, "status.json", Host="evil.example:80")[0] == 421
        assert get(server, "status.json", Host="localhost:1")[0] == 200


def test_an_open_address_needs_a_token(tmp_path: Path) -> None:
    source = RunSource(write_run(tmp_path / "run"))
    for token in ("", "short"):
        with pytest.raises(RunError, match="give --token with at least 16 characters"):
            WatchServer(source, "0.0.0.0", 0, token)
    with serving(source) as server, pytest.raises(RunError, match="choose another --port"):
        WatchServer(source, "127.0.0.1", server.server_address[1])


def test_a_name_that_is_no_address_is_not_taken_for_a_port(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="choose another --host"):
        WatchServer(RunSource(write_run(tmp_path / "run")), "no.such.host.invalid", 0, "0123456789abcdef")


def test_an_address_of_ipv6(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as line:
        try:
            line.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with WatchServer(RunSource(write_run(tmp_path / "run")), "::1") as server:
        assert server.url == f"http://[::1]:{server.server_address[1]}/"


def test_it_only_reads(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.iterdir()}
    with serving(RunSource(run)) as server:
        for path in ("", "status.json", "metrics"):
            get(server, path)
        port = server.server_address[1]
        for verb in ("POST", "PUT", "DELETE"):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/", data=b"x", method=verb)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == 501
            refused.value.close()
    assert {path: path.read_bytes() for path in run.iterdir()} == before
