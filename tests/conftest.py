"""What all tests share: the toy federation, a cache of their own, one pool of worker processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: toys are too small to share between threads

import pytest

TESTS = Path(__file__).parent
ONE_PROCESS = ("analysis", "architecture", "cli", "reports")  # folders whose files share runs or parsed sources


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file, or of a folder with shared runs, go to one process: what they share is made once."""
    for item in items:
        place = item.path.relative_to(TESTS)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(place.parts[0] if place.parts[0] in ONE_PROCESS else str(place)))
        if getattr(config.option, "loadgroup", False) and hasattr(item, "_id"):
            # xdist 3.8 writes the group to `_nodeid`, which pytest reads no longer since 9.2: groups would be ignored
            mark = item.get_closest_marker("xdist_group")
            item._id = type(item._id).parse(f"{item.nodeid}@{mark.args[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Look for garbage seldom, and never among modules and collected tests, which stay: it took a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["CONSILIUM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A test does not outlive a power cut, and waiting takes a seventh of a small run; what is killed loses nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.toy import write_toy  # not above: the process that only hands out tests need not load torch

    return write_toy(tmp_path_factory.mktemp("toy") / "federation")


@pytest.fixture(scope="session")
def organs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites that annotate a disc, a square, and both."""
    from tests.toy import write_organs

    return write_organs(tmp_path_factory.mktemp("organs") / "true", splits=("train",) * 8 + ("valid", "valid", "test"))


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """Two worker processes, shared by all tests of one process of pytest."""
    from consilium.wires.processes import Pool

    with Pool(2) as pool:
        yield pool


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but neither laid out nor drawn, which takes most of a page's time: for tests of its words."""
    from matplotlib.figure import Figure

    blank = b'<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt"/>'
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda figure: None)
    monkeypatch.setattr(Figure, "savefig", lambda figure, stream, **how: stream.write(blank))
