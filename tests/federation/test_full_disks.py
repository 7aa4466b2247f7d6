"""All that a participant has lies on one disk, which is full: nothing committed is lost, and room is all it takes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from consilium import simulation
from consilium.errors import RunError
from consilium.federation.admin import AdminClient, open_admin
from consilium.federation.trial import START, settle
from tests.federation.conftest import PATIENCE, SITES, Running, digest
from tests.toy import toy_study

pytestmark = [
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.xdist_group("federation"),
    pytest.mark.timeout(900),
]


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 32 MB; needs the right to mount."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No byte left, until there is room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filler.unlink()


@dataclass(frozen=True)
class Housed(Running):
    """Server and bea each on a small disk: kit, logs, jobs and runs, and of bea also what the hospital keeps."""

    server: Path
    bea: Path


@pytest.fixture(scope="module")
def housed(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Housed]:
    place = tmp_path_factory.mktemp("housed")
    local = settle(toy_study(federation), SITES, place / "federation")
    with ExitStack() as stack:
        disks = {name: stack.enter_context(small_disk(place / f"disk-{name}")) for name in ("server", "bea")}
        for name, disk in disks.items():
            local.kits[name] = Path(shutil.move(local.kits[name], disk / "kit"))
        settings = local.hospital("bea")
        settings.write_text(settings.read_text().replace(str(local.memory("bea")), str(disks["bea"] / "memory")))
        stack.callback(local.end)
        for name in ("server", *SITES):
            local.start(name)
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(SITES, START)
        yield Housed(local, admin, disks["server"], disks["bea"])


def last_words(admin: AdminClient, job: str) -> str:
    """Why a job stopped, as the administrator is told."""
    try:
        return str(admin.outcome(job)["said"])
    except RunError as error:
        return str(error)


def test_a_site_with_a_full_disk_is_missed_until_there_is_room(
    housed: Housed, federation: Path, tmp_path: Path
) -> None:
    study = toy_study(
        federation, "scaffold", study__name="full-site", study__rounds=60, study__score_every=60, study__deadline=60.0
    )
    housed.admin.submit(study)
    housed.wait_for_round(study, 3)
    with filled(housed.bea):
        housed.wait_until(lambda: any(e["event"] == "lost" for e in housed.events(study)), "a full disk")
        missed = next(e["round"] for e in housed.events(study) if e["event"] == "lost")
        housed.wait_for_round(study, missed + 5)
    run = housed.finished(study)
    lost = [e for e in housed.events(study) if e["event"] == "lost"]
    assert {(e["site"], e["why"]) for e in lost} == {("bea", "its disk is full or cannot be written")}
    assert max(housed.rounds(study, "bea")) > max(e["round"] for e in lost)
    assert digest(simulation.run(simulation.with_attendance(study, run), tmp_path, workers=0).folder) == digest(run)


def test_a_server_with_a_full_disk_stops_the_run_and_loses_nothing(
    housed: Housed, federation: Path, tmp_path: Path
) -> None:
    study = toy_study(
        federation, "scaffold", study__name="full-server", study__rounds=60, study__score_every=60, study__deadline=60.0
    )
    job = housed.admin.submit(study)
    housed.wait_for_round(study, 3)
    with filled(housed.server):
        housed.admin.wait(job, PATIENCE)
        done = len([e for e in housed.events(study) if e["event"] == "round"])
        said = last_words(housed.admin, job)
        for _ in range(40):  # more than a page of NVIDIA FLARE's log of commands, which finds no room
            assert housed.admin.over(job)
    assert done < 60
    assert "disk is full" in said or "No space left" in said
    assert f"consilium federation resume {job}" in said
    housed.admin.resume(job)
    run = housed.finished(study)
    assert [e["round"] for e in housed.events(study) if e["event"] == "round"] == list(range(1, 61))
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)
