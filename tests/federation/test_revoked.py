"""In a running federation: a site joins, is cut off when its certificate is revoked, and comes back with a new one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from consilium.errors import RunError
from consilium.federation.admin import open_admin
from consilium.federation.kits import add_kit, renew_kit, revoke_kit
from consilium.federation.project import Project
from consilium.federation.supervisor import end, prepare, start
from tests.federation.conftest import SITES, Running
from tests.federation.test_strangers import port
from tests.toy import toy_study

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("federation"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def file(running: Running) -> Iterator[Path]:
    """The project file; the federation, which other tests share, has its own members again afterwards."""
    path = running.local.folder / "local.toml"
    Project("local", "localhost", port(running.local.kits), SITES).write(path)
    facts = {kit / "consilium.json": (kit / "consilium.json").read_text() for kit in running.local.kits.values()}
    yield path
    for known, text in facts.items():
        known.write_text(text)


@pytest.fixture
def dan(running: Running) -> Iterator[str]:
    """A site that joins a running federation, on ada's data."""
    hospital = running.local.hospital("dan")
    hospital.parent.mkdir(parents=True)
    hospital.write_text(running.local.hospital("ada").read_text().replace('site = "ada"', 'site = "dan"'))
    yield "dan"
    running.local.kits.pop("dan", None)
    if process := running.local.processes.pop("dan", None):
        end(process)


def said(running: Running, name: str, word: str) -> int:
    return (running.local.kits[name] / "process.log").read_text().count(word)


def test_a_site_joins_is_cut_off_and_comes_back_while_the_server_runs(running: Running, file: Path, dan: str) -> None:
    kits = running.local.folder / "kits"
    running.local.kits[dan] = add_kit(file, dan, "site", kits)
    (kits / "dan/process.log").touch()
    running.start(dan)
    server = running.local.processes["server"].pid
    revoke_kit(file, dan, kits)
    running.wait_until(lambda: said(running, "server", "cut off 'dan'"), "dan's connection to be cut")
    running.wait_until(lambda: said(running, "server", "refused from 'dan'"), "dan's next connection to be refused")
    end(running.local.processes.pop(dan))
    before = said(running, dan, "Successfully registered")
    running.local.processes[dan] = start(kits / dan, *prepare(kits / dan, "site", running.local.hospital(dan)))
    refused = said(running, "server", "refused from 'dan'")
    running.wait_until(lambda: said(running, "server", "refused from 'dan'") > refused, "a new process to be refused")
    assert said(running, dan, "Successfully registered") == before
    end(running.local.processes.pop(dan))
    renew_kit(file, dan, kits)
    running.start(dan)
    assert said(running, dan, "Successfully registered") == before + 1
    assert running.local.processes["server"].pid == server
    assert set(SITES) <= set(running.connected())  # the others have noticed nothing


def test_an_administrator_who_watches_sees_everything_and_changes_nothing(
    running: Running, file: Path, federation: Path
) -> None:
    kits = running.local.folder / "kits"
    study = toy_study(
        federation, study__name="watched", study__rounds=2, study__sites=["ada", "bea"], study__deadline=60.0
    )
    kit = add_kit(file, "max", "watch", kits)
    with open_admin(add_kit(file, "eva", "submit", kits)) as eva:
        job = eva.follow(eva.submit(study))
        assert eva.outcome(job)["state"] == "finished"
        stopped = eva.submit(replace(study, plan=replace(study.plan, rounds=200)))
        eva.stop(stopped)
    with open_admin(kit) as watcher:
        assert set(SITES) <= set(watcher.connected())
        assert job in {str(one["job_id"]) for one in watcher.jobs()}
        assert [event["event"] for event in watcher.journal(job)][-1] == "finish"
        for attempt in (lambda: watcher.submit(study), lambda: watcher.stop(job), lambda: watcher.resume(stopped)):
            with pytest.raises(RunError, match="for watching only"):
                attempt()
