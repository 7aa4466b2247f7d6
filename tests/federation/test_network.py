"""A site behind a link of its own (a network namespace): cut, cut for long, and slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from consilium import simulation
from consilium.federation.admin import open_admin
from consilium.federation.supervisor import prepare, start
from consilium.federation.trial import START, settle
from tests.federation.conftest import SITES, Running, digest
from tests.toy import toy_study

pytestmark = [
    pytest.mark.federation,
    pytest.mark.slow,
    pytest.mark.xdist_group("federation"),
    pytest.mark.timeout(900),
]


@dataclass(frozen=True)
class Link:
    """Two ends of a wire: ours, and that of a namespace."""

    space: str
    ours: str
    address: str

    def set(self, *words: str) -> None:
        subprocess.run(["ip", "link", "set", "dev", self.ours, *words], check=True)

    def limit(self, rate: str) -> None:
        """Slow in both directions."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kbit", "latency", "2s"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self.ours, *shape], check=True)
        subprocess.run(["tc", "-n", self.space, "qdisc", "replace", "dev", "inside", *shape], check=True)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    name = f"consilium{os.getpid()}"
    ours, net = f"ch{os.getpid()}"[:15], f"10.213.{os.getpid() % 250}"
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("a link of one's own needs the programs ip and tc")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a network namespace needs rights: {made.stderr.strip()}")
    try:
        for words in (
            f"ip link add {ours} type veth peer name inside netns {name}",
            f"ip addr add {net}.1/24 dev {ours}",
            f"ip link set {ours} up",
            f"ip -n {name} addr add {net}.2/24 dev inside",
            f"ip -n {name} link set inside up",
            f"ip -n {name} link set lo up",
        ):
            done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"a network namespace needs rights: {done.stderr.strip()}")
        yield Link(name, ours, f"{net}.1")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)  # and the link with it


@pytest.fixture(scope="module")
def apart(link: Link, federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Server and two sites here, cid behind the link."""
    local = settle(toy_study(federation), SITES, tmp_path_factory.mktemp("apart"), link.address)
    with ExitStack() as stack:
        stack.callback(local.end)
        for name in ("server", "ada", "bea"):
            local.start(name)
        arguments, variables = prepare(local.kits["cid"], "site", local.hospital("cid"))
        behind = ["ip", "netns", "exec", link.space, *arguments]
        local.processes["cid"] = start(local.kits["cid"], behind, variables)
        admin = stack.enter_context(open_admin(local.kits["admin"], START))
        admin.wait_for(SITES, START)
        yield Running(local, admin)


def test_a_short_cut_loses_nothing(apart: Running, link: Link, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "scaffold", study__name="cut", study__rounds=25, study__score_every=25, study__deadline=150.0
    )
    apart.admin.submit(study)
    apart.wait_for_round(study, 4)
    link.set("down")
    time.sleep(12)
    before = len(apart.rounds(study, "ada"))
    link.set("up")
    run = apart.finished(study)
    assert before < 25  # the round waited
    assert not [e for e in apart.events(study) if e["event"] in ("lost", "refused")]
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)


def test_a_long_cut_costs_the_rounds_it_lasts(apart: Running, link: Link, federation: Path, tmp_path: Path) -> None:
    study = toy_study(
        federation, "scaffold", study__name="long-cut", study__rounds=60, study__score_every=60, study__deadline=10.0
    )
    apart.admin.submit(study)
    apart.wait_for_round(study, 4)
    link.set("down")
    apart.wait_until(lambda: any(e["event"] == "lost" for e in apart.events(study)), "a round without cid")
    apart.wait_for_round(study, max(apart.rounds(study, "cid")) + 4)
    link.set("up")
    run = apart.finished(study)
    lost = [e["round"] for e in apart.events(study) if e["event"] == "lost"]
    assert {e["site"] for e in apart.events(study) if e["event"] == "lost"} == {"cid"}
    assert max(apart.rounds(study, "cid")) > max(lost)
    again = simulation.run(simulation.with_attendance(study, run), tmp_path, workers=0)
    assert digest(run) == digest(again.folder)


def test_a_slow_link_is_only_slow(apart: Running, link: Link, federation: Path, tmp_path: Path) -> None:
    study = toy_study(federation, "fedsm", study__name="slow-link", study__deadline=150.0)
    link.limit("256kbit")
    try:
        apart.admin.submit(study)
        run = apart.finished(study)
    finally:
        link.limit("10gbit")
    events = apart.events(study)
    assert not [e for e in events if e["event"] in ("lost", "refused")]
    carried = sum(e["bytes_down"] + e["bytes_up"] for e in events if e["event"] == "train" and e["site"] == "cid")
    assert sum(e["seconds"] for e in events if e["event"] == "round") > carried * 8 / 2 / 256_000  # both ways at once
    assert digest(run) == digest(simulation.run(study, tmp_path, workers=0).folder)
