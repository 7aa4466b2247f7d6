"""What all tests share: the toy federation, a cache of their own, one pool of worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.toy import write_organs, write_toy


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["CONSILIUM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "federation")


@pytest.fixture(scope="session")
def organs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites that annotate a disc, a square, and both."""
    return write_organs(tmp_path_factory.mktemp("organs") / "true", splits=("train",) * 8 + ("valid", "valid", "test"))


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """Two worker processes; tests that use it carry the mark xdist_group("pool"), so that there is one pool."""
    from consilium.wires.processes import Pool

    with Pool(2) as pool:
        yield pool
