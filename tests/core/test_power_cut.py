"""A power cut: a file system whose disk is copied while it is mounted has lost all that was not synced.

The tests need the rights to mount an image (root on Linux, as in a container of one's own); elsewhere they are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from consilium.files import read_json
from consilium.run_folder import RunFolder
from consilium.store import DamagedError, MemoryStore, read_document
from consilium.tree import message
from consilium.weights import Weights
from tests.toy import toy_study, write_toy

pytestmark = pytest.mark.federation  # it starts processes and mounts images
SIZE = 48 << 20
Cut = Callable[..., Path]


@message
class Memory:
    own: Weights
    step: int


def weights(round: int) -> Weights:
    return Weights({"w": torch.full((50_000,), float(round))})


# ---------------------------------------------------------------------------------------------- what is written


def remember(place: Path, rounds: int, durable: bool) -> None:
    """A site that trains on and on."""
    memories = MemoryStore(place / "memory", "hk", durable, private=True)
    for round in range(rounds):
        memories.put(round, Memory(weights(round), round), keep=(round - 1,))


def commit(place: Path, rounds: int, durable: bool) -> None:
    """A server that merges on and on; its events are told before each state."""
    from consilium.site import Round

    folder = RunFolder.create(toy_study(write_toy(place / "federation")), place / "runs")
    for round in range(rounds):
        folder.journal.notes([("train", {"round": round + 1, "site": "hk"})], durable=True)
        folder.states.commit(Round(round, "train", round, rounds), Memory(weights(round), round), {"hk": round})


def main() -> None:
    {"remember": remember, "commit": commit}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "durable")


# ---------------------------------------------------------------------------------------------- the power cut


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[Cut]:
    """Let a process write to a file system of its own, cut its power when it has ended, and mount what is left."""
    mounted: list[Path] = []

    def mount(image: Path, options: str) -> Path:
        place = image.with_suffix(".mounted")
        place.mkdir()
        subprocess.run(["mount", "-o", f"loop,{options}", image, place], check=True, capture_output=True)
        mounted.append(place)
        return place

    def made(what: str, rounds: int, durable: str = "durable") -> Path:
        image, left = tmp_path / "disk.img", tmp_path / "left.img"
        with image.open("wb") as file:
            file.truncate(SIZE)
        try:
            subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
            place = mount(image, "commit=300")  # it writes only what it is told to
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no image can be mounted here: {error}")
        command = [sys.executable, "-c", "from tests.core.test_power_cut import main; main()"]
        subprocess.run([*command, what, place, str(rounds), durable], check=True, env={**os.environ})
        shutil.copyfile(image, left)  # what the disk holds now
        return mount(left, "rw")

    yield made
    for place in reversed(mounted):
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("rounds", [2, *(pytest.param(rounds, marks=pytest.mark.slow) for rounds in (1, 5))])
def test_a_hospitals_memory_outlives_a_power_cut(cut: Cut, rounds: int) -> None:
    """`put` has returned, so that the server may merge the round: its memory is there, and the one before."""
    memories = MemoryStore(cut("remember", rounds) / "memory", "hk")
    for round in range(max(0, rounds - 2), rounds):
        memory = memories.at(round, Memory)
        assert memory is not None and memory.step == round
        assert memory.own.digest == weights(round).digest
    assert {path.stat().st_mode & 0o077 for path in (memories.folder, *memories.folder.rglob("*"))} == {0}


@pytest.mark.slow
def test_without_syncing_it_would_be_lost(cut: Cut) -> None:
    """What shows that the test above can fail, and that what is left then is noticed."""
    memories = MemoryStore(cut("remember", 3, "careless") / "memory", "hk")
    if memories.folder.exists() and memories.rounds():
        with pytest.raises(DamagedError):
            memories.at(2, Memory)


@pytest.mark.parametrize("rounds", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_servers_round_outlives_a_power_cut(cut: Cut, rounds: int) -> None:
    """State, journal and study: everything that going on needs."""
    (run,) = (cut("commit", rounds) / "runs").iterdir()
    folder = RunFolder.open(run)
    events = [event["round"] for event in folder.events() if event["event"] == "train"]
    assert events == list(range(1, rounds + 1))
    facts = read_document(run / "server" / f"{rounds - 1:05d}.json")
    assert read_json(run / "server" / f"{rounds - 1:05d}.json")["round"] == rounds - 1
    assert folder.states._store.get(facts["server"], Memory).own.digest == weights(rounds - 1).digest
