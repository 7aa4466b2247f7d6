"""Who is back is known from the server's own list of checked certificates, never from what a message claims."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import RunProcessKey

from consilium.federation.returning import Returning


class Context:
    """The server when a registration was handled: `claimed` is what the message said of its sender."""

    def __init__(self, kit: Path, claimed: str, participants: dict[str, str], registered: dict[str, str]) -> None:
        clients = {token: SimpleNamespace(name=name) for token, name in registered.items()}
        started = {token: SimpleNamespace(name=name) for token, name in participants.items()}
        workspace = SimpleNamespace(get_root_dir=lambda: str(kit))
        self.engine = SimpleNamespace(
            run_processes={"job": {RunProcessKey.PARTICIPANTS: started}},
            client_manager=SimpleNamespace(clients=clients),
            get_workspace=lambda: workspace,
        )
        self.claimed = claimed

    def get_engine(self) -> Any:
        return self.engine

    def get_peer_context(self) -> Any:
        return SimpleNamespace(get_identity_name=lambda: self.claimed)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    place = tmp_path / "a/b/c/server"
    place.mkdir(parents=True)
    (place / "consilium.json").write_text(json.dumps({"name": "server", "sites": ["ada", "bea"]}))
    return place


def marked(kit: Path) -> list[str]:
    return sorted(path.name for path in kit.rglob("returned/job/*"))


JOB = {"t1": "ada", "t2": "bea"}


@pytest.mark.parametrize("claimed", ["../../../PWNED", "/nowhere/PWNED", "bea", "", "nobody"])
def test_a_claimed_name_marks_nobody(kit: Path, claimed: str, tmp_path: Path) -> None:
    """ada registers in someone's name, or FLARE refused the registration: nothing changed in the server's list."""
    before = sorted(tmp_path.rglob("*"))
    Returning().handle_event(EventType.CLIENT_REGISTER_PROCESSED, Context(kit, claimed, JOB, JOB))  # type: ignore[arg-type]
    assert marked(kit) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_site_with_a_new_token_is_back_whatever_it_claims(kit: Path) -> None:
    context = Context(kit, "bea", JOB, {"t3": "ada", "t2": "bea"})
    Returning().handle_event(EventType.CLIENT_REGISTER_PROCESSED, context)  # type: ignore[arg-type]
    assert marked(kit) == ["ada"]


def test_a_name_that_is_no_site_of_the_project_leaves_no_file(kit: Path) -> None:
    context = Context(kit, "cid", JOB, {**JOB, "t3": "../../cid"})
    Returning().handle_event(EventType.CLIENT_REGISTER_PROCESSED, context)  # type: ignore[arg-type]
    assert marked(kit) == []
