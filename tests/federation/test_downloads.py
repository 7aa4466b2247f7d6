"""A hostile server cannot make the administrator write outside the folder it fetches into."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.hci.client.file_transfer import FileTransferModule

from consilium.errors import RunError
from consilium.federation.admin import AdminClient
from consilium.federation.downloads import copy_plain, guard_downloads, inside

NAMES = ["..", ".", "", "../up", "a/b", "/abs", "a\\b", "x" * 300, "a\0b", None, 7, "-rf", ".hidden"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_from_outside_is_one_plain_part(tmp_path: Path, name: object) -> None:
    with pytest.raises(RunError, match="cannot be used"):
        inside(tmp_path, name)


def test_a_link_in_the_target_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(tmp_path)
    with pytest.raises(RunError, match="link"):
        inside(tmp_path / "runs", "run")


class Served(AdminClient):
    """An administrator whose server sends what the test put into a folder."""

    @contextmanager
    def _results(self, job: str) -> Iterator[Path]:
        yield Path(job)

    def successor(self, job: str) -> str | None:
        return None


def sent(place: Path, run: Any) -> AdminClient:
    place.mkdir(exist_ok=True)
    (place / "outcome.json").write_text(json.dumps({"run": run, "state": "finished", "said": ""}))
    return Served(None, ())


@pytest.mark.parametrize("run", ["../outside", "/etc", "..", ["a"], None])
def test_fetch_refuses_a_run_named_like_a_path(tmp_path: Path, run: Any) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("theirs")
    with pytest.raises(RunError):
        sent(tmp_path / "sent", run).fetch(str(tmp_path / "sent"), tmp_path / "mine" / "runs")
    assert not (tmp_path / "mine" / "outside").exists()


def test_fetch_refuses_links_and_writes_nothing(tmp_path: Path) -> None:
    admin = sent(tmp_path / "sent", "run")
    (tmp_path / "sent" / "run").mkdir()
    (tmp_path / "sent" / "run" / "summary.json").symlink_to("/etc/hostname")
    with pytest.raises(RunError, match="not a plain file"):
        admin.fetch(str(tmp_path / "sent"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_link_among_what_was_fetched_before_is_not_written_through(tmp_path: Path) -> None:
    for name in ("sent", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "sent" / "journal.jsonl").write_text("new")
    (tmp_path / "victim").write_text("old")
    (tmp_path / "here" / "journal.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(RunError, match="link"):
        copy_plain(tmp_path / "sent", tmp_path / "here")
    assert (tmp_path / "victim").read_text() == "old"


@pytest.mark.parametrize(
    ("transfer", "file"),
    [("1", "../../outside"), ("1", "/etc/passwd"), ("x/../../../up", "a.zip"), ("1", "a/../../b"), ("1", "")],
)
def test_a_file_the_server_offers_stays_in_the_download_folder(tmp_path: Path, transfer: str, file: str) -> None:
    guard_downloads()
    guard_downloads()  # once is enough
    module = FileTransferModule(str(tmp_path), str(tmp_path))
    written: list[str] = []

    def server_execute(command: str, cmd_ctx: Any) -> dict[str, Any]:
        written.append(cmd_ctx.requester.file_name)
        return {"status": "SUCCESS"}

    context = SimpleNamespace(get_command_entry=lambda: None, get_command=lambda: "")
    context.get_api = lambda: SimpleNamespace(fire_session_event=lambda *_: None, server_execute=server_execute)
    context.set_requester = lambda requester: setattr(context, "requester", requester)
    args = ["pull_binary_file", "server", transfer, "ref", "job", file]
    if file:
        with pytest.raises(RunError):
            module.pull_binary_file(args, context)
        assert written == []
    else:
        module.pull_binary_file([*args[:5], "workspace.zip"], context)
        assert written == [os.path.join(str(tmp_path), "job__1", "workspace.zip")]
