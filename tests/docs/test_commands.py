"""Every block of commands is run by a test, or marked as not run with the reason.

A mark is a comment on the line above the block: `<!-- run -->`, `<!-- run: slow -->` (in the slow tier) or
`<!-- not run: why -->`. A page can have one mark for all other blocks: `<!-- commands of this page: not run: why -->`.
"""

from __future__ import annotations

import glob
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import write_study
from tests.cli.terminal import call
from tests.docs.pages import ROOT, SHELL, Block, all_blocks, commands

BLOCKS = [block for block in all_blocks(*SHELL) if any(commands(block)) or "make " in block.text]
RUN = [
    pytest.param(block, id=str(block), marks=[pytest.mark.slow] if block.mark == "run: slow" else [])
    for block in BLOCKS
    if block.mark in ("run", "run: slow")
]


@pytest.fixture
def place(federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the data and images that the pages name."""
    for name in ("small", "mine", "retina"):
        shutil.copytree(federation, tmp_path / "data" / name)
    shutil.copytree(federation / "ada/images", tmp_path / "scans")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def runs(federation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs under the names that the pages use."""
    folder = tmp_path_factory.mktemp("finished")
    for name, method in {"retina-fedsm-s0-1a2b3c4d": "fedsm", "retina-fedavg-s0-3c4d": "fedavg"}.items():
        study = write_study(folder / f"{method}.toml", federation, method)
        done = call("run", study, "--workers", 0, "--runs", folder / "made", "--json")
        shutil.copytree(done.document["run"], folder / "runs" / name)
    return folder / "runs"


def test_every_block_of_commands_is_run_or_marked() -> None:
    bare = [str(block) for block in BLOCKS if not block.mark]
    assert bare == [], "write <!-- run --> or <!-- not run: why --> on the line above these blocks"


def test_some_blocks_are_run() -> None:
    assert len(RUN) >= 12


@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("block", RUN)
def test_marked_blocks_run(block: Block, place: Path, request: pytest.FixtureRequest) -> None:
    if "studies/" in block.text:
        (place / "studies").symlink_to(ROOT / "studies")
    if " runs" in block.text:
        shutil.copytree(request.getfixturevalue("runs"), place / "runs")
    for words in commands(block):
        spread = [part for word in words for part in (sorted(glob.glob(word)) if "*" in word else [word])]
        done = call(*spread)
        assert done.status == 0, f"consilium {' '.join(spread)}: {done.err}"
